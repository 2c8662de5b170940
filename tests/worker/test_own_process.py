"""Runs the tests of `own_process/`, each file in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parent / "own_process").glob("test_*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_file(file: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    env = {**os.environ, "OWN_PROCESS": "1"}
    done = subprocess.run([*command, str(file)], env=env, check=False)
    assert done.returncode == 0
