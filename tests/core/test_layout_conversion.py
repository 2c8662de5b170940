"""After any chain of conversions an element is where numpy says it should be."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvplugin.errors import LayoutMismatchError
from kvplugin.layout import Conversion, HeadSlice, head_slices, plan_conversion
from tests.core.kv_caches import (
    ALL_BACKENDS,
    BACKENDS,
    FUSED_BACKENDS,
    LATENT_BACKENDS,
    PACKED_BACKENDS,
    Cache,
    Sizes,
    after_copy,
    content,
)

DTYPES = ("uint8", "uint16", "uint32")


def execute(
    conversion: Conversion,
    source: Cache,
    target: Cache,
    chunks: tuple[Sequence[int], Sequence[int]],
) -> None:
    """Copy a plan's runs byte by byte; none may be written twice."""
    starts = [cache.address - cache.buffer.ctypes.data for cache in (source, target)]
    written = np.zeros(len(target.buffer), np.uint8)
    nbytes = 0
    for pair in zip(*chunks, strict=True):
        for from_, to, size in conversion.runs(*pair):
            from_, to = from_ + starts[0], to + starts[1]
            target.buffer[to : to + size] = source.buffer[from_ : from_ + size]
            written[to : to + size] += 1
            nbytes += size
    assert written.max(initial=0) <= 1
    assert nbytes == conversion.chunk_bytes * len(chunks[0])


def check_hop(
    source: Cache,
    target: Cache,
    ids: tuple[Sequence[int], Sequence[int]],
    num_tokens: int | None,
    heads: HeadSlice | None = None,
) -> Conversion:
    """Convert rows of blocks; the whole target memory is as numpy's indexing has it."""
    conversion = plan_conversion(source.layout, target.layout, heads)
    chunks = conversion.pair_chunks(*ids, num_tokens)
    moved = len(chunks[0]) * conversion.chunk_tokens
    if num_tokens is not None:
        assert num_tokens <= moved < num_tokens + conversion.chunk_tokens
    expected = after_copy(source, target, ids, moved, heads)
    execute(conversion, source, target, chunks)
    np.testing.assert_array_equal(target.buffer, expected)
    return conversion


@st.composite
def caches(
    draw: st.DrawFn, backends: Sequence[str], sizes: Sizes, num_tokens: int
) -> tuple[Cache, list[int]]:
    """A cache, and a row of blocks in it that hold `num_tokens`."""
    tokens = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]) | st.just(sizes.heads))
    needed = -(-num_tokens // tokens)
    blocks = needed + draw(st.integers(0, 2))
    ids = draw(st.permutations(range(blocks)))[:needed]
    backend = draw(st.sampled_from(backends))
    return Cache(backend, sizes, blocks, tokens, draw(st.integers(0, 3))), list(ids)


@st.composite
def chains(
    draw: st.DrawFn,
) -> tuple[Sizes, int, list[tuple[Cache, list[int]]], bool]:
    kind = draw(st.sampled_from(["equal", "fused", "latent", "packed"]))
    key = draw(st.integers(1, 5))
    value = draw(st.integers(1, 5)) if kind == "fused" else key
    heads = 1 if kind == "latent" else draw(st.integers(1, 4))
    sizes = Sizes(heads, key, value, draw(st.sampled_from(DTYPES)))
    backends = {
        "equal": [*BACKENDS, *FUSED_BACKENDS],
        "fused": list(FUSED_BACKENDS),
        "latent": list(LATENT_BACKENDS),
        "packed": list(PACKED_BACKENDS),
    }[kind]
    num_tokens = draw(st.integers(1, 24))
    one = caches(backends, sizes, num_tokens)
    return (
        sizes,
        num_tokens,
        draw(st.lists(one, min_size=2, max_size=4)),
        kind == "latent",
    )


@settings(max_examples=250, deadline=None)
@given(chain=chains())
def test_any_chain(
    chain: tuple[Sizes, int, list[tuple[Cache, list[int]]], bool],
) -> None:
    sizes, num_tokens, links, latent = chain
    expected = content(sizes, num_tokens, latent=latent)
    links[0][0].write(links[0][1], expected)
    for (source, source_ids), (target, target_ids) in itertools.pairwise(links):
        conversion = check_hop(source, target, (source_ids, target_ids), num_tokens)
        whole = conversion.copies_whole_runs
        event(f"whole runs: {whole}, boxes: {len(conversion.boxes)}")
        for found, rows in zip(
            target.read(target_ids, num_tokens), expected, strict=True
        ):
            np.testing.assert_array_equal(found, rows)


EQUAL = [*BACKENDS, *FUSED_BACKENDS]


@pytest.mark.parametrize("target", EQUAL)
@pytest.mark.parametrize("source", EQUAL)
@pytest.mark.parametrize("blocks", [(4, 4), (2, 8), (8, 2), (6, 4)])
def test_every_pair_with_as_many_heads_as_tokens(
    source: str, target: str, blocks: tuple[int, int]
) -> None:
    """Swapped axes of equal extent move every byte and overrun nothing."""
    sizes, total = Sizes(4, 2, 2), 24
    rows = [list(range(total // tokens))[::-1] for tokens in blocks]
    made = [
        Cache(backend, sizes, len(row), tokens)
        for backend, row, tokens in zip((source, target), rows, blocks, strict=True)
    ]
    expected = content(sizes, total)
    made[0].write(rows[0], expected)
    conversion = check_hop(*made, (rows[0], rows[1]), None)
    assert conversion.chunk_tokens == math.gcd(*blocks)
    for found, part in zip(made[1].read(rows[1], total), expected, strict=True):
        np.testing.assert_array_equal(found, part)


def test_chunks_of_the_documented_ratios() -> None:
    sizes = Sizes(1, 2, 2)
    made = {n: Cache("FlashInfer HND", sizes, 12, n).layout for n in (32, 48, 64, 128)}
    up = plan_conversion(made[64], made[128])
    assert (up.chunk_tokens, up.source_chunks, up.target_chunks) == (64, 1, 2)
    assert up.pair_chunks([7, 2, 5, 4], [3, 0]) == ([7, 2, 5, 4], [6, 7, 0, 1])
    across = plan_conversion(made[48], made[32])
    assert (across.chunk_tokens, across.source_chunks) == (16, 3)
    assert across.pair_chunks([1], [5, 0], 33) == ([3, 4, 5], [10, 11, 0])


@pytest.mark.parametrize(
    ("rows", "num_tokens", "holds"),
    [
        (([0, 1], [0]), None, "the same"),
        (([0], [0]), None, "the same"),
        (([0, 1], [0]), 9, "9"),
        (([0], [0]), 5, "5"),
    ],
)
def test_rows_that_are_too_short(
    rows: tuple[list[int], list[int]], num_tokens: int | None, holds: str
) -> None:
    source, target = (
        Cache("CPU", Sizes(2, 2, 2), 4, tokens).layout for tokens in (4, 6)
    )
    with pytest.raises(LayoutMismatchError, match=f"do not both hold {holds} tokens"):
        plan_conversion(source, target).pair_chunks(*rows, num_tokens)


@st.composite
def pools(draw: st.DrawFn, num_tokens: int) -> tuple[Cache, int, list[int]]:
    """A cache whose pool counts in `split` of its blocks, and a row of the pool's."""
    tokens, split = draw(st.sampled_from([1, 2, 3, 4, 6])), draw(st.integers(1, 4))
    needed = -(-num_tokens // (tokens * split))
    blocks = needed + draw(st.integers(0, 2))
    ids = draw(st.permutations(range(blocks)))[:needed]
    backend = draw(st.sampled_from([*BACKENDS, *FUSED_BACKENDS]))
    seed = draw(st.integers(0, 3))
    cache = Cache(backend, Sizes(2, 2, 2), blocks * split, tokens, seed)
    cache.layout = replace(cache.layout, split=split)
    return cache, split, list(ids)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), num_tokens=st.integers(1, 20))
def test_ids_are_those_of_the_pool_however_kernels_split_its_blocks(
    data: st.DataObject, num_tokens: int
) -> None:
    source, source_split, source_ids = data.draw(pools(num_tokens))
    target, target_split, target_ids = data.draw(pools(num_tokens))
    event(f"splits {source_split}, {target_split}")
    before = [part.copy() for part in target.parts]
    conversion = plan_conversion(source.layout, target.layout)
    chunks = conversion.pair_chunks(source_ids, target_ids, num_tokens)
    moved = len(chunks[0]) * conversion.chunk_tokens
    execute(conversion, source, target, chunks)
    written = {}
    for token in range(moved):
        there, place = divmod(token, target.tokens * target_split)
        here, from_ = divmod(token, source.tokens * source_split)
        key = target_ids[there] * target_split + place // target.tokens
        written[key, place % target.tokens] = (
            source_ids[here] * source_split + from_ // source.tokens,
            from_ % source.tokens,
        )
    for part in range(2):
        for index, row in np.ndenumerate(target.parts[part][..., 0]):
            block, token, head = index
            found = target.parts[part][block, token, head]
            if (block, token) in written:
                wanted = source.parts[part][(*written[block, token], head)]
            else:
                wanted = before[part][index]
            np.testing.assert_array_equal(found, wanted, err_msg=f"{index} {row}")


def test_a_row_of_split_blocks_holds_more() -> None:
    small = Cache("CPU", Sizes(2, 2, 2), 4, 4).layout
    split = replace(Cache("CPU", Sizes(2, 2, 2), 12, 4).layout, split=3)
    conversion = plan_conversion(small, split)
    assert conversion.pair_chunks([2, 0, 1], [3]) == ([2, 0, 1], [9, 10, 11])
    with pytest.raises(LayoutMismatchError, match="3 source blocks of 4 tokens and 2"):
        conversion.pair_chunks([2, 0, 1], [3, 0])
    back = plan_conversion(split, small)
    assert back.pair_chunks([1], [3, 2], 8) == ([3, 4], [3, 2])


@pytest.mark.parametrize("split", [0, 5])
def test_a_split_that_cannot_be(split: int) -> None:
    layout = Cache("CPU", Sizes(2, 2, 2), 12, 4).layout
    with pytest.raises(LayoutMismatchError, match=r"split|empty axis"):
        replace(layout, split=split)


def test_no_tokens_make_no_chunks() -> None:
    layout = Cache("CPU", Sizes(2, 2, 2), 4, 4).layout
    assert plan_conversion(layout, layout).pair_chunks([0], [1], 0) == ([], [])
    assert plan_conversion(layout, layout).pair_chunks([], []) == ([], [])


BETWEEN_ROWS = {
    "FlashAttention HND, all layers",
    "FlashInfer HND, all layers",
    "fused BHLNC",
    "fused LHBNC",
}
"""Layouts whose blocks are not a run of bytes a part: other layers, or other blocks,
lie between one head and the next."""


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_one_layout_on_both_sides_copies_whole_runs(backend: str) -> None:
    sizes = Sizes(1 if backend in LATENT_BACKENDS else 2, 2, 2)
    layout = Cache(backend, sizes, 3, 4).layout
    conversion = plan_conversion(layout, layout)
    assert conversion.copies_whole_runs is (backend not in BETWEEN_ROWS)


# -- tensor-parallel ranks ---------------------------------------------------------


def heads_of(num_heads: int, ranks: int, rank: int) -> list[int]:
    """vLLM's rule: heads are split in order, or each is copied to its neighbours."""
    if num_heads >= ranks:
        return list(range(num_heads))[rank * num_heads // ranks :][: num_heads // ranks]
    return [rank // (ranks // num_heads)]


RATIOS = [
    (heads, source, target)
    for heads in (1, 2, 3, 4, 6, 8)
    for source in (1, 2, 3, 4, 6, 8, 16)
    for target in (1, 2, 3, 4, 6, 8, 16)
    if all(heads % ranks == 0 or ranks % heads == 0 for ranks in (source, target))
]


@pytest.mark.parametrize(("num_heads", "source_ranks", "target_ranks"), RATIOS)
def test_every_rank_gets_its_heads(
    num_heads: int, source_ranks: int, target_ranks: int
) -> None:
    total, ids = 12, ([2, 0, 1], [1, 0])
    everything = content(Sizes(num_heads, 3, 3), total)
    sources, readers = [], np.zeros((num_heads, source_ranks), int)
    for rank in range(source_ranks):
        heads = heads_of(num_heads, source_ranks, rank)
        cache = Cache("FlashInfer HND", Sizes(len(heads), 3, 3), 3, 4, seed=rank)
        cache.write(ids[0], [part[:, heads] for part in everything])
        sources.append(cache)
    for rank in range(target_ranks):
        heads = heads_of(num_heads, target_ranks, rank)
        target = Cache("FlashAttention NHD", Sizes(len(heads), 3, 3), 2, 6, seed=99)
        for source_rank, part in head_slices(
            num_heads, source_ranks, target_ranks, rank
        ):
            check_hop(sources[source_rank], target, ids, total, part)
            _, first, width = part
            for head in heads[first : first + width]:
                readers[head, source_rank] += 1
        for found, rows in zip(target.read(ids[1], total), everything, strict=True):
            np.testing.assert_array_equal(found, rows[:, heads])
    # Of several copies of a head, none has two readers more than another.
    for head in range(num_heads):
        holders = [
            rank
            for rank in range(source_ranks)
            if head in heads_of(num_heads, source_ranks, rank)
        ]
        counts = readers[head, holders]
        assert counts.max() - counts.min() <= 1
        assert counts.sum() == readers[head].sum()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_slice_of_heads(data: st.DataObject) -> None:
    dims = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    count = data.draw(st.integers(1, 4))
    made, firsts = [], []
    for _ in range(2):
        firsts.append(data.draw(st.integers(0, 2)))
        heads = firsts[-1] + count + data.draw(st.integers(0, 2))
        sizes = Sizes(heads, *dims, "uint16")
        made.append(data.draw(caches(list(FUSED_BACKENDS), sizes, 12)))
    (source, source_ids), (target, target_ids) = made
    source.write(source_ids, content(Sizes(source.layout.heads, *dims, "uint16"), 12))
    check_hop(source, target, (source_ids, target_ids), 12, HeadSlice(*firsts, count))


def test_row_is_where_the_view_has_it() -> None:
    for backend in [*BACKENDS, *FUSED_BACKENDS, *PACKED_BACKENDS]:
        cache = Cache(backend, Sizes(3, 2, 2), 3, 4)
        for index in itertools.product(range(2), range(3), range(4), range(3)):
            view = cache.parts[index[0]][index[1:]]
            assert cache.layout.row(*index) == view.ctypes.data - cache.address
