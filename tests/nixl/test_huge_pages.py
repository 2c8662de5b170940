"""KV memory in huge pages: real memory, as the kernel says it lies."""

import ctypes
import itertools
import mmap
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from kvplugin.connectors.nixl import huge_pages
from kvplugin.connectors.nixl.agent import HOST, Area, NixlAgent
from kvplugin.connectors.nixl.config import NixlConfig
from kvplugin.connectors.nixl.huge_pages import (
    KERNEL,
    PIECE_BYTES,
    PROCESS,
    in_huge_pages,
    move,
)
from kvplugin.connectors.nixl.rank_memory import RankMemory
from kvplugin.contract import KVTensor
from tests.nixl.ranks import GroupSpec, RankSpec

Bytes: TypeAlias = npt.NDArray[np.uint8]
HUGE = int((KERNEL / "hpage_pmd_size").read_text()) if KERNEL.exists() else 0
NBYTES = 5 * max(PIECE_BYTES // 2, HUGE)
LONG_S = 600.0


def area(array: Bytes) -> Area:
    return Area(array.ctypes.data, array.nbytes, HOST)


def lying(array: Bytes) -> int:
    return in_huge_pages([area(array)])


def fill(array: Bytes) -> bytes:
    array[:] = np.resize(np.arange(1, 252, dtype=np.uint8), array.size)
    return array.tobytes()


def mapped(flags: int = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) -> Bytes:
    """Memory in small pages that begins and ends in the middle of one."""
    mapping = mmap.mmap(-1, NBYTES, flags=flags)
    mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(mapping, np.uint8)[1000:-1000]


@pytest.fixture
def memory() -> Bytes:
    """Such, where the kernel gives huge pages to this process."""
    if not kernel_has_some():
        pytest.skip("the kernel has no huge pages for this process")
    return mapped()


def kernel_has_some() -> bool:
    """Whether memory that asks for huge pages is given all of them just now."""
    if not HUGE:
        return False
    probe = mmap.mmap(-1, 8 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    probe.madvise(mmap.MADV_HUGEPAGE)
    asked = np.frombuffer(probe, np.uint8)
    asked[:] = 1
    return lying(asked) >= 7 * HUGE


def moved(*areas: Area) -> int:
    """How much is in huge pages then; how many there are is the kernel's business."""
    found = move(areas, LONG_S)
    if not found and not kernel_has_some():
        pytest.skip("the kernel has no huge pages left")
    assert found
    assert found == in_huge_pages(areas)
    return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """That would change this process' memory, in place of being made."""
    made: list[str] = []
    for name in ("mmap", "mremap", "madvise", "munmap"):
        monkeypatch.setattr(
            huge_pages._LIBC, name, lambda *_, name=name: made.append(name) or -1
        )
    return made


@pytest.mark.parametrize("what", ["bytes", "zeros", "nothing yet"])
def test_bytes_and_addresses_stay(memory: Bytes, what: str) -> None:
    if what != "nothing yet":
        fill(memory)
    if what == "zeros":
        memory[:] = 0
    before = memory.tobytes()
    assert not lying(memory)
    assert moved(area(memory)) <= memory.nbytes
    assert memory.tobytes() == before


def test_page_tables_that_were_used_do_not_matter(memory: Bytes) -> None:
    """Kernels before 6.14 keep a table of small pages when its pages are given back,
    and put no huge page in its place."""
    before = fill(memory)
    start = memory.ctypes.data // HUGE * HUGE
    for half in range(start + HUGE, start + 4 * HUGE, HUGE // 2):
        libc = ctypes.CDLL(None)
        libc.madvise(
            ctypes.c_void_p(half), ctypes.c_size_t(HUGE // 2), mmap.MADV_DONTNEED
        )
    emptied = memory.tobytes()
    assert emptied != before
    assert moved(area(memory))
    assert memory.tobytes() == emptied


def test_what_is_beside_an_area_is_not_touched(memory: Bytes) -> None:
    """Pages at its ends that are only partly its own are left."""
    before = fill(memory)
    start = -memory.ctypes.data % HUGE + HUGE // 2
    inner = memory[start : start + 2 * HUGE]
    assert moved(area(inner)) == HUGE
    assert memory.tobytes() == before
    assert lying(memory) == HUGE


def test_several_areas_of_one_mapping(memory: Bytes) -> None:
    before = fill(memory)
    cut = -memory.ctypes.data % HUGE + 2 * HUGE
    areas = [area(memory[: cut - 64]), area(memory[cut:])]
    assert moved(*areas) <= memory.nbytes
    assert memory.tobytes() == before


def test_memory_is_filled_when_it_has_moved(memory: Bytes) -> None:
    """Not at the first write, when the machine may have none left."""
    assert not resident(memory)
    moved(area(memory))
    assert resident(memory) >= memory.nbytes - 2 * HUGE


def resident(array: Bytes) -> int:
    found, inside = 0, range(0)
    own = range(array.ctypes.data, array.ctypes.data + array.nbytes)
    for line in (PROCESS / "smaps").read_bytes().split(b"\n"):
        if match := huge_pages._MAPPING.match(line):
            inside = range(
                max(int(match["start"], 16), own.start),
                min(int(match["end"], 16), own.stop),
            )
        elif line.startswith(b"Rss:"):
            found += min(int(line.split()[1]) << 10, len(inside))
    return found


def test_what_lies_in_huge_pages_is_left(
    memory: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(memory)
    first = moved(area(memory))
    if first < memory.nbytes - 2 * HUGE:
        pytest.skip("the kernel has too few huge pages")
    monkeypatch.setattr(huge_pages, "_copied", None)
    assert move([area(memory)], LONG_S) == first


def test_no_piece_is_begun_too_late(memory: Bytes) -> None:
    before = fill(memory)
    ticks = itertools.count()
    found = move([area(memory)], 2.0, clock=lambda: float(next(ticks)))
    assert found or not kernel_has_some()
    assert found <= max(PIECE_BYTES, HUGE)
    assert memory.tobytes() == before


@pytest.mark.skipif(not HUGE, reason="a kernel without huge pages")
def test_who_gets_none(tmp_path: Path, calls: list[str]) -> None:
    memory = mapped()
    fill(memory)
    here = area(memory)
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    (tmp_path / "hpage_pmd_size").write_text(f"{HUGE}\n")
    assert move([here], LONG_S, kernel=tmp_path) == 0
    assert move([here], LONG_S, kernel=tmp_path / "none") == 0
    assert move([here], LONG_S, process=tmp_path) == 0
    assert move([here], 0.0) == 0
    assert move([], LONG_S) == 0
    assert not calls


def test_nothing_moves_beside_memory_of_a_device(calls: list[str]) -> None:
    """It may have pinned what lies in host memory: CUDA's pins are not counted."""
    memory = mapped()
    device = area(memory)._replace(device="cuda:0")
    assert move([area(memory), device], LONG_S) == 0
    assert not calls


def test_pinned_memory_is_left(memory: Bytes, tmp_path: Path) -> None:
    """A device would go on with the pages that it has."""
    fill(memory)
    (tmp_path / "smaps").write_bytes((PROCESS / "smaps").read_bytes())
    (tmp_path / "status").write_text("Name:\tx\nVmPin:\t    4096 kB\n")
    assert move([area(memory)], LONG_S, process=tmp_path) == 0
    assert not lying(memory)


@pytest.mark.skipif(not HUGE, reason="a kernel without huge pages")
def test_memory_of_others_is_left(tmp_path: Path, calls: list[str]) -> None:
    """What is shared, or a file's, is written by others meanwhile."""
    path = tmp_path / "file"
    path.write_bytes(bytes(NBYTES))
    shared = mapped(mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    with path.open("r+b") as file:
        flags = mmap.MAP_PRIVATE
        own = np.frombuffer(mmap.mmap(file.fileno(), NBYTES, flags=flags), np.uint8)
    fill(shared)
    own[7] = 1
    assert move([area(shared), area(own)], LONG_S) == 0
    assert not calls


def test_locked_memory_is_left(calls: list[str]) -> None:
    memory = mapped()
    libc = ctypes.CDLL(None)
    at, nbytes = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes)
    if libc.mlock(at, nbytes):
        pytest.skip("this user may not lock so much memory")
    try:
        assert move([area(memory)], LONG_S) == 0
        assert not calls
    finally:
        libc.munlock(at, nbytes)


def test_small_or_unmapped_memory_is_left(calls: list[str]) -> None:
    small = np.ones(64, np.uint8)
    nowhere = Area(mmap.PAGESIZE, 2 * HUGE, HOST)
    assert move([area(small), nowhere], LONG_S) == 0
    assert not calls


def test_a_kernel_that_refuses_changes_nothing(
    memory: Bytes, calls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    before = fill(memory)
    ctypes.set_errno(12)
    with caplog.at_level("INFO", logger="vllm.kvplugin.nixl"):
        assert move([area(memory)], LONG_S) == 0
    assert calls == ["mmap"]
    assert memory.tobytes() == before
    assert "0 of " in caplog.text


def test_memory_for_the_copy_is_given_back(
    memory: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ends the move."""
    before = fill(memory)
    lay = addresses_in_use()
    for name in ("madvise", "mremap"):
        with monkeypatch.context() as patch:
            patch.setattr(huge_pages._LIBC, name, lambda *_: -1)
            assert move([area(memory)], LONG_S) == 0
        assert addresses_in_use() <= lay + PIECE_BYTES // 2
    assert memory.tobytes() == before


def addresses_in_use() -> int:
    line = next(
        line
        for line in (PROCESS / "status").read_text().splitlines()
        if line.startswith("VmSize:")
    )
    return int(line.split()[1]) << 10


def test_names_of_files_are_any_bytes(memory: Bytes, tmp_path: Path) -> None:
    """None of them is taken for a mapping of its own, or ends the start."""
    fill(memory)
    lay = (PROCESS / "smaps").read_bytes()
    at = memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    line = b"%x-%x rw-p 0 00:00 0" % (at, at + memory.nbytes)
    forged = b"7f0000000000-7f0000001000 r--p 0 00:00 7 /m\xf6del\x85" + line
    (tmp_path / "smaps").write_bytes(forged + b"\nVmFlags: rd lo\n" + lay)
    (tmp_path / "status").write_bytes(b"Name:\t\xf6\n")
    assert [m for m in huge_pages._mappings(tmp_path) if at in m.addresses] == [
        m for m in huge_pages._mappings(PROCESS) if at in m.addresses
    ]
    move([area(memory)], LONG_S, process=tmp_path)  # does not raise


def test_a_rank_moves_its_kv_before_nixl_knows_it(
    memory: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = memory.nbytes // (2 * GroupSpec().page_bytes)
    spec = RankSpec("engine", num_blocks=blocks)
    layout, rows = spec.groups[0].tensor(blocks)
    tensors = {
        f"0.{layer}": KVTensor(
            memory.ctypes.data + layer * blocks * GroupSpec().page_bytes,
            layout,
            rows=rows,
            interior="NHD",
            total_heads=2,
        )
        for layer in range(2)
    }
    seen: list[int] = []
    register = NixlAgent.register

    def recorded(agent: NixlAgent, areas: list[Area]) -> list[object]:
        seen.append(in_huge_pages([one for one in areas if one.nbytes > HUGE]))
        return register(agent, areas)

    monkeypatch.setattr(NixlAgent, "register", recorded)
    before = fill(memory)
    for seconds, is_moved in ((0.0, False), (LONG_S, True)):
        config = NixlConfig(huge_pages_s=seconds)
        RankMemory(spec.info(), config, tensors).close()
        assert memory.tobytes() == before
        assert bool(lying(memory)) is is_moved
        assert bool(seen[0]) is is_moved
        seen.clear()
