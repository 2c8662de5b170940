"""The copy kernels move exactly the bytes that plain slices would.

Bytes move whatever their dtype: there is nothing to vary but sizes and alignments.
"""

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.kernels import copy, words
from kvplugin.kernels.copy import DeviceBlockCopier, copy_batch
from kvplugin.kernels.region import Region, staging_regions
from tests.kernels.canaries import Guarded

CPU = torch.device("cpu")
LARGE = 3 << 30
"""Bytes of virtual memory; a test touches a few pages of it."""


@pytest.fixture(autouse=True, scope="module")
def few_programs() -> Iterator[None]:
    """Each goes through several pieces, and the interpreter has less to do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "PROGRAMS", 6)
        patch.setattr(copy, "PROGRAMS", 6)
        yield


@dataclass
class Side:
    """Regions in memory whose every byte is known."""

    memory: Guarded
    places: Sequence[tuple[int, int, int]]
    """(offset, stride, nbytes) of each region."""
    blocks: int

    @property
    def regions(self) -> list[Region]:
        address = self.memory.data.data_ptr()
        return [Region(address + o, s, n, self.blocks) for o, s, n in self.places]

    def runs(self, block: int) -> list[slice]:
        return [slice(o + block * s, o + block * s + n) for o, s, n in self.places]


def side(
    places: Sequence[tuple[int, int, int]], blocks: int, seed: int, shift: int = 0
) -> Side:
    size = max(o + (blocks - 1) * s + n for o, s, n in places)
    return Side(Guarded.of(size, shift=shift, seed=seed), places, blocks)


def check_copy(
    source: Side, target: Side, source_ids: Sequence[int], target_ids: Sequence[int]
) -> None:
    """The target has the right bytes, and every other byte is as it was."""
    before, expected = source.memory.data.clone(), target.memory.data.clone()
    for source_id, target_id in zip(source_ids, target_ids, strict=True):
        for a, b in zip(source.runs(source_id), target.runs(target_id), strict=True):
            expected[b] = before[a]
    copier = DeviceBlockCopier(source.regions, target.regions, CPU)
    assert copier.block_bytes == sum(n for _, _, n in source.places)
    nbytes = copier.copy(source_ids, target_ids)
    assert nbytes == len(target_ids) * copier.block_bytes
    assert torch.equal(target.memory.data, expected)
    assert torch.equal(source.memory.data, before)
    source.memory.check()
    target.memory.check()


@pytest.mark.parametrize(
    ("nbytes", "gap", "shift"),
    [
        pytest.param(16, 0, 0, id="one access"),
        pytest.param(8176, 16, 0, id="almost a tile"),
        pytest.param(8192, 0, 0, id="a tile"),
        pytest.param(8208, 0, 0, id="a tile and an access"),
        pytest.param(20_480, 64, 0, id="two and a half tiles"),
        pytest.param(1000, 8, 8, id="8 bytes"),
        pytest.param(132, 0, 4, id="4 bytes"),
        pytest.param(4100, 0, 0, id="4 bytes, over a tile"),
        pytest.param(1026, 2, 6, id="2 bytes"),
        pytest.param(656, 0, 1, id="address is odd"),
        pytest.param(657, 0, 0, id="size is odd"),
        pytest.param(656, 1, 0, id="stride is odd"),
        pytest.param(1025, 0, 0, id="bytes, over a tile"),
        pytest.param(1, 0, 3, id="one byte"),
    ],
)
def test_sizes_and_alignments(nbytes: int, gap: int, shift: int) -> None:
    source = side([(0, nbytes + gap, nbytes)], 4, seed=1)
    target = side([(0, nbytes + gap, nbytes)], 3, seed=2, shift=shift)
    check_copy(source, target, [3, 0], [0, 2])
    check_copy(target, source, [1, 0], [0, 2])


def test_widths_are_as_wide_as_they_can_be() -> None:
    for shift, unit in ((0, 16), (8, 8), (4, 4), (2, 2), (1, 1)):
        a, b = side([(0, 64, 64)], 2, 1), side([(0, 64, 64)], 2, 2, shift=shift)
        assert DeviceBlockCopier(a.regions, b.regions, CPU)._unit == unit


@pytest.mark.parametrize(
    ("source_ids", "target_ids"),
    [
        pytest.param([], [], id="none"),
        pytest.param([7], [7], id="the last block"),
        pytest.param([2, 3, 4, 5], [1, 2, 3, 4], id="one run"),
        pytest.param([5, 4, 3, 2], [1, 2, 3, 4], id="downwards"),
        pytest.param([1, 1, 6, 1], [4, 5, 6, 0], id="a source block three times"),
        pytest.param(list(range(8)), [3, 1, 4, 0, 5, 7, 2, 6], id="all blocks"),
    ],
)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_ids(source_ids: list[int], target_ids: list[int], as_tensor: bool) -> None:
    source = side([(0, 320, 320), (2560, 336, 160)], 8, seed=1)
    target = side([(0, 480, 320), (320, 480, 160)], 8, seed=2)
    ids = (torch.tensor(source_ids), torch.tensor(target_ids))
    if as_tensor:
        check_copy(source, target, *(i.to(torch.int64) for i in ids))
    else:
        check_copy(source, target, source_ids, target_ids)


def test_bad_ids_change_nothing() -> None:
    source, target = side([(0, 64, 64)], 4, 1), side([(0, 64, 64)], 3, 2)
    before = target.memory.buffer.clone()
    copier = DeviceBlockCopier(source.regions, target.regions, CPU)
    with pytest.raises(ValueError, match="source id 4 is out of range"):
        copier.copy([0, 4], [0, 1])
    with pytest.raises(ValueError, match="target id 3 is out of range"):
        copier.copy([0, 3], [0, 3])
    with pytest.raises(ValueError, match="target id 1 appears more than once"):
        copier.copy([0, 1], [1, 1])
    assert torch.equal(target.memory.buffer, before)


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        ([8, 8], [8], "2 source regions do not pair with 1 target regions"),
        ([], [], "at least one region a side"),
        ([8, 9], [8, 7], "region 1 has 9 bytes .* source and 7 in the target"),
    ],
)
def test_sides_that_do_not_match(
    sources: list[int], targets: list[int], message: str
) -> None:
    def regions(sizes: list[int]) -> list[Region]:
        return [Region(4096, 64, nbytes, 1) for nbytes in sizes]

    with pytest.raises(ValueError, match=message):
        DeviceBlockCopier(regions(sources), regions(targets), CPU)


def test_gather_to_a_staging_buffer_and_scatter_from_it() -> None:
    sizes = (512, 256, 256)
    layers = side([(0, 512, 512), (4096, 512, 256), (8192, 256, 256)], 8, seed=1)
    staging = Guarded.of(4 * sum(sizes), seed=2)
    regions = staging_regions(staging.data.data_ptr(), sizes, 4)
    original = layers.memory.data.clone()
    DeviceBlockCopier(layers.regions, regions, CPU).copy([6, 1, 3], [0, 1, 3])
    for run in (r for block in (6, 1, 3) for r in layers.runs(block)):
        layers.memory.data[run] = 0
    DeviceBlockCopier(regions, layers.regions, CPU).copy([3, 0, 1], [3, 6, 1])
    assert torch.equal(layers.memory.data, original)
    layers.memory.check()
    staging.check()


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Side, Side, list[int], list[int]]:
    """Regions one after the other, or as slices of slots; anything may be odd."""
    step = draw(st.sampled_from((1, 1, 4, 16)))

    def some_side(sizes: Sequence[int], seed: int) -> Side:
        blocks = draw(st.integers(1, 6))
        gaps = [draw(st.integers(0, 4)) * step for _ in sizes]
        slots, slot = draw(st.booleans()), sum(sizes) + sum(gaps)
        offset, places = 0, []
        for nbytes, gap in zip(sizes, gaps, strict=True):
            stride = slot if slots else nbytes + gap
            places.append((offset, stride, nbytes))
            offset += nbytes + gap if slots else blocks * stride
        return side(places, blocks, seed, shift=draw(st.integers(0, 15 // step)) * step)

    sizes = [
        units * step
        for units in draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
    ]
    source, target = some_side(sizes, 1), some_side(sizes, 2)
    target_ids = draw(st.lists(st.integers(0, target.blocks - 1), unique=True))
    some_source = st.integers(0, source.blocks - 1)
    n = len(target_ids)
    source_ids = draw(st.lists(some_source, min_size=n, max_size=n))
    return source, target, source_ids, target_ids


@settings(max_examples=40, deadline=None)
@given(job=jobs())
def test_any_regions(job: tuple[Side, Side, list[int], list[int]]) -> None:
    check_copy(*job)


@pytest.mark.full
@settings(max_examples=1000, deadline=None)
@given(job=jobs())
def test_any_regions_at_length(job: tuple[Side, Side, list[int], list[int]]) -> None:
    check_copy(*job)


@pytest.fixture
def large() -> torch.Tensor:
    """Zeros; pages that are not written take no memory."""
    memory = mmap.mmap(-1, LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)


@pytest.mark.parametrize("shift", [0, 1])
def test_offsets_beyond_two_gib(large: torch.Tensor, shift: int) -> None:
    """Far apart by stride (few blocks) and by id (many small ones)."""
    small = side([(0, 9008, 9008)], 1, seed=1)
    address = large.data_ptr() + shift
    few = [Region(address, 1 << 30, 9008, 3)]
    many = [Region(address, 4096, 4096, (LARGE >> 12) - 1)]
    DeviceBlockCopier(small.regions, few, CPU).copy([0], [2])
    DeviceBlockCopier(few, few, CPU).copy([2], [1])
    DeviceBlockCopier(many, many, CPU).copy([2 << 18], [(5 << 17) + 7])
    found = {start: large[start + shift :] for start in (1 << 30, 2 << 30)}
    for start, memory in found.items():
        assert torch.equal(memory[:9008], small.memory.data), start
        assert not memory[9008:20_000].any()
        assert not large[start - 9000 : start + shift].any()
    far = large[(5 << 29) + 7 * 4096 + shift :]
    assert torch.equal(far[:4096], small.memory.data[:4096])
    assert not far[4096:10_000].any()
    assert not large[:20_000].any()


def check_batch(
    source: Guarded, target: Guarded, entries: Sequence[tuple[int, int, int]]
) -> None:
    """(source offset, target offset, bytes) of each entry."""
    before, expected = source.data.clone(), target.data.clone()
    for a, b, nbytes in entries:
        expected[b : b + nbytes] = before[a : a + nbytes]
    table = torch.tensor(entries, dtype=torch.int64).reshape(-1, 3)
    table += torch.tensor([source.data.data_ptr(), target.data.data_ptr(), 0])
    copy_batch(*table.unbind(1))
    assert torch.equal(target.data, expected)
    assert torch.equal(source.data, before)
    source.check()
    target.check()


@pytest.mark.parametrize("source_offset", [0, 1, 4, 15])
@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8])
def test_batch_alignments(source_offset: int, shift: int) -> None:
    """Entries that agree modulo 16, 4 or nothing; each shorter than a unit, too."""
    source = Guarded.of(30_000, seed=1)
    target = Guarded.of(30_000, seed=2, shift=shift)
    sizes = [0, 1, 3, 15, 16, 17, 31, 100, 8192 + 40, 9001]
    entries, end = [], source_offset
    for nbytes in sizes:
        entries.append((end, end, nbytes))
        end += -(-(nbytes + 1) // 16) * 16
    check_batch(source, target, entries)


@pytest.mark.parametrize("count", [1, 3, 6, 7, 20])
def test_batches_of_any_length(count: int) -> None:
    """Fewer entries than programs share them, more take turns."""
    source, target = Guarded.of(count * 700, seed=1), Guarded.of(count * 700, seed=2)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
    check_batch(
        source,
        target,
        [(a * 700, b * 700, 600 + 3 * b) for b, a in enumerate(order.tolist())],
    )


def test_programs_share_a_large_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy, "BATCH_SHARE", 3)
    source, target = Guarded.of(100_003, seed=1), Guarded.of(100_003, seed=2)
    check_batch(source, target, [(3, 3, 70_000), (70_003, 70_010, 20_000)])


def test_empty_batch() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    copy_batch(nothing, nothing, nothing)


def test_source_entries_may_overlap() -> None:
    source, target = Guarded.of(600, seed=1), Guarded.of(600, seed=2)
    check_batch(source, target, [(0, 0, 200), (0, 200, 200), (50, 403, 190)])


@pytest.mark.parametrize(
    ("sources", "targets", "sizes"),
    [
        (torch.zeros(1).int(), torch.zeros(1).long(), torch.zeros(1).long()),
        (torch.zeros(2).long(), torch.zeros(1).long(), torch.zeros(1).long()),
        (torch.zeros(1, 1).long(),) * 3,
        (
            torch.zeros(1).long(),
            torch.zeros(1).long(),
            torch.zeros(1).long().to("meta"),
        ),
    ],
)
def test_bad_batches(
    sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor
) -> None:
    with pytest.raises(ValueError, match="flat int64 tensors of one length on one dev"):
        copy_batch(sources, targets, sizes)


def entries_of(numbers: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Targets one after the other with gaps, sources anywhere."""
    entries, end = [], 0
    for source, gap, nbytes in numbers:
        entries.append((source, end + gap, nbytes))
        end += gap + nbytes
    return entries


ENTRY = st.tuples(st.integers(0, 2000), st.integers(0, 40), st.integers(0, 2000))


@settings(max_examples=40, deadline=None)
@given(entries=st.lists(ENTRY, max_size=5).map(entries_of), shift=st.integers(0, 15))
def test_any_batch(entries: list[tuple[int, int, int]], shift: int) -> None:
    size = 1 + max((b + nbytes for _, b, nbytes in entries), default=0)
    check_batch(
        Guarded.of(4000, seed=1), Guarded.of(size, seed=2, shift=shift), entries
    )


def test_batch_beyond_two_gib(large: torch.Tensor) -> None:
    address = large.data_ptr()
    noise = Guarded.of(5000, seed=1)
    far = 2**31 + 5000
    sources = torch.tensor([noise.data.data_ptr(), noise.data.data_ptr() + 1])
    targets = torch.tensor([address + far, address + far + 8192])
    copy_batch(sources, targets, torch.tensor([5000, 4999]))
    assert torch.equal(large[far:][:5000], noise.data)
    assert torch.equal(large[far + 8192 :][:4999], noise.data[1:])
    assert not large[far + 8192 + 4999 :][:5000].any()
    assert not large[:20_000].any()
