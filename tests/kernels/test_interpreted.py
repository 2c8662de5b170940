"""Runs the tests of `interpreted/` where Triton interprets its kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

FILES = sorted((Path(__file__).parent / "interpreted").glob("test_*.py"))
NO_TESTS = 5


def run(file: Path, marks: str) -> int:
    """Pytest's exit code; what it prints goes to this test's output."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([*command, "-m", marks, str(file)], env=env, check=False)
    return done.returncode


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kernels(file: Path) -> None:
    assert run(file, "not full") == 0


@pytest.mark.full
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kernels_at_length(file: Path) -> None:
    assert run(file, "full") in (0, NO_TESTS)
