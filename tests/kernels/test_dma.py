"""DMA: every byte where it belongs, in as few descriptors as there can be."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.errors import ConfigError, TransferError
from kvplugin.kernels.dma import DmaBlockCopier
from kvplugin.kernels.region import Region, staging_regions
from tests.kernels.canaries import Guarded
from tests.kernels.memcpy_apis import Memmove

CPU = torch.device("cpu")
BLOCKS = 8
NBYTES = 24


def side(
    nbytes: int = NBYTES, gap: int = 0, layers: int = 1, seed: int = 0
) -> tuple[Guarded, list[Region]]:
    """Layers one after the other, each with `gap` bytes after every block."""
    stride = nbytes + gap
    memory = Guarded.of(layers * BLOCKS * stride, shift=1, seed=seed)
    start = memory.data.data_ptr()
    return memory, [
        Region(start + layer * BLOCKS * stride, stride, nbytes, BLOCKS)
        for layer in range(layers)
    ]


def slots(layers: int, seed: int = 9) -> tuple[Guarded, list[Region]]:
    """Slots that hold all layers of a block side by side."""
    memory = Guarded.of(layers * BLOCKS * NBYTES, seed=seed)
    return memory, staging_regions(
        memory.data.data_ptr(), [NBYTES] * layers, blocks=BLOCKS
    )


def bytes_at(region: Region, block: int) -> bytes:
    return ctypes.string_at(region.address + block * region.stride, region.nbytes)


@pytest.mark.parametrize(
    ("sources", "targets", "descriptors"),
    [
        ([], [], []),
        ([3], [5], [1]),
        ([1, 2, 3], [4, 5, 6], [3]),
        ([2, 3, 1], [5, 6, 4], [3]),
        ([1, 2, 3], [6, 5, 4], [1, 1, 1]),
        ([1, 2, 4, 5], [1, 2, 3, 4], [2, 2]),
        ([1, 2, 3, 4], [1, 2, 4, 5], [2, 2]),
        ([7, 7, 7], [0, 1, 2], [1, 1, 1]),
        (range(BLOCKS), range(BLOCKS), [BLOCKS]),
    ],
)
def test_ids_in_step_are_one_descriptor(
    sources: Any, targets: Any, descriptors: list[int]
) -> None:
    (source, reads), (target, writes) = side(), side(seed=1)
    before = target.data.clone()
    api = Memmove()
    copied = DmaBlockCopier(reads, writes, CPU, api=api).copy(sources, targets)
    assert copied == len(descriptors and sources) * NBYTES
    wanted = [count * NBYTES for count in descriptors]
    assert [[row[2] for row in call] for call in api.calls] == ([wanted] * bool(wanted))
    for s, t in zip(sources, targets, strict=True):
        before.view(BLOCKS, -1)[t] = source.data.view(BLOCKS, -1)[s]
    assert torch.equal(target.data, before)
    target.check()


def test_descriptors_name_addresses() -> None:
    (_, [read]), (_, [write]) = side(), side(seed=1)
    api = Memmove()
    DmaBlockCopier([read], [write], CPU, api=api).copy([5, 1, 2], [0, 3, 4])
    assert api.calls == [
        [
            (write.address + 3 * NBYTES, read.address + NBYTES, 2 * NBYTES),
            (write.address, read.address + 5 * NBYTES, NBYTES),
        ]
    ]
    assert api.streams == [0]


@pytest.mark.parametrize(("source_gap", "target_gap"), [(8, 0), (0, 8), (8, 8)])
def test_gaps_are_not_copied(source_gap: int, target_gap: int) -> None:
    (_, reads), (target, writes) = side(gap=source_gap), side(gap=target_gap, seed=1)
    before = target.data.view(BLOCKS, -1).clone()
    api = Memmove()
    DmaBlockCopier(reads, writes, CPU, api=api).copy([1, 2, 3], [4, 5, 6])
    assert [len(call) for call in api.calls] == [3]
    after = target.data.view(BLOCKS, -1)
    assert torch.equal(after[:, NBYTES:], before[:, NBYTES:])
    assert [bytes_at(writes[0], t) for t in (4, 5, 6)] == [
        bytes_at(reads[0], s) for s in (1, 2, 3)
    ]


def test_neighbouring_regions_are_one_descriptor() -> None:
    """Between two pools of slots all layers of a run of blocks are one."""
    (source, reads), (target, writes) = slots(3), slots(3, seed=4)
    api = Memmove()
    copier = DmaBlockCopier(reads, writes, CPU, api=api)
    assert copier.block_bytes == 3 * NBYTES
    assert copier.copy([2, 3, 6], [0, 1, 2]) == 9 * NBYTES
    assert [[row[2] for row in call] for call in api.calls] == [
        [6 * NBYTES, 3 * NBYTES]
    ]
    rows = (memory.data.view(BLOCKS, -1) for memory in (target, source))
    assert torch.equal(next(rows)[:3], next(rows)[[2, 3, 6]])


def test_layers_to_slots_are_a_descriptor_each() -> None:
    (_, reads), (_, writes) = side(layers=3), slots(3)
    api = Memmove()
    DmaBlockCopier(reads, writes, CPU, api=api).copy([2, 3], [0, 1])
    assert [len(call) for call in api.calls] == [6]
    for read, write in zip(reads, writes, strict=True):
        assert bytes_at(write, 0) == bytes_at(read, 2)
        assert bytes_at(write, 1) == bytes_at(read, 3)


def test_regions_of_different_sizes() -> None:
    """As of a layer with keys alone between two others; slots have gaps between."""
    sizes = [24, 8, 16]
    layers = [Guarded.of(BLOCKS * nbytes, seed=nbytes) for nbytes in sizes]
    reads = [
        Region(layer.data.data_ptr(), nbytes, nbytes, BLOCKS)
        for layer, nbytes in zip(layers, sizes, strict=True)
    ]
    pool = Guarded.of(BLOCKS * 64, seed=1)
    writes = staging_regions(pool.data.data_ptr(), sizes, BLOCKS, stride=64)
    api = Memmove()
    copier = DmaBlockCopier(reads, writes, CPU, api=api)
    assert copier.copy([2, 3], [6, 7]) == 2 * 48
    assert [row[2] for row in api.calls[0]] == [24, 24, 8, 8, 16, 16]
    for read, write in zip(reads, writes, strict=True):
        assert bytes_at(write, 6) == bytes_at(read, 2)
        assert bytes_at(write, 7) == bytes_at(read, 3)
    pool.check()


@pytest.mark.parametrize("flipped", [False, True])
def test_no_descriptor_spans_two_pinned_pieces(flipped: bool) -> None:
    (_, [device]), (_, [host]) = side(), side(seed=1)
    cuts = [host.address + 3 * NBYTES, host.address + 6 * NBYTES]
    api = Memmove()
    sides = ([host], [device]) if flipped else ([device], [host])
    copier = DmaBlockCopier(*sides, CPU, api=api, cuts=cuts)
    copier.copy(range(BLOCKS), range(BLOCKS))
    assert [row[2] // NBYTES for row in api.calls[0]] == [3, 3, 2]


def test_a_block_in_two_pinned_pieces_is_refused() -> None:
    (_, [device]), (_, [host]) = side(), side(gap=8, seed=1)
    for good in (-1, 0, NBYTES, NBYTES + 7, NBYTES + 8, BLOCKS * (NBYTES + 8)):
        cut = host.address + good
        DmaBlockCopier([device], [host], CPU, api=Memmove(), cuts=[cut])
    for bad in (1, NBYTES - 1, NBYTES + 9):
        cut = host.address + bad
        with pytest.raises(ValueError, match=f"{cut:#x}.*unit_bytes of a whole slot"):
            DmaBlockCopier([device], [host], CPU, api=Memmove(), cuts=[cut])


def test_a_refusal_in_the_middle() -> None:
    (_, [read]), (target, [write]) = side(), side(seed=1)
    before = target.data.view(BLOCKS, -1).clone()
    copier = DmaBlockCopier([read], [write], CPU, api=Memmove(refused=2))
    with pytest.raises(
        TransferError, match=r"4 copies of 96 bytes by DMA on cpu.*: invalid argument"
    ) as caught:
        copier.copy([0, 2, 4, 6], [0, 2, 4, 6])
    assert not caught.value.retryable
    assert bytes_at(write, 0) == bytes_at(read, 0)
    assert torch.equal(target.data.view(BLOCKS, -1)[4:], before[4:])


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        ([0, 1], [0], "2 source ids do not pair with 1"),
        ([0], [BLOCKS], "target id 8 is out of range"),
        ([-1], [0], "source id -1 is out of range"),
        ([0, 1], [2, 2], "target id 2 appears more than once"),
        ([[0]], [[0]], "flat list"),
    ],
)
def test_bad_ids_copy_nothing(sources: Any, targets: Any, message: str) -> None:
    (_, reads), (_, writes) = side(), side(seed=1)
    api = Memmove()
    with pytest.raises(ValueError, match=message):
        DmaBlockCopier(reads, writes, CPU, api=api).copy(sources, targets)
    assert api.calls == []


def test_ids_may_be_tensors_of_the_host_only() -> None:
    (_, reads), (_, writes) = side(), side(seed=1)
    copier = DmaBlockCopier(reads, writes, CPU, api=Memmove())
    ids = torch.tensor([0, 1])
    assert copier.copy(ids, ids) == 2 * NBYTES
    with pytest.raises(ValueError, match="must be in host memory, not on meta"):
        copier.copy([0, 1], ids.to("meta"))


def test_sides_must_pair_up() -> None:
    (_, reads), (_, writes) = side(layers=2), side()
    with pytest.raises(ValueError, match="2 source regions do not pair with 1"):
        DmaBlockCopier(reads, writes, CPU, api=Memmove())


def test_copies_go_to_the_current_stream_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current: list[torch.device] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def stream(device: torch.device) -> SimpleNamespace:
        assert current == [device]
        return SimpleNamespace(cuda_stream=0x5EED)

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    (_, reads), (_, writes) = side(), side(seed=1)
    api = Memmove()
    DmaBlockCopier(reads, writes, torch.device("cuda", 1), api=api).copy([0], [0])
    assert api.streams == [0x5EED]
    assert current == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch has a GPU's runtime")
def test_without_a_runtime_it_says_so() -> None:
    (_, reads), (_, writes) = side(), side(seed=1)
    with pytest.raises(ConfigError, match=r"torch .* has loaded no libcudart"):
        DmaBlockCopier(reads, writes, CPU)


@settings(deadline=None)
@given(data=st.data())
def test_any_ids_between_any_regions(data: st.DataObject) -> None:
    """As the blocks one by one; the fewest descriptors; none that spans a cut."""
    gaps = data.draw(st.tuples(*[st.sampled_from([0, 0, 5])] * 2))
    layers = data.draw(st.integers(1, 3))
    (source, reads), (target, writes) = (
        side(gap=gap, layers=layers, seed=seed) for seed, gap in enumerate(gaps)
    )
    targets = data.draw(st.lists(st.integers(0, BLOCKS - 1), unique=True))
    sources = data.draw(
        st.lists(
            st.integers(0, BLOCKS - 1), min_size=len(targets), max_size=len(targets)
        )
    )
    cut = data.draw(st.integers(0, BLOCKS))
    cuts = [writes[0].address + cut * writes[0].stride]
    api = Memmove()
    copier = DmaBlockCopier(reads, writes, CPU, api=api, cuts=cuts)
    assert copier.copy(sources, targets) == len(targets) * layers * NBYTES
    for read, write in zip(reads, writes, strict=True):
        for s, t in zip(sources, targets, strict=True):
            assert bytes_at(write, t) == bytes_at(read, s)
    pairs = set(zip(sources, targets, strict=True))
    starts = [
        sum(
            any(gaps) or (s - 1, t - 1) not in pairs or (layer == 0 and t == cut)
            for s, t in pairs
        )
        for layer in range(layers)
    ]
    descriptors = sum(map(len, api.calls))
    assert descriptors >= sum(starts)
    if len(set(sources)) == len(sources):  # repeats stand between blocks in step
        assert descriptors == sum(starts)
    for address, _, nbytes in (row for call in api.calls for row in call):
        assert not address < cuts[0] < address + nbytes
    target.check()
    source.check()
