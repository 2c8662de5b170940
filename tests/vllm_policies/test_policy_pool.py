"""The cases of `pool_cases.py` under each supported vLLM.

Both are called `vllm`, so each gets a process of its own.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.oracles import ROOT, V019, V032, environment

CASES = Path(__file__).with_name("pool_cases.py")


@pytest.mark.parametrize("version", [V032, V019])
def test_pool(version: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)],
        cwd=ROOT,
        env=environment(version),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
