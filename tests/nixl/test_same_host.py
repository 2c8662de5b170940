"""Reads by the kernel: how they are cut, and what goes wrong."""

import ctypes
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from kvplugin.connectors.nixl import same_host
from kvplugin.connectors.nixl.describe import decode_rank
from kvplugin.connectors.nixl.descriptor import RankDescriptor
from kvplugin.connectors.nixl.same_host import MAX_PIECES, HostRead, why_not
from kvplugin.errors import TransferError
from tests.nixl.ranks import Rank, RankSpec

OFFLINE = {"backends": []}


def read(pid: int, pieces: "list[tuple[int, int, int]]") -> HostRead:
    columns = np.array(pieces, np.int64).reshape(-1, 3).T
    return HostRead(pid, *columns)


def finish(one: HostRead) -> int:
    """Polls until all is there."""
    polls = 1
    while not one.poll():
        polls += 1
    return polls


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4000), max_size=1500),
    call_bytes=st.sampled_from([1, 7, 1000, 4096, 1 << 20]),
    seed=st.integers(0, 99),
)
def test_every_piece_once(sizes: list[int], call_bytes: int, seed: int) -> None:
    """Whatever they are cut into; calls are bounded in bytes and pieces."""
    if call_bytes < 100:
        sizes = [size % 50 + 1 for size in sizes[:60]]
    total = sum(sizes)
    source = np.random.default_rng(seed).integers(0, 256, total + 1, np.uint8)
    target = np.zeros(total + 1, np.uint8)
    starts = np.cumsum([0, *sizes])[:-1]
    places = np.random.default_rng(seed).permutation(len(sizes))
    ends = np.cumsum([0, *(sizes[i] for i in places)])[:-1]
    pieces = [
        (source.ctypes.data + int(starts[i]), target.ctypes.data + int(end), sizes[i])
        for i, end in zip(places, ends, strict=True)
    ]
    calls = []
    copy = same_host._copy

    def counting(pid: int, ours: Any, theirs: Any) -> None:
        calls.append((len(ours), int(ours[:, 1].sum())))
        copy(pid, ours, theirs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(same_host, "CALL_BYTES", call_bytes)
        patch.setattr(same_host, "_copy", counting)
        finish(read(os.getpid(), pieces))
    wanted = [source[starts[i] : starts[i] + sizes[i]] for i in places]
    assert np.array_equal(target[:total], np.concatenate([[], *wanted]))
    assert target[total] == 0
    assert all(n <= MAX_PIECES and nbytes <= call_bytes for n, nbytes in calls)


def test_nothing_is_there_at_once() -> None:
    assert finish(read(os.getpid(), [])) == 1


def test_one_that_is_stopped_copies_nothing_more() -> None:
    source, target = np.ones(8, np.uint8), np.zeros(8, np.uint8)
    one = read(os.getpid(), [(source.ctypes.data, target.ctypes.data, 8)])
    one.stop()
    with pytest.raises(TransferError, match="stopped"):
        one.poll()
    assert not target.any()


class TestErrors:
    def test_a_process_that_has_ended(self) -> None:
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        target = np.zeros(8, np.uint8)
        with pytest.raises(TransferError, match="its process has ended"):
            read(ended.pid, [(1 << 20, target.ctypes.data, 8)]).poll()

    def test_memory_that_is_not_there(self) -> None:
        target = np.zeros(8, np.uint8)
        with pytest.raises(TransferError, match="memory is not there"):
            read(os.getpid(), [(4096, target.ctypes.data, 8)]).poll()

    def test_memory_that_ends_on_the_way(self) -> None:
        """The kernel copies what it can and says how much."""
        with half_mapped() as (address, size):
            target = np.zeros(2 * size, np.uint8)
            with pytest.raises(TransferError, match=f"{size} of {2 * size} bytes"):
                read(os.getpid(), [(address, target.ctypes.data, 2 * size)]).poll()

    @pytest.mark.parametrize(
        ("code", "why"),
        [(errno.EPERM, "does not allow"), (errno.ENOSYS, "no process_vm_readv")],
    )
    def test_a_kernel_that_does_not(
        self, monkeypatch: pytest.MonkeyPatch, code: int, why: str
    ) -> None:
        def refuse(*args: int) -> int:
            ctypes.set_errno(code)
            return -1

        monkeypatch.setattr(same_host, "_readv", refuse)
        monkeypatch.setattr(same_host, "_readv_held", refuse)
        target = np.zeros(8, np.uint8)
        with pytest.raises(TransferError, match=why):
            read(os.getpid(), [(4096, target.ctypes.data, 8)]).poll()


@contextmanager
def half_mapped() -> Iterator[tuple[int, int]]:
    """Two pages of which the second one is not there: address, bytes of a page."""
    size = os.sysconf("SC_PAGE_SIZE")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 4]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, 2 * size, 3, 0x22, -1, 0)
    libc.munmap(address + size, size)
    try:
        yield address, size
    finally:
        libc.munmap(address, size)


class TestWhoIsReadThisWay:
    @pytest.fixture
    def ranks(self) -> Iterator[tuple[RankDescriptor, RankDescriptor]]:
        ranks = [
            Rank(RankSpec(name, num_blocks=8, config=OFFLINE)) for name in ("a", "b")
        ]
        ours, theirs = (decode_rank(rank.introduction()) for rank in ranks)
        yield ours, theirs
        for rank in ranks:
            rank.worker.close()

    Pair = tuple[RankDescriptor, RankDescriptor]

    def test_who_is_on_this_machine(self, ranks: Pair) -> None:
        assert why_not(*ranks) == ""

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ({"boot_id": "another"}, "another machine"),
            ({"boot_id": ""}, "another machine"),
            ({"pid_namespace": 1}, "another machine, or another PID namespace"),
            ({"pid": 0}, "not known"),
            ({"pid": 4194305}, "has ended"),
        ],
    )
    def test_not_who_is_elsewhere(
        self, ranks: Pair, change: dict[str, Any], why: str
    ) -> None:
        ours, theirs = ranks
        theirs = structs.replace(theirs, host=structs.replace(theirs.host, **change))
        assert why in why_not(ours, theirs)

    def test_not_who_took_the_place_of_another(self, ranks: Pair) -> None:
        ours, theirs = ranks
        theirs = structs.replace(theirs, incarnation=theirs.incarnation ^ 1)
        assert "replaced" in why_not(ours, theirs)

    @pytest.mark.parametrize("whose", [0, 1])
    def test_not_the_memory_of_a_device(self, ranks: Pair, whose: int) -> None:
        layers = [structs.replace(ranks[whose].layers[0], device="cuda:0")]
        both = list(ranks)
        both[whose] = structs.replace(ranks[whose], layers=layers)
        assert "cuda:0" in why_not(*both)
