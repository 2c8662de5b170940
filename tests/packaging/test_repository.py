"""What a clean clone promises to whoever finds it."""

import ast
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CI = ROOT / ".ci" / "run"

MAX_LINES = 500
MAX_SCHEDULER_CODE = 1200
"""Lines of the step loop without blanks, comments and docstrings: one evening."""
DATA = {".csv", ".json", ".jsonl", ".svg"}
"""Suffixes of text that nobody reads line by line."""

HOME = re.compile(r"/(?:home|Users|root)/\w|[A-Z]:\\Users\\")
"""Paths that exist on somebody's machine only."""


@pytest.fixture(scope="module")
def texts() -> dict[Path, str]:
    """Tracked text files by path in the repository."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    texts = {}
    for name in filter(None, listing.stdout.split("\0")):
        content = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b"\0"
        if b"\0" not in content:
            texts[Path(name)] = content.decode()
    return texts


def test_ci_runs_make_test_in_the_repository(tmp_path: Path) -> None:
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\necho "$PWD: make $*"\n')
    make.chmod(0o755)
    assert os.access(CI, os.X_OK)
    result = subprocess.run(
        [CI],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        check=True,
        text=True,
    )
    assert result.stdout == f"{ROOT}: make test\n"


def test_files_that_the_package_metadata_names_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in (project["readme"], *project["license-files"]):
        assert (ROOT / name).is_file(), name


def test_no_file_is_longer_than_a_reader_has_patience(texts: dict[Path, str]) -> None:
    lines = {
        str(path): text.count("\n")
        for path, text in texts.items()
        if path.suffix not in DATA
    }
    assert {path: n for path, n in lines.items() if n > MAX_LINES} == {}


def code_lines(text: str) -> int:
    """Lines that hold code: no blanks, no comments, no docstrings."""
    tree = ast.parse(text)
    docs = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(text.splitlines(), 1)
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and i not in docs
        for i, line in lines
    )


def test_the_scheduler_can_be_read_in_an_evening(texts: dict[Path, str]) -> None:
    folder = Path("kvplugin/scheduler")
    files = {path: text for path, text in texts.items() if path.parent == folder}
    assert files
    assert sum(map(code_lines, files.values())) < MAX_SCHEDULER_CODE


def test_no_file_names_a_home_directory(texts: dict[Path, str]) -> None:
    assert [str(path) for path, text in texts.items() if HOME.search(text)] == []
