"""The pages about the reference engine: their code runs or is quoted from files."""

import io
import re
import runpy
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_core_pages import CODE, ROOT, page, rows
from tests.reference.conftest import one_thread  # noqa: F401 (a fixture)

SCRIPTS = ROOT / "docs" / "examples" / "seed"
QUOTED = re.compile(r"# ((?:\w+/)+\w+\.py)\n(.*)", re.DOTALL)
CUT = "# ...\n"
"""Between two pieces that are quoted from one file."""


def blocks(name: str) -> list[tuple[str, str]]:
    """The code of a page, each with the output that follows it."""
    found = CODE.findall(page(name))
    assert found
    return found


# -- seed-examples.md -----------------------------------------------------------------


def run_script(path: Path) -> str:
    """What a script prints."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()


def test_every_script_stands_on_the_page_with_what_it_prints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    shown = dict(blocks("seed-examples.md"))
    paths = sorted(SCRIPTS.glob("*.py"))
    assert sorted(shown) == sorted(path.read_text() for path in paths)
    for path in paths:
        assert run_script(path) == shown[path.read_text()], path.name


def test_the_tables_name_every_script() -> None:
    named = {row[1].strip("`") for row in rows("seed-examples.md") if ".py" in row[1]}
    assert named == {path.name for path in SCRIPTS.glob("*.py")} - {"tiny.py"}


def test_scripts_are_short() -> None:
    sizes = {p.name: len(p.read_text().splitlines()) for p in SCRIPTS.glob("*.py")}
    assert max(sizes.values()) < 60, sizes


# -- reference-engine.md --------------------------------------------------------------


def test_the_code_prints_what_the_page_shows() -> None:
    names: dict[str, Any] = {}
    own = [block for block in blocks("reference-engine.md") if not is_quote(block[0])]
    for source, shown in own:
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile(source, "reference-engine.md", "exec"), names)  # noqa: S102
        assert printed.getvalue() == shown
    assert len(own) > 3


def is_quote(source: str) -> bool:
    return QUOTED.match(source) is not None


def quotes() -> Iterator[tuple[str, str]]:
    """Files, and pieces of them that the page shows."""
    for source, _ in blocks("reference-engine.md"):
        if quoted := QUOTED.match(source):
            path, text = quoted.groups()
            for piece in text.split(CUT):
                yield path, piece


def stands_in(piece: str, file: str) -> bool:
    """Whether these lines follow each other in the file, at whatever indentation."""
    wanted = textwrap.dedent(piece.strip("\n")).splitlines()
    lines = file.splitlines()
    return any(
        textwrap.dedent("\n".join(lines[start : start + len(wanted)])).splitlines()
        == wanted
        for start, line in enumerate(lines)
        if line.strip() == wanted[0].strip()
    )


def test_quotes_are_what_the_files_say() -> None:
    pieces = list(quotes())
    assert len({path for path, _ in pieces}) >= 8
    wrong = [
        f"{path}:\n{piece}"
        for path, piece in pieces
        if not stands_in(piece, (ROOT / path).read_text())
    ]
    assert not wrong, "\n".join(wrong)


def test_a_changed_line_would_be_seen() -> None:
    """The negative control of the comparison above."""
    path, piece = next(quotes())
    file = (ROOT / path).read_text()
    first, *rest = piece.splitlines(keepends=True)
    assert stands_in(textwrap.indent(piece, "    "), file)
    assert not stands_in("".join([first, "changed = 1\n", *rest]), file)


def test_the_table_of_steps_names_files_of_the_engine() -> None:
    table = [row for row in rows("reference-engine.md") if row[0][:1].isdigit()]
    assert len(table) == 12
    named = {name for row in table for name in re.findall(r"`([\w/]+\.py)`", row[1])}
    engine = ROOT / "integration" / "reference"
    assert [name for name in named if not (engine / name).exists()] == []
