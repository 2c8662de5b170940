"""The page on replays shows what happens."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvplugin.cli.main import cli

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "replay.md").read_text()


def test_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    codes = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    for code in codes:
        exec(code, names)  # noqa: S102
    assert len(codes) == 2


def rows_of(text: str) -> list[list[str]]:
    """Cells of the table, without the time that a run took."""
    lines = [line.split() for line in text.splitlines()]
    return [cells[:-1] for cells in lines if len(cells) == 8 and cells[0].isdigit()]


@pytest.mark.full
def test_the_table_is_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    example = re.compile(r"```console\n\$ kvplugin (.*?)\n(.*?)```", re.DOTALL)
    [(command, shown)] = example.findall(PAGE)
    printed = CliRunner().invoke(cli, shlex.split(command)).stdout
    assert len(rows_of(shown)) == 8
    assert rows_of(printed) == rows_of(shown)
