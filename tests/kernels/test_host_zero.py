"""Blocks are zero afterwards, and nothing else is."""

import mmap
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.errors import ConfigError
from kvplugin.kernels.host_zero import BlockZeroer
from kvplugin.kernels.region import Region
from tests.kernels.host_helpers import check_leaves_the_gil, needs_numba


@pytest.fixture(
    scope="module", params=[pytest.param("numba", marks=needs_numba), "numpy"]
)
def engine(request: pytest.FixtureRequest) -> str:
    """Zeroing knows no streamed way."""
    return str(request.param)


def noise(nbytes: int) -> np.ndarray:
    """No byte of it is zero."""
    return np.random.default_rng(nbytes).integers(1, 256, nbytes, dtype=np.uint8)


Places = Sequence[tuple[int, int, int]]
"""(offset, stride, nbytes) of each region."""


def regions_in(memory: np.ndarray, places: Places, blocks: int) -> list[Region]:
    address = memory.ctypes.data
    return [Region(address + o, s, n, blocks) for o, s, n in places]


def check_zero(engine: str, places: Places, blocks: int, ids: Sequence[int]) -> None:
    memory = noise(max(o + blocks * s for o, s, _ in places) + 64)
    expected = memory.copy()
    for block in map(int, ids):
        for offset, stride, nbytes in places:
            start = offset + block * stride
            expected[start : start + nbytes] = 0
    zeroer = BlockZeroer(regions_in(memory, places, blocks), engine=engine)
    assert zeroer.zero(ids) == len(ids) * zeroer.block_bytes
    assert zeroer.block_bytes == sum(nbytes for _, _, nbytes in places)
    np.testing.assert_array_equal(memory, expected)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Places, int, list[int]]:
    """The regions one after the other, or as slices of slots; gaps anywhere."""
    sizes = draw(st.lists(st.integers(1, 3000), min_size=1, max_size=5))
    blocks, gap = draw(st.integers(1, 12)), draw(st.integers(0, 70))
    slots, slot = draw(st.booleans()), sum(sizes) + gap
    places, offset = [], draw(st.integers(0, 130))
    for nbytes in sizes:
        stride = slot if slots else nbytes + gap
        places.append((offset, stride, nbytes))
        offset += nbytes if slots else blocks * stride
    return places, blocks, draw(st.lists(st.integers(0, blocks - 1), max_size=12))


@settings(max_examples=100, deadline=None)
@given(job=jobs())
def test_any_layout(engine: str, job: tuple[Places, int, list[int]]) -> None:
    check_zero(engine, *job)


@pytest.mark.parametrize("nbytes", [1, 63, 1024, 65537])
@pytest.mark.parametrize("offset", [64, 65, 127])
def test_sizes_and_alignments(engine: str, nbytes: int, offset: int) -> None:
    check_zero(engine, [(offset, nbytes + 3, nbytes)], 3, [2, 0])


@pytest.mark.parametrize(
    "ids",
    [
        [],
        np.empty(0, np.int64),
        [3, 3, 1],
        range(1, 4),
        np.array([3, 0], np.uint8),
        np.repeat(np.arange(4), 2)[::2],
    ],
    ids=["none", "no array", "twice", "range", "uint8", "strided"],
)
def test_kinds_of_ids(engine: str, ids: Sequence[int]) -> None:
    check_zero(engine, [(64, 100, 100), (500, 90, 30)], 4, ids)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 4], "block id 4 is out of range: there are 4 blocks, 0 to 3"),
        ([-1, 0], "block id -1 is out of range"),
        ([[0]], r"block ids must be a flat list .* shape \(1, 1\)"),
        ([0.5], "block ids must be a flat list of integers, not float64"),
    ],
)
def test_bad_ids_change_nothing(engine: str, ids: Sequence[int], message: str) -> None:
    memory = noise(400)
    before = memory.copy()
    zeroer = BlockZeroer(regions_in(memory, [(0, 100, 100)], 4), engine=engine)
    with pytest.raises(ValueError, match=message):
        zeroer.zero(ids)
    np.testing.assert_array_equal(memory, before)


def test_ids_must_be_in_every_region() -> None:
    zeroer = BlockZeroer([Region(4096, 64, 64, 4), Region(8192, 64, 64, 3)])
    with pytest.raises(ValueError, match="block id 3 is out of range: there are 3"):
        zeroer.zero([3])


def test_no_regions() -> None:
    with pytest.raises(ValueError, match="at least one region"):
        BlockZeroer([])


def test_unknown_engine() -> None:
    with pytest.raises(ConfigError, match=r"unknown copy engine 'numbas'.*'numba'"):
        BlockZeroer([Region(4096, 64, 64, 4)], engine="numbas")


def test_offsets_beyond_two_gib(engine: str, tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("w+b") as file:
        file.truncate(5 << 30)
        sparse = mmap.mmap(file.fileno(), 0)
    memory = np.frombuffer(sparse, np.uint8)
    memory[4 << 30 : (4 << 30) + 5002] = 7
    memory[:5002] = 7
    region = Region(memory.ctypes.data, 1 << 30, 5000, 5)
    BlockZeroer([region], engine=engine).zero([4])
    assert not memory[4 << 30 : (4 << 30) + 5000].any()
    assert memory[(4 << 30) + 5000 : (4 << 30) + 5002].all()
    assert memory[:5002].all()


def test_zeroing_leaves_the_gil(engine: str, progress: Callable[[], int]) -> None:
    memory = noise(128 << 20)
    places = [(0, 16 << 20, 16 << 20)]
    zeroer = BlockZeroer(regions_in(memory, places, 8), engine=engine)
    check_leaves_the_gil(lambda: zeroer.zero(range(8)), memory, progress)
