"""Rows in columns, and rows of several tokens: every byte goes where its row has it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import assume, event, given, reject, settings
from hypothesis import strategies as st

from kvplugin.errors import LayoutMismatchError
from kvplugin.layout import (
    HeadSlice,
    KVLayout,
    Part,
    Run,
    Staging,
    plan_conversion,
    plan_staging,
)
from tests.core.kv_caches import Cache, Sizes


@dataclass(frozen=True)
class Content:
    """What both sides have of a row."""

    names: tuple[str, ...]
    row_bytes: tuple[int, ...]
    tokens_per_row: int


@st.composite
def layouts(draw: st.DrawFn, content: Content, heads: int) -> KVLayout:
    """Axes in any order, with gaps, a part after the other."""
    blocks, split = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    rows = draw(st.sampled_from([1, 2, 3, 4]))
    parts, start = [], draw(st.sampled_from([0, 5, 64]))
    for name, row_bytes in zip(content.names, content.row_bytes, strict=True):
        columns = draw(st.sampled_from([n for n in (1, 2, 4) if row_bytes % n == 0]))
        extents = {
            "block": blocks * split,
            "token": rows,
            "head": heads,
            "column": columns,
        }
        step, strides = row_bytes // columns, {}
        for axis in draw(st.permutations(sorted(extents))):
            strides[axis] = step + draw(st.sampled_from([0, 0, 0, 3]))
            step = strides[axis] * extents[axis]
        parts.append(
            Part(
                name,
                start,
                strides["block"],
                strides["token"],
                strides["head"],
                row_bytes,
                columns,
                strides["column"],
            )
        )
        start += step + draw(st.sampled_from([0, 7]))
    return KVLayout(
        tuple(parts),
        blocks * split,
        rows * content.tokens_per_row,
        heads,
        split=split,
        tokens_per_row=content.tokens_per_row,
        packing="tiles" if content.tokens_per_row > 1 else "",
    )


def bytes_of(
    layout: KVLayout, part: int, block: int, token: int, head: int
) -> Iterator[int]:
    """Where each byte of the row with this token lies, in order."""
    width = layout.parts[part].row_bytes // layout.parts[part].columns
    for column in range(layout.parts[part].columns):
        first = layout.row(part, block, token, head, column)
        yield from range(first, first + width)


def size(layout: KVLayout) -> int:
    last = (layout.num_blocks - 1, layout.tokens - 1, layout.heads - 1)
    return 1 + max(max(bytes_of(layout, i, *last)) for i in range(len(layout.parts)))


@st.composite
def contents(draw: st.DrawFn) -> Content:
    count = draw(st.integers(1, 2))
    sizes = draw(st.tuples(*[st.sampled_from([1, 2, 4, 8, 12])] * count))
    return Content(("k", "v")[:count], sizes, draw(st.sampled_from([1, 1, 2, 4])))


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_every_byte_of_every_row(data: st.DataObject) -> None:
    content = data.draw(contents())
    num_heads = data.draw(st.integers(1, 2))
    firsts = data.draw(st.tuples(st.integers(0, 1), st.integers(0, 1)))
    source, target = (
        data.draw(layouts(content, num_heads + first + data.draw(st.integers(0, 1))))
        for first in firsts
    )
    heads = HeadSlice(*firsts, num_heads)
    refusal = ""
    try:
        plan = plan_conversion(source, target, heads)
    except LayoutMismatchError as error:
        refusal = str(error)
    if refusal:
        event("refused")
        assert "nested strides" in refusal
        assert max(p.columns for side in (source, target) for p in side.parts) > 1
        return
    event(f"{max(len(box.axes) for box in plan.boxes)} axes")
    room = min(side.num_blocks * side.tokens for side in (source, target))
    ids = [
        data.draw(st.permutations(range(side.num_blocks // side.split)))
        for side in (source, target)
    ]
    chunks = plan.pair_chunks(*ids, num_tokens=room)
    moved = len(chunks[0]) * plan.chunk_tokens
    memory = np.random.default_rng(0).integers(0, 256, size(source), np.uint8)
    found = np.zeros(size(target), np.uint8)
    written = np.zeros(size(target), np.uint8)
    for pair in zip(*chunks, strict=True):
        for from_, to, nbytes in plan.runs(*pair):
            found[to : to + nbytes] = memory[from_ : from_ + nbytes]
            written[to : to + nbytes] += 1
    expected = np.zeros_like(found)
    touched = np.zeros_like(written)
    for token in range(0, moved, content.tokens_per_row):
        at = [
            _place(side, row, token)
            for side, row in zip((source, target), ids, strict=True)
        ]
        for part in range(len(content.names)):
            for head in range(num_heads):
                for from_, to in zip(
                    bytes_of(source, part, *at[0], heads.source_first + head),
                    bytes_of(target, part, *at[1], heads.target_first + head),
                    strict=True,
                ):
                    expected[to] = memory[from_]
                    touched[to] += 1
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(written, touched)
    assert len(chunks[0]) * plan.chunk_bytes == written.sum()


def _place(layout: KVLayout, ids: Sequence[int], token: int) -> tuple[int, int]:
    """Kernel block, and token in it, of a token of a row of the pool's blocks."""
    entry, inside = divmod(token, layout.tokens * layout.split)
    kernel, place = divmod(inside, layout.tokens)
    return ids[entry] * layout.split + kernel, place


@pytest.mark.parametrize(
    ("tokens", "chunk"), [((64, 128), 64), ((128, 64), 64), ((96, 64), 32)]
)
def test_transposed_keys_move_in_runs_of_tokens(
    tokens: tuple[int, int], chunk: int
) -> None:
    sides = [
        Cache("CPU attention", Sizes(2, 8, 8, "uint16"), 4, n).layout for n in tokens
    ]
    plan = plan_conversion(*sides)
    keys, values = plan.boxes
    assert (keys.nbytes, len(keys.axes)) == (chunk * 2, 2)
    assert (values.nbytes, len(values.axes)) == (chunk * 8 * 2, 1)


def test_more_than_two_loops_are_refused() -> None:
    """Engines loop twice around contiguous bytes."""
    transposed, plain = (
        Cache(backend, Sizes(2, 8, 8, "uint16"), 4, 16).layout
        for backend in ("CPU attention", "FlashInfer HND")
    )
    for sides in ((transposed, plain), (plain, transposed)):
        with pytest.raises(LayoutMismatchError, match=r"3 nested strides .* 2 bytes"):
            plan_conversion(*sides)
    one = Cache("CPU attention", Sizes(1, 8, 8, "uint16"), 4, 16).layout
    other = Cache("FlashInfer HND", Sizes(1, 8, 8, "uint16"), 4, 16).layout
    assert plan_conversion(one, other).boxes[0].nbytes == 2


def test_granules_are_not_split() -> None:
    """Tiles of 16 tokens: 32 and 48 tokens have one in common."""
    tile = 16 * 8 * 2

    def tiles(tokens: int, packing: str = "amx", per_row: int = 16) -> KVLayout:
        rows = tokens // per_row
        part = Part("k", 0, rows * tile, tile, rows * tile, tile)
        return KVLayout((part,), 4, tokens, 1, tokens_per_row=per_row, packing=packing)

    plan = plan_conversion(tiles(32), tiles(48))
    assert plan.chunk_tokens == 16
    assert plan.pair_chunks([1], [2], 20) == ([2, 3], [6, 7])
    for other in (tiles(32, "vec"), tiles(32, per_row=32)):
        with pytest.raises(LayoutMismatchError, match="packed as 'amx' do not become"):
            plan_conversion(tiles(32), other)


def test_columns_that_do_not_divide_each_other() -> None:
    two = KVLayout((Part("k", 0, 64, 6, 6, 6, 2, 32),), 1, 1, 1)
    three = KVLayout((Part("k", 0, 64, 6, 6, 6, 3, 16),), 1, 1, 1)
    with pytest.raises(LayoutMismatchError, match="2 columns of a row do not become 3"):
        plan_conversion(two, three)


@pytest.mark.parametrize(
    ("part", "options", "message"),
    [
        (Part("k", 0, 64, 2, 32, 8, 3, 16), {}, "8 bytes, which are not 3 equal"),
        (Part("k", 0, 64, 2, 32, 8, 0, 16), {}, "not 0 equal"),
        (Part("k", 0, 64, 2, 32, 8, -2, 16), {}, "not -2 equal"),
        (Part("k", 0, 64, 2, 32, 0, 1, 16), {}, "0 bytes"),
        (Part("k", 0, 64, 2, 32, 8, 4, 1), {}, "rows of part 'k' overlap"),
        (Part("k", 0, 64, 2, 32, 8, 4, 6), {}, "rows of part 'k' overlap"),
        (Part("k", 0, 64, 2, 32, 8, 4, 8), {"tokens_per_row": 3}, "tokens_per_row 3"),
        (Part("k", 0, 64, 2, 32, 8, 4, 8), {"tokens_per_row": 0}, "empty axis"),
    ],
)
def test_layouts_that_describe_no_rows(
    part: Part, options: dict[str, int], message: str
) -> None:
    with pytest.raises(LayoutMismatchError, match=message):
        KVLayout((part,), 2, 4, 2, **options)


def test_no_more_parts_than_there_can_be() -> None:
    """Descriptions come from strangers, and parts are compared in pairs."""
    parts = tuple(Part(f"{i}", 8 * i, 200, 200, 200, 8) for i in range(17))
    assert len(KVLayout(parts[:16], 1, 1, 1).parts) == 16
    with pytest.raises(LayoutMismatchError, match="17 parts: there are 16 at most"):
        KVLayout(parts, 1, 1, 1)


# -- through staging -------------------------------------------------------------------


def runs_of(layout: KVLayout) -> list[Run]:
    """The bytes of block 0 of the pool, in as few runs as they are."""
    stride = layout.parts[0].block_stride * layout.split
    taken = sorted(
        byte
        for part in range(len(layout.parts))
        for block in range(layout.split)
        for token in range(0, layout.tokens, layout.tokens_per_row)
        for head in range(layout.heads)
        for byte in bytes_of(layout, part, block, token, head)
    )
    starts = [b for i, b in enumerate(taken) if not i or b != taken[i - 1] + 1]
    ends = [b for i, b in enumerate(taken, 1) if i == len(taken) or b + 1 != taken[i]]
    return [
        Run(start, stride, end + 1 - start)
        for start, end in zip(starts, ends, strict=True)
    ]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_slots_hold_what_was_read_into_them(data: st.DataObject) -> None:
    content = data.draw(contents())
    count, first = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 1))
    source = data.draw(layouts(content, count + first + data.draw(st.integers(0, 1))))
    assume(len({part.block_stride for part in source.parts}) == 1)
    try:
        plan = plan_conversion(source, source, HeadSlice(first, 0, count))
        staging = plan_staging(plan, runs_of(source))
        staging.onward(2)
    except LayoutMismatchError:  # too many nested strides
        reject()
    event(f"{min(len(staging.stretches), 5)} stretches")
    block = data.draw(st.integers(0, source.num_blocks - 1))
    check_slots(staging, data.draw(st.integers(1, 4)), block)


def check_slots(staging: Staging, slots: int, block: int) -> None:
    """Once a block has been read into the last slot, stretch by stretch, each row is
    where the onward conversion looks for it."""
    source, heads = staging.conversion.source, staging.conversion.heads
    offsets, staged = staging.offsets(slots), staging.onward(slots).source
    expected = {}
    for stretch, offset in zip(staging.stretches, offsets, strict=True):
        for i in range(stretch.nbytes):
            there = stretch.offset + block * stretch.stride + i
            expected[there] = offset + (slots - 1) * stretch.nbytes + i
    assert max(expected.values()) < staging.slot_bytes * slots + 64 * len(offsets)
    for part in range(len(source.parts)):
        for token in range(0, source.tokens, source.tokens_per_row):
            for head in range(heads.num_heads):
                for from_, to in zip(
                    bytes_of(source, part, block, token, heads.source_first + head),
                    bytes_of(staged, part, slots - 1, token, head),
                    strict=True,
                ):
                    assert expected[from_] == to


def test_parts_that_cross_their_runs_otherwise() -> None:
    """Keys of a head and values of a token share a run; other heads and tokens do so in
    the next one."""
    keys, values = Part("k", 0, 128, 8, 64, 8), Part("v", 16, 128, 64, 8, 8)
    layout = KVLayout((keys, values), 3, 2, 2)
    runs = [Run(0, 128, 32), Run(64, 128, 32)]
    assert runs_of(layout) == runs
    staging = plan_staging(plan_conversion(layout, layout), runs)
    assert len(staging.stretches) == 4
    check_slots(staging, 3, 1)


def test_a_slice_of_heads_is_one_stretch() -> None:
    sides = [Cache("CPU attention", Sizes(8, 4, 4, "uint16"), 3, 16).layout] * 2
    page = 16 * 8 * 2
    plan = plan_conversion(*sides, HeadSlice(2, 0, 3))
    staging = plan_staging(plan, [Run(0, 8 * page, 8 * page)])
    assert staging.stretches == ((2 * page, 8 * page, 3 * page),)
    onward = staging.onward(5)
    assert (onward.source.num_blocks, onward.source.heads) == (5, 3)
    assert onward.heads == HeadSlice(0, 0, 3)
    assert staging.slots(5 * 3 * page + 63) == 5
    assert staging.slots(5 * 3 * page + 62) == 4
    assert staging.slots(10) == 0


def test_heads_in_runs_of_their_own() -> None:
    """Other layers between a head and the next: a stretch a head, a slot apart."""
    cache = Cache("fused BHLNC", Sizes(4, 4, 4, "uint16"), 3, 8)
    head = 8 * 8 * 2
    runs = [Run(i * 2 * head, 8 * head, head) for i in range(4)]
    plan = plan_conversion(cache.layout, cache.layout, HeadSlice(1, 1, 2))
    staging = plan_staging(plan, runs)
    assert [stretch.offset for stretch in staging.stretches] == [2 * head, 4 * head]
    assert staging.offsets(6) == [0, 6 * head]
    assert staging.onward(6).source.parts[0].head_stride == 6 * head


@pytest.mark.parametrize(
    "runs",
    [
        [Run(0, 4096, 1024)],
        [Run(64, 2048, 2048)],
        [Run(0, 4096, 2048)],
        [],
    ],
)
def test_rows_outside_their_blocks(runs: list[Run]) -> None:
    """What a stranger says of its rows must fit what it says of its blocks."""
    layout = Cache("CPU attention", Sizes(8, 4, 4, "uint16"), 3, 16).layout
    good = [Run(0, 2048, 2048)]
    assert plan_staging(plan_conversion(layout, layout), good).slot_bytes == 2048
    with pytest.raises(LayoutMismatchError, match="outside its bytes"):
        plan_staging(plan_conversion(layout, layout), runs)


@pytest.mark.parametrize(("heads", "split"), [(2000, 1), (1, 2000), (40, 40)])
def test_too_many_stretches(heads: int, split: int) -> None:
    part = Part("k", 0, 16 * heads, 16, 16, 8)
    layout = KVLayout((part,), 2 * split, 1, heads, split=split)
    runs = [Run(16 * i, 16 * heads * split, 8) for i in range(heads * split)]
    with pytest.raises(LayoutMismatchError, match="more than 1024 runs"):
        plan_staging(plan_conversion(layout, layout), runs)


def test_staged_rows_are_those_of_the_source() -> None:
    layout = Cache("FlashInfer HND", Sizes(2, 4, 4), 3, 4).layout
    plan = plan_conversion(layout, replace(layout, name="other"))
    run = Run(0, layout.parts[0].block_stride, layout.parts[0].block_stride)
    onward = plan_staging(plan, [run]).onward(3)
    assert [replace(p, offset=0) for p in onward.source.parts] == [
        replace(p, offset=0) for p in layout.parts
    ]
