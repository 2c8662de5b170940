"""Conversions put every element where `KVLayout.row` says, whatever the layouts.

Bytes move whatever their dtype: dtypes here are sizes of an element.
"""

import itertools
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.kernels import words
from kvplugin.kernels.permute import DeviceBlockConverter
from kvplugin.layout import HeadSlice, KVLayout, Part, head_slices, plan_conversion
from tests.core.kv_caches import Cache, Sizes, after_copy
from tests.kernels.canaries import Guarded
from tests.kernels.row_reference import Shape, fill, layout, moves, span

CPU = torch.device("cpu")
DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.float32,
)
LARGE = 3 << 30
"""Bytes of virtual memory; a test touches a few pages of it."""


@pytest.fixture(autouse=True, scope="module")
def few_programs() -> Iterator[None]:
    """Each goes through several pieces, and the interpreter has less to do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "PROGRAMS", 6)
        yield


def check_convert(
    source: KVLayout,
    target: KVLayout,
    source_chunks: Sequence[int],
    target_chunks: Sequence[int],
    *,
    heads: HeadSlice | None = None,
    itemsize: int = 2,
    shift: int = 0,
) -> DeviceBlockConverter:
    """Every row is where the reference says, and every other byte is as it was."""
    plan = plan_conversion(source, target, heads)
    heads = heads or HeadSlice(0, 0, source.heads)
    a = Guarded.of(span(source), seed=1)
    b = Guarded.of(span(target), seed=2, shift=shift)
    fill(a.data, source, itemsize)
    before, expected = a.data.numpy().copy(), b.data.numpy().copy()
    moved = 0
    for pair in zip(source_chunks, target_chunks, strict=True):
        for from_row, to_row in moves(plan, heads, *map(int, pair)):
            nbytes = source.parts[from_row[0]].row_bytes
            x, y = source.row(*from_row), target.row(*to_row)
            expected[y : y + nbytes] = before[x : x + nbytes]
            moved += nbytes
    converter = DeviceBlockConverter(plan, a.data.data_ptr(), b.data.data_ptr(), CPU)
    assert converter.convert(source_chunks, target_chunks) == moved
    np.testing.assert_array_equal(b.data.numpy(), expected)
    np.testing.assert_array_equal(a.data.numpy(), before)
    a.check()
    b.check()
    return converter


def all_chunks(source: KVLayout, target: KVLayout) -> tuple[list[int], list[int]]:
    """The blocks of both sides in an order of their own, as rows of one request."""
    plan = plan_conversion(source, target)
    rng = np.random.default_rng(3)
    ids = [rng.permutation(side.num_blocks).tolist() for side in (source, target)]
    room = min(
        source.num_blocks * source.tokens,
        target.num_blocks * target.tokens,
    )
    return plan.pair_chunks(*ids, num_tokens=room)


ORDERS = {
    "FlashAttention NHD": "cbth",
    "FlashAttention HND": "cbht",
    "FlashInfer NHD": "bcth",
    "FlashInfer HND": "bcht",
    "head-major": "hbct",
    "token-major": "tbch",
}
SHAPE = Shape(blocks=3, tokens=4, heads=2, dim=16)


@pytest.mark.parametrize("source", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("target", ORDERS.values(), ids=ORDERS)
def test_between_layouts(source: str, target: str) -> None:
    sides = layout(source, SHAPE), layout(target, SHAPE)
    converter = check_convert(*sides, [2, 0], [0, 1])
    assert converter._unit == 16


@pytest.mark.parametrize("tokens", [(64, 128), (128, 64), (32, 128), (96, 64)])
@pytest.mark.parametrize("heads", [None, HeadSlice(1, 0, 1)])
def test_keys_transposed_over_their_blocks(
    tokens: tuple[int, int], heads: HeadSlice | None
) -> None:
    """Pages of CPU attention: an element of all of a block's keys side by side."""
    rows = [[*range(384 // n)][::-1] for n in tokens]
    source, target = (
        Cache("CPU attention", Sizes(2, 8, 8, "uint16"), len(row), n, seed=n)
        for row, n in zip(rows, tokens, strict=True)
    )
    plan = plan_conversion(source.layout, target.layout, heads)
    expected = after_copy(source, target, (rows[0], rows[1]), 384, heads)
    converter = DeviceBlockConverter(plan, source.address, target.address, CPU)
    converter.convert(*plan.pair_chunks(rows[0], rows[1]))
    np.testing.assert_array_equal(target.buffer, expected)


@pytest.mark.parametrize("source", ["bht", "bth"])
@pytest.mark.parametrize("target", ["bht", "bth", "hbt"])
def test_rows_of_key_and_value_side_by_side(source: str, target: str) -> None:
    """Among them the block-major fused form, with halves of different sizes."""
    shape = replace(SHAPE, dim=40)
    sides = [layout(order, shape, key_size=24) for order in (source, target)]
    check_convert(*sides, [2, 0, 1], [1, 0, 2])


@pytest.mark.parametrize("order", ["cbth", "bcht"])
def test_fused_and_split_layouts(order: str) -> None:
    fused = layout("bht", replace(SHAPE, dim=32), key_size=16)
    split = layout(order, SHAPE)
    check_convert(fused, split, [1, 2], [0, 2])
    check_convert(split, fused, [1, 2], [0, 2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    """As many heads as tokens, so that a swapped pair of axes keeps all sizes."""
    shape = Shape(blocks=2, tokens=4, heads=4, dim=16, dtype=dtype)
    nhd, hnd = layout("cbth", shape), layout("cbht", shape)
    check_convert(nhd, hnd, [1, 0], [0, 1], itemsize=dtype.itemsize)
    check_convert(hnd, nhd, [1, 0], [0, 1], itemsize=dtype.itemsize)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("order", ["cbth", "bcht"])
def test_heads_as_many_as_tokens_with_full_rows(dtype: torch.dtype, order: str) -> None:
    shape = Shape(blocks=2, tokens=8, heads=8, dim=128, dtype=dtype)
    hnd = layout("cbht", shape)
    check_convert(layout(order, shape), hnd, [1], [0], itemsize=dtype.itemsize)


@pytest.mark.parametrize(
    ("dim", "dtype", "shift", "unit"),
    [
        pytest.param(8, torch.bfloat16, 8, 8, id="8 bytes by address"),
        pytest.param(12, torch.bfloat16, 0, 8, id="8 bytes by rows"),
        pytest.param(3, torch.float32, 0, 4, id="4 bytes"),
        pytest.param(5, torch.bfloat16, 0, 2, id="2 bytes"),
        pytest.param(5, torch.int8, 0, 1, id="bytes by rows"),
        pytest.param(16, torch.bfloat16, 1, 1, id="bytes by address"),
        pytest.param(1, torch.int8, 0, 1, id="one byte a row"),
        pytest.param(700, torch.int8, 0, 4, id="rows over several pieces"),
        pytest.param(4104, torch.bfloat16, 0, 16, id="rows longer than a piece"),
    ],
)
def test_odd_sizes_and_addresses(
    dim: int, dtype: torch.dtype, shift: int, unit: int
) -> None:
    shape = Shape(blocks=2, tokens=3, heads=2, dim=dim, dtype=dtype)
    sides = layout("cbth", shape), layout("bcht", shape)
    converter = check_convert(
        *sides, [1, 0], [0, 1], itemsize=dtype.itemsize, shift=shift
    )
    assert converter._unit == unit


def test_strides_that_are_not_aligned() -> None:
    shape = replace(SHAPE, dtype=torch.int8)
    dense = layout("cbth", shape)
    parts = tuple(
        replace(
            part,
            offset=part.offset * 2 + 3,
            block_stride=part.block_stride * 2 - 5,
            token_stride=part.token_stride + 7,
            head_stride=part.head_stride + 1,
        )
        for part in dense.parts
    )
    odd = replace(dense, parts=parts)
    assert check_convert(dense, odd, [2, 1], [0, 1], itemsize=1)._unit == 1
    check_convert(odd, dense, [2, 1], [0, 1], itemsize=1)


@pytest.mark.parametrize("target", ["bcht", "cbth"])
@pytest.mark.parametrize(
    ("source_tokens", "target_tokens"), [(4, 8), (8, 4), (4, 16), (48, 32), (32, 48)]
)
def test_other_block_sizes(source_tokens: int, target_tokens: int, target: str) -> None:
    tokens = np.lcm(source_tokens, target_tokens)
    shapes = [
        Shape(int(tokens) // size + 1, size, heads=2, dim=8)
        for size in (source_tokens, target_tokens)
    ]
    sides = layout("cbth", shapes[0]), layout(target, shapes[1])
    check_convert(*sides, *all_chunks(*sides))


def test_latent_rows_in_other_block_sizes() -> None:
    """One kind of row of 656 bytes, without heads."""
    shapes = [
        Shape(blocks, tokens, heads=1, dim=656, dtype=torch.int8)
        for blocks, tokens in ((5, 4), (3, 8))
    ]
    sides = layout("bt", shapes[0]), layout("bt", shapes[1])
    check_convert(*sides, *all_chunks(*sides), itemsize=1)


def test_a_chain_leads_back() -> None:
    """NHD, larger blocks in HND, smaller head-major ones, and NHD again."""
    sides = [
        layout("cbth", replace(SHAPE, blocks=4)),
        layout("bcht", replace(SHAPE, blocks=2, tokens=8)),
        layout("hbct", replace(SHAPE, blocks=8, tokens=2)),
        layout("cbth", replace(SHAPE, blocks=4)),
    ]
    memories = [Guarded.of(span(side), seed=i) for i, side in enumerate(sides)]
    fill(memories[0].data, sides[0], 2)
    steps = zip(itertools.pairwise(sides), itertools.pairwise(memories), strict=True)
    for (source, target), (a, b) in steps:
        plan = plan_conversion(source, target)
        chunks = plan.pair_chunks(range(source.num_blocks), range(target.num_blocks))
        addresses = a.data.data_ptr(), b.data.data_ptr()
        DeviceBlockConverter(plan, *addresses, CPU).convert(*chunks)
    assert torch.equal(memories[-1].data, memories[0].data)
    for memory in memories:
        memory.check()


@pytest.mark.parametrize("order", ["cbth", "bcht"])
@pytest.mark.parametrize(
    ("source_ranks", "target_ranks"), [(1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (8, 16)]
)
def test_tensor_parallel_ratios(
    source_ranks: int, target_ranks: int, order: str
) -> None:
    """Each target rank gets its heads from all source ranks that have some."""
    heads = 8
    held = [max(1, heads // ranks) for ranks in (source_ranks, target_ranks)]
    source = layout(order, replace(SHAPE, heads=held[0]))
    target = layout("bcht", replace(SHAPE, heads=held[1]))
    for rank in {0, target_ranks - 1}:
        pieces = head_slices(heads, source_ranks, target_ranks, rank)
        assert sum(piece.heads.num_heads for piece in pieces) == held[1]
        for piece in pieces:
            check_convert(source, target, [2, 1], [0, 2], heads=piece.heads)


@pytest.mark.parametrize(
    ("source_chunks", "target_chunks"),
    [
        pytest.param([], [], id="none"),
        pytest.param([5], [11], id="the last chunks"),
        pytest.param([1, 1, 1], [4, 9, 0], id="a source chunk three times"),
        pytest.param([0, 1, 2], [3, 4, 5], id="in step"),
        pytest.param([0, 2, 4], [7, 5, 3], id="one side down"),
    ],
)
@pytest.mark.parametrize("kind", [list, torch.tensor, np.array], ids=lambda k: str(k))
def test_chunk_ids(
    source_chunks: list[int],
    target_chunks: list[int],
    kind: Callable[[list[int]], Sequence[int]],
) -> None:
    source = layout("cbth", replace(SHAPE, tokens=8))
    target = layout("bcht", replace(SHAPE, tokens=4, blocks=12))
    ids = [kind(chunks) for chunks in (source_chunks, target_chunks)]
    if kind is torch.tensor:
        ids = [chunks.to(torch.int64) for chunks in ids]
    check_convert(source, target, *ids)


def test_bad_chunk_ids_change_nothing() -> None:
    source = layout("cbth", replace(SHAPE, tokens=8))
    target = layout("bcht", replace(SHAPE, tokens=4, blocks=12))
    plan = plan_conversion(source, target)
    a, b = Guarded.of(span(source), seed=1), Guarded.of(span(target), seed=2)
    before = b.buffer.clone()
    converter = DeviceBlockConverter(plan, a.data.data_ptr(), b.data.data_ptr(), CPU)
    assert converter.chunk_bytes == plan.chunk_bytes
    for source_chunks, target_chunks, message in (
        ([6], [0], "source id 6 is out of range: there are 6 chunks, 0 to 5"),
        ([0], [12], "target id 12 is out of range: there are 12 chunks, 0 to 11"),
        ([0, 1], [3, 3], "target id 3 appears more than once"),
        ([0, 1], [3], "2 source ids do not pair with 1 target ids"),
    ):
        with pytest.raises(ValueError, match=message):
            converter.convert(source_chunks, target_chunks)
    assert torch.equal(b.buffer, before)


def test_refused_conversions() -> None:
    side = layout("bt", SHAPE)
    with pytest.raises(ValueError, match="target_address 0 is not positive"):
        DeviceBlockConverter(plan_conversion(side, side), 4096, 0, CPU)
    many = layout("bt", replace(SHAPE, blocks=2**31 + 1))
    with pytest.raises(ValueError, match="2147483649 source chunks or 3 target chunks"):
        DeviceBlockConverter(plan_conversion(many, side), 4096, 4096, CPU)
    huge = layout("bt", Shape(1, 1 << 20, 1, 1 << 10, torch.int8))
    with pytest.raises(ValueError, match="too large to be moved 1 bytes at a time"):
        DeviceBlockConverter(plan_conversion(huge, huge), 4096, 4097, CPU)


@pytest.mark.parametrize("shift", [0, 1])
def test_offsets_beyond_two_gib(shift: int) -> None:
    """By block, by key and value, by head, and by place in a block."""
    mapping = mmap.mmap(-1, LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    dense = layout("cbth", SHAPE)
    for far in ("offset", "block_stride", "head_stride", "token_stride"):
        # Two blocks, heads or chunks, the second of which lies beyond 2 GiB.
        parts = tuple(
            replace(part, **{far: (2 << 30) + 4096 + (getattr(part, far))})
            for part in layout("cbht", replace(SHAPE, blocks=2, tokens=2)).parts
        )
        target = KVLayout(parts, 2, 2, 2, dense.dtype)
        check_far(memory[shift:], dense, target)


def check_far(memory: torch.Tensor, source: KVLayout, target: KVLayout) -> None:
    """Chunks 4 and 1 of the source become block 1 of a target of that much memory."""
    assert span(target) > 2 << 30
    plan = plan_conversion(source, target)
    a = Guarded.of(span(source), seed=1)
    fill(a.data, source, 2)
    converter = DeviceBlockConverter(plan, a.data.data_ptr(), memory.data_ptr(), CPU)
    converter.convert([4], [1])
    rows = [(target.row(*to), r) for r, to in moves(plan, HeadSlice(0, 0, 2), 4, 1)]
    nbytes = source.parts[0].row_bytes
    wanted = set()
    for offset, row in rows:
        start = source.row(*row)
        found = memory[offset : offset + nbytes]
        assert torch.equal(found, a.data[start : start + nbytes])
        wanted.add(offset)
    for offset in wanted:
        memory[offset : offset + nbytes] = 0
    for offset in (0, *wanted):
        assert not memory[max(0, offset - 5000) : offset + 5000].any()


@st.composite
def strided(draw: st.DrawFn, shape: Shape, rows: Sequence[int], step: int) -> KVLayout:
    """Axes in any order with gaps after each, parts side by side or apart."""
    sizes = {"block": shape.blocks, "token": shape.tokens, "head": shape.heads}
    order = draw(st.permutations(list(sizes)))
    fused = draw(st.booleans())
    parts: list[Part] = []
    end = 0
    for group in [rows] if fused else [[nbytes] for nbytes in rows]:
        strides, extent = {}, sum(group)
        for axis in order:
            strides[axis] = extent + step * draw(st.integers(0, 2))
            extent = strides[axis] * sizes[axis]
        for nbytes in group:
            steps = (strides[axis] for axis in ("block", "token", "head"))
            parts.append(Part(f"part{len(parts)}", end, *steps, nbytes))
            end += nbytes
        end += extent
    return KVLayout(tuple(parts), shape.blocks, shape.tokens, shape.heads)


Job = tuple[KVLayout, KVLayout, HeadSlice, list[int], list[int], int]


@st.composite
def jobs(
    draw: st.DrawFn,
) -> Job:
    step = draw(st.sampled_from((1, 2, 16)))
    rows = [n * step for n in draw(st.lists(st.integers(1, 5), min_size=1, max_size=2))]
    small = st.integers(1, 4)
    tokens, source_heads, target_heads = draw(small), draw(small), draw(small)
    factors = st.integers(1, 3)
    source, target = (
        draw(strided(Shape(draw(factors), tokens * draw(factors), n, 1), rows, step))
        for n in (source_heads, target_heads)
    )
    count = draw(st.integers(1, min(source_heads, target_heads)))
    heads = HeadSlice(
        draw(st.integers(0, source_heads - count)),
        draw(st.integers(0, target_heads - count)),
        count,
    )
    plan = plan_conversion(source, target, heads)
    chunks = [
        source.num_blocks * plan.source_chunks - 1,
        target.num_blocks * plan.target_chunks - 1,
    ]
    to = draw(st.lists(st.integers(0, chunks[1]), unique=True, max_size=4))
    some = st.lists(st.integers(0, chunks[0]), min_size=len(to), max_size=len(to))
    return source, target, heads, draw(some), to, draw(st.sampled_from((0, 0, 1, 8)))


def check_job(job: Job) -> None:
    source, target, heads, source_chunks, target_chunks, shift = job
    check_convert(
        source, target, source_chunks, target_chunks, heads=heads, shift=shift
    )


@settings(max_examples=60, deadline=None)
@given(job=jobs())
def test_any_layouts(job: Job) -> None:
    check_job(job)


@pytest.mark.full
@settings(max_examples=1500, deadline=None)
@given(job=jobs())
def test_any_layouts_at_length(job: Job) -> None:
    check_job(job)
