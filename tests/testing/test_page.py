"""The page about the laboratory: its examples are tests, and they pass."""

import re
from pathlib import Path

import pytest

import kvplugin.testing.peers  # noqa: F401 (all modules of the lab, for every example)
from kvplugin.testing import faults
from kvplugin.testing.faults import Fate

pytest_plugins = ["pytester"]

PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
EXAMPLES = re.findall(r"```py(?:thon)?\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("i", "passed"), [(0, 25), (1, 2), (2, 3), (3, 1)])
def test_the_examples_pass(pytester: pytest.Pytester, i: int, passed: int) -> None:
    assert len(EXAMPLES) == 4
    pytester.makepyfile(EXAMPLES[i])
    pytester.runpytest("-q").assert_outcomes(passed=passed)


def test_every_fate_is_on_the_page() -> None:
    fates = {name for name, value in vars(faults).items() if isinstance(value, Fate)}
    assert set(re.findall(r"^\| `([A-Z_]+)` \|", PAGE, re.MULTILINE)) == fates
