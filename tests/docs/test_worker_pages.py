"""The pages about what block ids mean in memory: their code prints what they show, and
they name every operation."""

import io
import re
from contextlib import redirect_stdout
from typing import Any

import pytest

from kvplugin.kernels import dispatch
from tests.docs.test_core_pages import CODE, ROOT, page, rows

PAGES = ["kernels.md", "pd-negotiation.md", "worker.md"]


@pytest.mark.parametrize("name", PAGES)
def test_the_code_prints_what_the_page_shows(name: str) -> None:
    names: dict[str, Any] = {}
    blocks = CODE.findall(page(name))
    assert blocks
    for source, shown in blocks:
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile(source, name, "exec"), names)  # noqa: S102
        assert printed.getvalue() == shown


def test_every_operation_stands_in_the_table() -> None:
    table = [row for row in rows("kernels.md") if len(row) == 4][1:]
    named = {name for row in table for name in re.findall(r"`(\w+)`", row[1])}
    functions = {
        name
        for name, value in vars(dispatch).items()
        if getattr(value, "__module__", "") == dispatch.__name__ and name[0].islower()
    }
    assert named == functions
    files = {
        name for row in table for name in re.findall(r"`(\w+\.py)`", row[2] + row[3])
    }
    assert [name for name in files if not (ROOT / "kernels" / name).exists()] == []


def test_the_table_of_the_worker_lists_every_file() -> None:
    table = [row for row in rows("worker.md") if len(row) == 2][1:]
    listed = [name for row in table for name in re.findall(r"`(\w+\.py)`", row[0])]
    files = {path.name for path in (ROOT / "kvplugin" / "worker").glob("*.py")}
    assert sorted(listed) == sorted(files - {"__init__.py"})
