"""The zeroing kernel writes zeros to the blocks it is told, and nowhere else."""

import mmap
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.kernels import words
from kvplugin.kernels.region import Region
from kvplugin.kernels.zero import DeviceBlockZeroer
from tests.kernels.canaries import Guarded

CPU = torch.device("cpu")
LARGE = 3 << 30
"""Bytes of virtual memory; a test touches a few pages of it."""

Place = tuple[int, int, int]
"""Offset, stride and bytes of a region."""


@pytest.fixture(autouse=True, scope="module")
def few_programs() -> Iterator[None]:
    """Each goes through several pieces, and the interpreter has less to do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "PROGRAMS", 6)
        yield


def check_zero(
    places: Sequence[Place], blocks: int, ids: Sequence[int], shift: int = 0
) -> None:
    """What is left is what a slice a block and region would leave."""
    size = max(offset + (blocks - 1) * stride + n for offset, stride, n in places)
    memory = Guarded.of(size, shift=shift)
    memory.data[memory.data == 0] = 1
    expected = memory.data.clone()
    for block in ids:
        for offset, stride, nbytes in places:
            start = offset + block * stride
            expected[start : start + nbytes] = 0
    address = memory.data.data_ptr()
    regions = [Region(address + o, s, n, blocks) for o, s, n in places]
    zeroer = DeviceBlockZeroer(regions, CPU)
    assert zeroer.block_bytes == sum(n for _, _, n in places)
    assert zeroer.zero(ids) == len(ids) * zeroer.block_bytes
    assert torch.equal(memory.data, expected)
    memory.check()


@pytest.mark.parametrize("nbytes", [1, 2, 12, 16, 656, 1025, 8192, 8208, 20_000])
@pytest.mark.parametrize("gap", [0, 1, 48])
@pytest.mark.parametrize("shift", [0, 3, 8])
def test_sizes_and_alignments(nbytes: int, gap: int, shift: int) -> None:
    check_zero([(0, nbytes + gap, nbytes)], 3, [2, 0], shift)


@pytest.mark.parametrize(
    "ids",
    [
        [],
        [4],
        [3, 0],
        [2, 2, 2],
        range(5),
        torch.tensor([1, 4, 1]),
        torch.empty(0, dtype=torch.int64),
    ],
    ids=["none", "last", "two", "repeated", "all", "tensor", "empty tensor"],
)
def test_ids(ids: Sequence[int]) -> None:
    check_zero([(0, 320, 320), (1600, 336, 160), (1760, 336, 176)], 5, ids)


def test_bad_ids_change_nothing() -> None:
    memory = Guarded.of(256)
    before = memory.buffer.clone()
    region = Region(memory.data.data_ptr(), 64, 64, 4)
    zeroer = DeviceBlockZeroer([region], CPU)
    for ids in ([0, 4], [-1, 0]):
        with pytest.raises(ValueError, match="is out of range: there are 4 blocks"):
            zeroer.zero(ids)
    assert torch.equal(memory.buffer, before)


def test_ids_must_be_in_every_region() -> None:
    regions = [Region(4096, 64, 64, 4), Region(8192, 64, 64, 3)]
    with pytest.raises(ValueError, match="block id 3 is out of range: there are 3"):
        DeviceBlockZeroer(regions, CPU).zero([3])


def test_no_regions() -> None:
    with pytest.raises(ValueError, match="a zeroer needs at least one region"):
        DeviceBlockZeroer([], CPU)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_regions(data: st.DataObject) -> None:
    step = data.draw(st.sampled_from((1, 4, 16)))
    blocks, end, places = data.draw(st.integers(1, 6)), 0, []
    for units in data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=4)):
        stride = (units + data.draw(st.integers(0, 4))) * step
        places.append((end, stride, units * step))
        end += blocks * stride
    ids = data.draw(st.lists(st.integers(0, blocks - 1), max_size=8))
    check_zero(places, blocks, ids, data.draw(st.integers(0, 15 // step)) * step)


@pytest.mark.parametrize("shift", [0, 1])
def test_offsets_beyond_two_gib(shift: int) -> None:
    """Far apart by stride (few blocks) and by id (many small ones)."""
    mapping = mmap.mmap(-1, LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    address = memory.data_ptr() + shift
    few = Region(address, 1 << 30, 5008, 3)
    many = Region(address, 4096, 4096, (LARGE >> 12) - 1)
    for region, block in ((few, 2), (many, (5 << 17) + 7)):
        start = block * region.stride + shift
        near = memory[start - 6000 : start + 12_000]
        near.fill_(7)
        memory[:12_000] = 7
        DeviceBlockZeroer([region], CPU).zero([block])
        assert not near[6000:][: region.nbytes].any()
        assert (near[:6000] == 7).all()
        assert (near[6000 + region.nbytes :] == 7).all()
        assert (memory[:12_000] == 7).all()
