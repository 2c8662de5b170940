"""docs/policies.md lists every policy and every option, and its code is true."""

import io
import re
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path

import msgspec

from kvplugin.policies.eviction.registry import POLICIES

PAGE = (Path(__file__).parents[2] / "docs/policies.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """Cells of the table under a heading, without its head."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[c.strip(" `") for c in line.strip("|").split(" | ")] for line in lines[2:]]


def test_every_policy_has_a_row() -> None:
    assert {row[0] for row in rows("The policies")} == set(POLICIES)


def test_every_option_has_a_row_with_its_default() -> None:
    options = {}
    for name, listed in POLICIES.items():
        module, _, kind = listed.place.rpartition(".")
        found = import_module(f"kvplugin.policies.eviction.{module}")
        struct = getattr(found, f"{kind}Options", None)
        for field in msgspec.structs.fields(struct) if struct else ():
            options[name, field.name] = repr(field.default)
    assert {(row[0], row[1]): row[2] for row in rows("Options")} == options


def test_the_code_prints_what_the_page_shows() -> None:
    found = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert found
    for source, shown in found:
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile(source, "policies.md", "exec"), {})  # noqa: S102
        assert printed.getvalue() == shown
