"""Faults that users of such schedulers met: each has tests that name its number."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

SCENARIOS: Final = {
    2: "blocks of an ended request are reused under a step in flight",
    3: "windows give back what is not settled",
    5: "nothing is left to compute when the whole prompt is found elsewhere",
    16: "a rewind after a failed load writes into the null block",
    18: "block ids are taken by another group's geometry",
    19: "a failed load wakes nobody",
    20: "a waiting head holds up a loaded request",
    22: "startup and admission disagree on what fits",
    34: "an abort meets a load under way",
    45: "a state leaks between match and allocation",
    46: "a window's blocks leak, or are let go of twice",
    50: "many are preempted for blocks that are not free yet",
    65: "retries, preemptions and external hits spoil the counters",
}
TESTS: Final = Path(__file__).parents[1]
NUMBER: Final = re.compile(r"\bScenario (\d+)\b")


def named_in(folder: str) -> Iterator[tuple[str, set[int]]]:
    """Tests of a folder, and the scenarios that their docstrings name."""
    for path in sorted((TESTS / folder).glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                numbers = NUMBER.findall(ast.get_docstring(node) or "")
                yield f"{path.name}::{node.name}", set(map(int, numbers))


@pytest.mark.parametrize("number", SCENARIOS)
def test_every_scenario_is_tested(number: int) -> None:
    named = [
        test
        for folder in ("scheduler", "testing")
        for test, numbers in named_in(folder)
        if number in numbers
    ]
    assert named, f"no test says that it is about: {SCENARIOS[number]}"


def test_no_test_names_a_scenario_of_somebody_else() -> None:
    for test, numbers in named_in("scheduler"):
        assert numbers <= set(SCENARIOS), test
