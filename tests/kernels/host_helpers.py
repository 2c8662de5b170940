"""What the tests of all host engines need."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import pytest

needs_numba = pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")


def check_leaves_the_gil(
    job: Callable[[], object], held: np.ndarray, progress: Callable[[], int]
) -> None:
    """Another thread runs during a job, and none while `held` is copied by Python.

    Both should take long enough for a thread that wakes up to get a core of a busy
    machine.
    """
    for _ in range(200):
        before = progress()
        bytes(held)  # keeps the GIL
        kept = progress()
        job()
        after = progress()
        assert kept == before + 1
        if after > kept + 1:
            return
    pytest.fail("no other thread ran during 200 jobs")


def run_python(code: str, **environment: str) -> str:
    """What a new interpreter says on stderr."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr
