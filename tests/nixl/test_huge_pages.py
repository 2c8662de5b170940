"""KV memory in huge pages: real memory, as the kernel says it lies."""

import ctypes
import itertools
import mmap
import os
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from kvplugin.connectors.nixl import huge_pages
from kvplugin.connectors.nixl.agent import HOST, Area
from kvplugin.connectors.nixl.huge_pages import (
    KERNEL,
    PIECE_BYTES,
    in_huge_pages,
    lay_anew,
)

Bytes: TypeAlias = npt.NDArray[np.uint8]
pytestmark = pytest.mark.skipif(
    not KERNEL.exists() or "[never]" in (KERNEL / "enabled").read_text(),
    reason="the kernel gives no huge pages",
)
HUGE = int((KERNEL / "hpage_pmd_size").read_text()) if KERNEL.exists() else 0
NBYTES = max(5 * PIECE_BYTES // 2, 2 * HUGE)
LONG_S = 600.0


def area(array: Bytes) -> Area:
    return Area(array.ctypes.data, array.nbytes, HOST)


def lying(array: Bytes) -> int:
    return in_huge_pages(area(array))


def fill(array: Bytes) -> bytes:
    array[:] = np.resize(np.arange(1, 252, dtype=np.uint8), array.size)
    return array.tobytes()


def mapped(flags: int) -> Bytes:
    """Memory in small pages that begins and ends in the middle of one."""
    mapping = mmap.mmap(-1, NBYTES, flags=flags)
    mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(mapping, np.uint8)[1000:-1000]


@pytest.fixture
def memory() -> Bytes:
    return mapped(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


@pytest.mark.parametrize("what", ["bytes", "zeros", "nothing yet", "both"])
def test_bytes_and_addresses_stay(memory: Bytes, what: str) -> None:
    if what in ("bytes", "both"):
        fill(memory)
    if what in ("zeros", "both"):
        memory[: memory.nbytes if what == "zeros" else PIECE_BYTES + HUGE] = 0
    before = memory.tobytes()
    assert not lying(memory)
    found = lay_anew([area(memory)], LONG_S)
    assert memory.tobytes() == before
    assert found == lying(memory)
    assert memory.nbytes - 2 * HUGE <= found <= memory.nbytes


def test_what_is_beside_an_area_is_not_touched(memory: Bytes) -> None:
    """Pages at its ends that are only partly its own are left."""
    fill(memory)
    start = -memory.ctypes.data % HUGE + HUGE // 2
    inner = memory[start : start + 2 * HUGE]
    outside = [memory[:start], memory[start + inner.nbytes :]]
    before = memory.tobytes()
    assert lay_anew([area(inner)], LONG_S) == HUGE
    assert memory.tobytes() == before
    assert not any(lying(part) for part in outside if part.nbytes < HUGE)


def test_several_areas_of_one_mapping(memory: Bytes) -> None:
    before = fill(memory)
    cut = -memory.ctypes.data % HUGE + 2 * HUGE
    areas = [area(memory[:cut]), area(memory[cut:])]
    lay_anew(areas, LONG_S)
    assert memory.tobytes() == before
    assert lying(memory) >= memory.nbytes - 2 * HUGE


def test_what_lies_in_huge_pages_is_left(
    memory: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(memory)
    first = lay_anew([area(memory)], LONG_S)
    monkeypatch.setattr(huge_pages, "_madvise", None)
    assert lay_anew([area(memory)], LONG_S) == first


def test_no_piece_is_begun_too_late(memory: Bytes) -> None:
    before = fill(memory)
    ticks = itertools.count()
    found = lay_anew([area(memory)], 2.0, clock=lambda: float(next(ticks)))
    assert 0 < found <= PIECE_BYTES
    assert memory.tobytes() == before


def test_who_gets_none(memory: Bytes, tmp_path: Path) -> None:
    fill(memory)
    here = area(memory)
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    (tmp_path / "hpage_pmd_size").write_text(f"{HUGE}\n")
    assert lay_anew([here], LONG_S, kernel=tmp_path) == 0
    assert lay_anew([here], LONG_S, kernel=tmp_path / "none") == 0
    assert lay_anew([here], LONG_S, process=tmp_path) == 0
    assert lay_anew([here], 0.0) == 0
    assert lay_anew([here._replace(device="cuda:0")], LONG_S) == 0
    assert not lying(memory)


def test_pinned_memory_is_left(memory: Bytes, tmp_path: Path) -> None:
    """A device would go on with the pages that were given back."""
    fill(memory)
    (tmp_path / "smaps").write_text(Path("/proc/self/smaps").read_text())
    (tmp_path / "status").write_text("Name:\tx\nVmPin:\t    4096 kB\n")
    assert lay_anew([area(memory)], LONG_S, process=tmp_path) == 0
    assert not lying(memory)
    (tmp_path / "status").write_text("Name:\tx\nVmPin:\t       0 kB\n")
    lay_anew([area(memory)], LONG_S, process=tmp_path)
    assert lying(memory)


def test_memory_of_others_is_left(tmp_path: Path) -> None:
    """What is shared, or a file's, is written by others meanwhile."""
    path = tmp_path / "file"
    path.write_bytes(bytes(NBYTES))
    shared = mapped(mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    before = fill(shared)
    with path.open("r+b") as file:
        own = np.frombuffer(
            mmap.mmap(file.fileno(), NBYTES, flags=mmap.MAP_PRIVATE), np.uint8
        )
    own[7] = 1
    assert lay_anew([area(shared), area(own)], LONG_S) == 0
    assert shared.tobytes() == before
    assert own[7] == 1
    assert own.sum() == 1


def test_small_or_unmapped_memory_is_left() -> None:
    small = np.ones(64, np.uint8)
    nowhere = Area(mmap.PAGESIZE, 2 * HUGE, HOST)
    assert lay_anew([area(small), nowhere], LONG_S) == 0
    assert small.tobytes() == bytes([1]) * 64


@pytest.mark.skipif(os.geteuid() != 0, reason="locks more memory than users may")
def test_memory_that_the_kernel_does_not_give_back_stays(memory: Bytes) -> None:
    before = fill(memory)
    libc = ctypes.CDLL(None, use_errno=True)
    start = ctypes.c_void_p(memory.ctypes.data)
    assert libc.mlock(start, ctypes.c_size_t(memory.nbytes)) == 0
    try:
        assert lay_anew([area(memory)], LONG_S) == 0
        assert memory.tobytes() == before
    finally:
        libc.munlock(start, ctypes.c_size_t(memory.nbytes))
