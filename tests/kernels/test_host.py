"""Every engine moves exactly the bytes that plain Python would."""

import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.errors import ConfigError
from kvplugin.kernels.host import BlockCopier, Region
from kvplugin.kernels.region import staging_regions
from tests.kernels.host_helpers import check_leaves_the_gil, needs_numba, run_python


@dataclass
class Side:
    """Regions inside one buffer that is full of bytes of its own: the canaries."""

    buffer: np.ndarray
    places: Sequence[tuple[int, int, int]]
    """(offset, stride, nbytes) of each region."""
    blocks: int

    @property
    def regions(self) -> list[Region]:
        address = self.buffer.ctypes.data
        return [Region(address + o, s, n, self.blocks) for o, s, n in self.places]

    def runs(self, block: int) -> list[slice]:
        return [slice(o + block * s, o + block * s + n) for o, s, n in self.places]


def side(places: Sequence[tuple[int, int, int]], blocks: int, seed: int) -> Side:
    size = max(o + blocks * s for o, s, _ in places) + 64
    noise = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return Side(noise, places, blocks)


def dense(nbytes: int, blocks: int, seed: int, offset: int = 64) -> Side:
    return side([(offset, nbytes, nbytes)], blocks, seed)


def check_copy(
    engine: str,
    source: Side,
    target: Side,
    source_ids: Sequence[int],
    target_ids: Sequence[int],
) -> None:
    """The target has the right bytes, and every other byte is as it was."""
    source_before, expected = source.buffer.copy(), target.buffer.copy()
    pairs = zip(map(int, source_ids), map(int, target_ids), strict=True)
    for source_id, target_id in pairs:
        for a, b in zip(source.runs(source_id), target.runs(target_id), strict=True):
            expected[b] = source.buffer[a]
    copier = BlockCopier(source.regions, target.regions, engine=engine)
    nbytes = copier.copy(source_ids, target_ids)
    np.testing.assert_array_equal(target.buffer, expected)
    np.testing.assert_array_equal(source.buffer, source_before)
    assert copier.block_bytes == sum(n for _, _, n in source.places)
    assert nbytes == len(target_ids) * copier.block_bytes


@st.composite
def sides(draw: st.DrawFn, sizes: Sequence[int], blocks: int) -> Side:
    """The regions one after the other, or as slices of slots; gaps anywhere."""
    gaps = [draw(st.integers(0, 70)) for _ in sizes]
    offset = draw(st.integers(0, 130))
    slots = draw(st.booleans())
    slot = sum(sizes) + sum(gaps)
    places = []
    for nbytes, gap in zip(sizes, gaps, strict=True):
        stride = slot if slots else nbytes + gap
        places.append((offset, stride, nbytes))
        offset += nbytes + gap if slots else blocks * stride
    return side(places, blocks, draw(st.integers(0, 9)))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Side, Side, list[int], list[int]]:
    sizes = draw(st.lists(st.integers(1, 3000), min_size=1, max_size=5))
    counts = st.integers(1, 12)
    source = draw(counts.flatmap(lambda blocks: sides(sizes, blocks)))
    target = draw(counts.flatmap(lambda blocks: sides(sizes, blocks)))
    target_ids = draw(st.lists(st.integers(0, target.blocks - 1), unique=True))
    some_source = st.integers(0, source.blocks - 1)
    n = len(target_ids)
    return (
        source,
        target,
        draw(st.lists(some_source, min_size=n, max_size=n)),
        (target_ids),
    )


@settings(max_examples=100, deadline=None)
@given(job=jobs())
def test_any_layout(engine: str, job: tuple[Side, Side, list[int], list[int]]) -> None:
    check_copy(engine, *job)


# 1 KiB: streaming begins; 64 KiB: it takes another span.
@pytest.mark.parametrize("nbytes", [1, 63, 1023, 1024, 1025, 65535, 65536, 200_003])
@pytest.mark.parametrize("source_offset", [64, 65, 127])
@pytest.mark.parametrize("target_offset", [64, 65, 127])
def test_sizes_and_alignments(
    engine: str, nbytes: int, source_offset: int, target_offset: int
) -> None:
    source = dense(nbytes, 3, seed=1, offset=source_offset)
    target = dense(nbytes, 3, seed=2, offset=target_offset)
    check_copy(engine, source, target, [2, 0], [0, 1])


@pytest.mark.parametrize(
    ("source_ids", "target_ids"),
    [
        pytest.param([2, 3, 4, 5], [1, 2, 3, 4], id="one run"),
        pytest.param([5, 4, 3, 2], [4, 3, 2, 1], id="one run, downwards"),
        pytest.param([2, 3, 4, 5], [4, 3, 2, 1], id="one side up, one down"),
        pytest.param([0, 1, 5, 6, 7], [3, 4, 5, 0, 1], id="breaks on one side"),
        pytest.param([0, 1, 3, 4], [2, 3, 5, 6], id="breaks on both sides"),
        pytest.param([1, 1, 1, 2], [4, 5, 6, 7], id="a source block three times"),
        pytest.param([7], [7], id="the last block"),
    ],
)
@pytest.mark.parametrize("gap", [0, 5])
@pytest.mark.parametrize("as_array", [False, True])
def test_runs_of_ids(
    engine: str,
    source_ids: list[int],
    target_ids: list[int],
    gap: int,
    as_array: bool,
) -> None:
    source = dense(1500, 8, seed=1)
    target = side([(64, 1500 + gap, 1500)], 8, seed=2)
    ids = [source_ids, target_ids]
    check_copy(engine, source, target, *(map(np.asarray, ids) if as_array else ids))


def test_slices_that_touch_are_joined_only_where_both_sides_touch(engine: str) -> None:
    sizes = (700, 500, 300, 200)
    slot = [(64, 1700, 700), (764, 1700, 500), (1264, 1700, 300), (1564, 1700, 200)]
    gap_after_two = [
        (o + (9 if i > 1 else 0), 1709, n) for i, (o, _, n) in enumerate(slot)
    ]
    layers = [(64 + 6000 * i, n, n) for i, n in enumerate(sizes)]
    for source, target in [
        (slot, slot),
        (slot, gap_after_two),
        (gap_after_two, gap_after_two),
        (slot, layers),
        (layers, slot),
    ]:
        check_copy(
            engine,
            side(source, 6, seed=1),
            side(target, 6, seed=2),
            [0, 1, 2, 5],
            [1, 2, 3, 0],
        )


def test_regions_that_continue_into_the_next_block_are_not_joined(engine: str) -> None:
    """Region 1 is region 0 one block on: joined, its runs would overlap."""
    shifted = [(64, 100, 100), (164, 100, 100)]
    apart = [(64, 100, 100), (2000, 100, 100)]
    check_copy(engine, side(shifted, 4, 1), side(apart, 4, 2), [0, 2], [3, 1])


def test_gather_to_a_staging_buffer_and_scatter_from_it(engine: str) -> None:
    layers = [(64, 700, 700), (5000, 530, 500), (9001, 31, 31)]
    source, target = side(layers, 6, seed=1), side(layers, 6, seed=2)
    staging = np.full(3 * 1231 + 2, 7, np.uint8)
    regions = staging_regions(staging.ctypes.data + 1, (700, 500, 31), 3)
    BlockCopier(source.regions, regions, engine=engine).copy([4, 0, 5], [0, 1, 2])
    for slot, block in enumerate([4, 0, 5]):
        whole = np.concatenate([source.buffer[run] for run in source.runs(block)])
        start = 1 + slot * 1231
        np.testing.assert_array_equal(staging[start : start + 1231], whole)
    assert (staging[0], staging[-1]) == (7, 7)
    expected = target.buffer.copy()
    for to, block in zip([3, 1, 2], [4, 0, 5], strict=True):
        for a, b in zip(source.runs(block), target.runs(to), strict=True):
            expected[b] = source.buffer[a]
    BlockCopier(regions, target.regions, engine=engine).copy([0, 1, 2], [3, 1, 2])
    np.testing.assert_array_equal(target.buffer, expected)


@pytest.mark.parametrize(
    ("sizes", "message"), [((8, 0), "nbytes 0 is not"), ((-8, 16), "nbytes -8 is not")]
)
def test_bad_staging_regions(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        staging_regions(4096, sizes, 2)


@pytest.mark.parametrize(
    "ids",
    [
        np.arange(4, dtype=np.uint8),
        np.arange(4, dtype=">i8"),
        np.repeat(np.arange(4), 2)[::2],
        np.broadcast_to(np.int32(3), (1,)),
        range(4),
        (0, 1, 2, 3),
    ],
    ids=["uint8", "big-endian", "strided", "read-only", "range", "tuple"],
)
def test_kinds_of_ids(engine: str, ids: Sequence[int]) -> None:
    check_copy(engine, dense(64, 4, 1), dense(64, 4, 2), ids, ids)


@pytest.mark.parametrize("ids", [[], (), np.empty(0, np.int64)])
def test_no_ids(engine: str, ids: Sequence[int]) -> None:
    check_copy(engine, dense(64, 4, 1), dense(64, 4, 2), ids, ids)


@pytest.mark.parametrize(
    ("source_ids", "target_ids", "message"),
    [
        ([0, 1], [0], "2 source ids do not pair with 1 target ids"),
        ([], [0], "0 source ids do not pair with 1 target ids"),
        ([0, 4], [0, 1], "source id 4 is out of range: there are 4 blocks, 0 to 3"),
        ([0, -1], [0, 1], "source id -1 is out of range: there are 4 blocks"),
        ([0, 1], [0, 6], "target id 6 is out of range: there are 6 blocks, 0 to 5"),
        ([0, 1], [-2, 1], "target id -2 is out of range"),
        ([0, 1, 2], [5, 1, 5], "target id 5 appears more than once"),
        ([[0, 1]], [[0, 1]], r"source ids must be a flat list .* shape \(1, 2\)"),
        ([0.5], [0], "source ids must be a flat list of integers, not float64"),
        ([0], [True], "target ids must be a flat list of integers, not bool"),
        ([2**70], [0], "source ids must be a flat list of integers, not object"),
        (np.array([2**64 - 1], np.uint64), [0], f"source ids: {2**64 - 1} is more"),
        (0, [0], r"source ids must be a flat list of integers, .* shape \(\)"),
    ],
)
def test_bad_ids_change_nothing(
    engine: str, source_ids: Sequence[int], target_ids: Sequence[int], message: str
) -> None:
    source, target = dense(64, 4, 1), dense(64, 6, 2)
    before = target.buffer.copy()
    copier = BlockCopier(source.regions, target.regions, engine=engine)
    with pytest.raises(ValueError, match=message):
        copier.copy(source_ids, target_ids)
    np.testing.assert_array_equal(target.buffer, before)


def test_ids_must_be_in_every_region() -> None:
    target = dense(64, 4, 1)
    long, short = Region(4096, 64, 64, 4), Region(8192, 64, 64, 3)
    copier = BlockCopier([long, short], target.regions * 2)
    with pytest.raises(ValueError, match="source id 3 is out of range: there are 3"):
        copier.copy([3], [0])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, 8, 8, 1), "address 0 is not positive"),
        ((4096, 8, 0, 1), "nbytes 0 is not positive"),
        ((4096, 8, -8, 1), "nbytes -8 is not positive"),
        ((4096, 8, 8, 0), "blocks 0 is not positive"),
        ((4096, 7, 8, 1), "stride 7 is smaller than nbytes 8"),
        ((4096, -8, 8, 1), "stride -8 is smaller than nbytes 8"),
        ((4096, 8, 8, 2**31 + 1), "blocks 2147483649 is more than 2147483648"),
    ],
)
def test_bad_regions(values: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Region(*values)


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
        BlockCopier(regions(sources), regions(targets))


def test_unknown_engine() -> None:
    regions = dense(64, 1, 1).regions
    with pytest.raises(ConfigError, match=r"unknown copy engine 'numbas'.*'numba'"):
        BlockCopier(regions, regions, engine="numbas")


def test_offsets_beyond_two_gib(engine: str, tmp_path: Path) -> None:
    """Far apart by stride (few blocks) and by id (many small ones)."""
    with (tmp_path / "sparse").open("w+b") as file:
        file.truncate(7 << 30)
        sparse = mmap.mmap(file.fileno(), 0)
    memory = np.frombuffer(sparse, np.uint8)
    few = [Region(memory.ctypes.data, 1 << 30, 5000, 6)]
    many = [Region(memory.ctypes.data, 4096, 4096, 7 << 18)]
    noise = dense(5000, 1, seed=1, offset=0)
    BlockCopier(noise.regions, few, engine=engine).copy([0], [5])
    BlockCopier(few, few, engine=engine).copy([5], [3])
    BlockCopier(many, many, engine=engine).copy([5 << 18], [(6 << 18) + 1])
    for start, length in ((5 << 30, 5000), (3 << 30, 5000), ((6 << 30) + 4096, 4096)):
        found = memory[start : start + length]
        np.testing.assert_array_equal(found, noise.buffer[:length])
    assert not memory[1 << 30 : (1 << 30) + 5000].any()
    assert not memory[(6 << 30) + 8192 : (6 << 30) + 9000].any()


@pytest.mark.parametrize("blocks", [1, 8, 2048])
def test_copies_leave_the_gil(
    engine: str, blocks: int, progress: Callable[[], int]
) -> None:
    """However large a block is: numpy keeps it for few items, be they long."""
    nbytes = (128 << 20) // blocks
    source, target = dense(nbytes, blocks, 1), dense(nbytes, blocks, 2)
    copier = BlockCopier(source.regions, target.regions, engine=engine)
    ids = list(range(blocks))
    order = np.random.default_rng(0).permutation(blocks)
    check_leaves_the_gil(lambda: copier.copy(ids, order), source.buffer, progress)


def test_copies_in_two_threads(engine: str) -> None:
    source, target = dense(50_000, 64, 1), dense(50_000, 64, 2)
    copier = BlockCopier(source.regions, target.regions, engine=engine)
    halves = np.random.default_rng(3).permutation(64).reshape(2, 32)

    def copy_half(ids: np.ndarray) -> None:
        for _ in range(20):
            copier.copy(63 - ids, ids)

    threads = [threading.Thread(target=copy_half, args=(ids,)) for ids in halves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = target.buffer[64:-64].reshape(64, -1)
    expected = source.buffer[64:-64].reshape(64, -1)[::-1]
    np.testing.assert_array_equal(found, expected)


COPY_ONE = """
import numpy as np
from kvplugin.kernels.host import BlockCopier, Region
a, b = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
sides = [Region(a.ctypes.data, 10, 10, 10)], [Region(b.ctypes.data, 10, 10, 10)]
BlockCopier(*sides).copy(range(10), range(10))
assert (a == b).all()
"""


def test_without_numba_numpy_serves_and_says_so() -> None:
    code = "import sys; sys.modules['numba'] = None" + COPY_ONE
    assert "copies of KV blocks go through numpy" in run_python(code)


@needs_numba
def test_numba_by_name_where_it_cannot_compile() -> None:
    code = (
        COPY_ONE
        + """
try:
    BlockCopier(*sides, engine="numba")
except ValueError as error:
    assert "engine 'numba' can't be used (NUMBA_DISABLE_JIT" in str(error), error
else:
    raise SystemExit("no error")
"""
    )
    assert "NUMBA_DISABLE_JIT" in run_python(code, NUMBA_DISABLE_JIT="1")


@needs_numba
def test_nowhere_to_cache_machine_code() -> None:
    nowhere = """
import numba
njit = numba.njit
def njit_without_cache(*args, cache=False, **kwargs):
    if cache:
        raise RuntimeError("no locator available")
    return njit(*args, **kwargs)
numba.njit = njit_without_cache
"""
    assert run_python(nowhere + COPY_ONE) == ""


def test_importing_the_copier_imports_neither_torch_nor_numba() -> None:
    code = """
import sys, kvplugin.kernels.host
assert not {"torch", "numba"} & set(sys.modules)
"""
    assert run_python(code) == ""
