"""KV memory in huge pages: real memory, as the kernel says it lies."""

import itertools
import mmap
import os
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from kvplugin.connectors.nixl.agent import HOST, Area
from kvplugin.connectors.nixl.huge_pages import (
    KERNEL,
    PIECE_BYTES,
    gather,
    in_huge_pages,
)

Bytes: TypeAlias = npt.NDArray[np.uint8]
pytestmark = pytest.mark.skipif(
    not KERNEL.exists() or "[never]" in (KERNEL / "enabled").read_text(),
    reason="the kernel gives no huge pages",
)
HUGE = int((KERNEL / "hpage_pmd_size").read_text()) if KERNEL.exists() else 0
# The calls wait for every core of the machine, and other tests keep them busy.
slow = pytest.mark.full
moves = pytest.mark.skipif(
    tuple(int(part) for part in os.uname().release.split(".")[:2]) < (6, 1),
    reason="only Linux 6.1 and newer move what is written already",
)


def lying(array: Bytes) -> int:
    return in_huge_pages(area(array))


@pytest.fixture
def memory() -> Bytes:
    """Some MiB in small pages, that begin and end in the middle of one."""
    mapping = mmap.mmap(-1, 3 * PIECE_BYTES, flags=mmap.MAP_PRIVATE)
    mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(mapping, np.uint8)[1000:-1000]


def area(array: Bytes) -> Area:
    return Area(array.ctypes.data, array.nbytes, HOST)


def fill(array: Bytes) -> bytes:
    array[:] = np.resize(np.arange(251, dtype=np.uint8), array.size)
    return array.tobytes()


@slow
@moves
def test_what_is_written_is_moved_and_stays(memory: Bytes) -> None:
    before = fill(memory)
    assert not lying(memory)
    gathered = gather([area(memory)], 60.0)
    assert memory.nbytes - 2 * HUGE <= gathered <= memory.nbytes
    assert gathered == lying(memory)
    assert memory.tobytes() == before


@slow
def test_what_is_written_later_comes_in_such(memory: Bytes) -> None:
    gather([area(memory)], 60.0)
    fill(memory)
    assert lying(memory) >= memory.nbytes - 2 * HUGE


@slow
@moves
def test_no_piece_is_begun_too_late(memory: Bytes) -> None:
    fill(memory)
    ticks = itertools.count()
    gathered = gather([area(memory)], 2.0, clock=lambda: float(next(ticks)))
    assert 0 < gathered <= PIECE_BYTES


def test_never_means_never(memory: Bytes, tmp_path: Path) -> None:
    fill(memory)
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    assert gather([area(memory)], 60.0, kernel=tmp_path) == 0
    assert gather([area(memory)], 60.0, kernel=tmp_path / "none") == 0
    assert gather([area(memory)], 0.0) == 0
    assert gather([area(memory)._replace(device="cuda:0")], 60.0) == 0
    assert not lying(memory)


def test_memory_that_cannot_be_moved_is_left() -> None:
    """Smaller than a page, or not mapped at all."""
    small = np.ones(64, np.uint8)
    areas = [area(small), Area(mmap.PAGESIZE, HUGE, HOST)]
    assert gather(areas, 60.0) == 0
    assert small.tobytes() == bytes([1]) * 64
