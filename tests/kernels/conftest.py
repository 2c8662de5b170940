"""Fixtures for the tests of host engines."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from tests.kernels.host_helpers import needs_numba


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("numba", marks=needs_numba),
        pytest.param("numba, always streamed", marks=needs_numba),
        "numpy",
    ],
)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each engine by name; numba's both ways, whatever the size of a job."""
    name = request.param.partition(",")[0]
    with pytest.MonkeyPatch.context() as patch:
        if name != request.param:
            patch.setattr("kvplugin.kernels._numba_memory.STREAM_JOB_BYTES", 0)
        yield name


@pytest.fixture
def progress() -> Iterator[Callable[[], int]]:
    """A count that goes up only while this thread leaves the GIL of its own accord:
    the counting thread always hands the GIL back, and nobody is made to."""
    stop = threading.Event()
    ticks = count()

    def tick() -> None:
        while not stop.is_set():
            next(ticks)
            time.sleep(0)

    interval = sys.getswitchinterval()
    # before the thread starts: a wait that has begun keeps the interval it began with
    sys.setswitchinterval(60)
    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield lambda: next(ticks)
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
