"""Block tables are what a dict of lists would be, on the host and once committed."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvplugin.errors import CapacityError, ConfigError
from kvplugin.spec import (
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvplugin.worker.block_table import MAX_BLOCK_ID, BlockTables
from kvplugin.worker.context_parallel import ContextParallel
from kvplugin.worker.kernel_blocks import MultipleOf, select_kernel_block_size
from kvplugin.worker.table_shape import TableShape, table_shape
from tests.worker.naive import full, kernel_blocks, limits, state, table_of

HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": "bfloat16"}
ROWS = 4
WIDTHS_AND_RATIOS = ((5, 1), (3, 4))


def shapes() -> list[TableShape]:
    return [
        TableShape(block_size=8, width=width, kernel_block_size=8 // ratio)
        for width, ratio in WIDTHS_AND_RATIOS
    ]


block_lists = st.tuples(
    *(st.lists(st.integers(1, 99), max_size=4) for _ in WIDTHS_AND_RATIOS)
)
rows = st.integers(0, ROWS - 1)


class Tables(RuleBasedStateMachine):
    """Any changes of rows, beside lists."""

    @initialize()
    def start(self) -> None:
        self.tables = BlockTables(shapes(), max_num_reqs=ROWS, max_model_len=24)
        self.rows: list[list[list[int]]] = [[[], []] for _ in range(ROWS)]

    @rule(row=rows, ids=block_lists)
    def append(self, row: int, ids: tuple[list[int], ...]) -> None:
        grown = [have + new for have, new in zip(self.rows[row], ids, strict=True)]
        self.change(row, grown, lambda: self.tables.append(row, ids))

    @rule(row=rows, ids=block_lists)
    def overwrite(self, row: int, ids: tuple[list[int], ...]) -> None:
        self.change(row, list(ids), lambda: self.tables.overwrite(row, ids))

    def change(self, row: int, wanted: list[list[int]], do: Any) -> None:
        widths = [width for width, _ in WIDTHS_AND_RATIOS]
        if all(len(ids) <= w for ids, w in zip(wanted, widths, strict=True)):
            do()
            self.rows[row] = wanted
        else:
            with pytest.raises(CapacityError, match="max_model_len"):
                do()

    @rule(row=rows)
    def clear(self, row: int) -> None:
        self.tables.clear(row)
        self.rows[row] = [[], []]

    @rule(old=rows, new=rows)
    def move(self, old: int, new: int) -> None:
        self.tables.move(old, new)
        if old != new:
            self.rows[new], self.rows[old] = self.rows[old], [[], []]

    @rule(one=rows, other=rows)
    def swap(self, one: int, other: int) -> None:
        self.tables.swap(one, other)
        both = self.rows[one], self.rows[other]
        self.rows[other], self.rows[one] = both

    @rule(count=st.integers(0, ROWS), padding=st.integers(0, ROWS))
    def commit(self, count: int, padding: int) -> None:
        padded = min(count + padding, ROWS)
        views = self.tables.commit(count, padded)
        for group, view in enumerate(views):
            assert view.tolist() == self.expected(group, count, padded)

    def expected(self, group: int, count: int, padded: int) -> list[list[int]]:
        width, ratio = WIDTHS_AND_RATIOS[group]
        entries = [kernel_blocks(row[group], ratio) for row in self.rows[:count]]
        entries += [[]] * (padded - count)
        return [row + [0] * (width * ratio - len(row)) for row in entries]

    @invariant()
    def host_is_right(self) -> None:
        for group, table in enumerate(self.tables.tables):
            whole = self.expected(group, ROWS, ROWS)
            assert table.blocks.array.tolist() == whole
            for row, entries in enumerate(self.rows):
                _, ratio = WIDTHS_AND_RATIOS[group]
                assert table.row(row) == kernel_blocks(entries[group], ratio)


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_committed_rows_do_not_change_with_the_host() -> None:
    tables = table_of(4)
    tables.append(0, [[5]])
    (view,) = tables.commit(1)
    tables.append(0, [[6]])
    assert view[0].tolist() == [5, 0, 0, 0, 0, 0, 0, 0]
    assert tables.commit(1)[0][0].tolist() == [5, 6, 0, 0, 0, 0, 0, 0]
    assert tables.commit(1)[0].data_ptr() == view.data_ptr()
    assert view.dtype == torch.int32


def test_nothing_is_written_if_one_group_has_no_room() -> None:
    tables = BlockTables(shapes(), max_num_reqs=2, max_model_len=24)
    with pytest.raises(CapacityError, match=r"row 1 would have 4 .* 3 wide"):
        tables.append(1, [[1, 2], [1, 2, 3, 4]])
    assert [table.row(1) for table in tables.tables] == [[], []]


@pytest.mark.parametrize("block", [-1, MAX_BLOCK_ID // 4 + 1])
def test_ids_that_do_not_fit_are_refused(block: int) -> None:
    with pytest.raises(CapacityError, match=f"{block}.*parts of 4"):
        table_of(4, ratio=4).append(0, [[1, block]])


def test_the_largest_id_fits() -> None:
    tables = table_of(4)
    tables.append(0, [[MAX_BLOCK_ID]])
    assert tables.tables[0].row(0) == [MAX_BLOCK_ID]


def test_ids_are_given_for_every_group() -> None:
    with pytest.raises(ValueError, match="1 lists of ids for 2 groups"):
        table_of(4, groups=2).append(0, [[1]])


@pytest.mark.parametrize(
    ("spec", "width"),
    [
        (full(16), 63),  # 1000 tokens in blocks of 16
        (SlidingWindowSpec(block_size=16, sliding_window=32, **HEADS), 63),
        (UniformTypeKVCacheSpecs(16, {"a": full(16)}), 63),
        (state(1000), 1),
        (state(1000, drafts=3), 4),
        (state(64, drafts=2), 18),
        (CrossAttentionSpec(block_size=16, **HEADS), 94),  # 1500 encoder tokens
        (EncoderOnlyAttentionSpec(block_size=16, **HEADS), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_width_of_a_row(spec: KVCacheSpec, width: int) -> None:
    shape = table_shape(spec, limits(1000, max_num_encoder_input_tokens=1500))
    assert (shape.width, shape.columns, shape.ratio) == (width, width, 1)


def test_context_parallelism_narrows_full_attention_only() -> None:
    wide = limits(1000, decode_context_parallel_size=2, prefill_context_parallel_size=2)
    window = SlidingWindowSpec(block_size=16, sliding_window=32, **HEADS)
    assert table_shape(full(16), wide).width == 16
    assert table_shape(full(16), wide).is_sharded
    assert table_shape(window, wide).width == 63
    assert not table_shape(window, wide).is_sharded


def test_a_kernel_block_is_a_part_of_a_block() -> None:
    shape = table_shape(full(64), limits(1000), 16)
    assert (shape.width, shape.ratio, shape.columns) == (16, 4, 64)
    with pytest.raises(ConfigError, match="48 does not divide block_size 64"):
        table_shape(full(64), limits(1000), 48)


def test_pieces_of_context_parallelism_divide_a_block() -> None:
    with pytest.raises(ConfigError, match="cp_kv_cache_interleave_size 3 must divide"):
        table_of(16, place=ContextParallel(ranks=2, interleave=3))


@pytest.mark.parametrize(
    "values", [{"ranks": 0}, {"rank": -1}, {"rank": 2, "ranks": 2}, {"interleave": 0}]
)
def test_a_place_that_cannot_be(values: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"ContextParallel\."):
        ContextParallel(**values)


SIXTEENS = (MultipleOf(16),)


@pytest.mark.parametrize(
    ("block_size", "supported", "chosen"),
    [
        (48, {"A": SIXTEENS}, 48),
        (48, {"A": SIXTEENS, "B": (16, 32, 64)}, 16),
        (256, {"A": SIXTEENS, "B": (16, 32, 64)}, 64),
        (64, {"A": (16, 32, 64), "B": (32, MultipleOf(48))}, 32),
        (128, {"A": (MultipleOf(64), 32), "B": (32,)}, 32),
        (17, {}, 17),
    ],
)
def test_kernel_block_size(
    block_size: int, supported: dict[str, Any], chosen: int
) -> None:
    assert select_kernel_block_size(block_size, supported) == chosen


def test_a_refusal_names_the_backends_and_what_they_read() -> None:
    with pytest.raises(ConfigError) as caught:
        select_kernel_block_size(16, {"CPU": (MultipleOf(32),), "FLASH": (16, 64)})
    for words in ("16", "CPU reads a multiple of 32", "FLASH reads 16 or 64"):
        assert words in str(caught.value)


sizes = st.lists(
    st.integers(1, 64) | st.integers(1, 64).map(MultipleOf), min_size=1, max_size=3
)


@given(
    st.integers(1, 256),
    st.dictionaries(st.sampled_from("ABC"), sizes, min_size=1),
)
def test_the_chosen_size_is_the_largest_that_all_read(
    block_size: int, supported: dict[str, list[int | MultipleOf]]
) -> None:
    common = [
        size
        for size in range(1, block_size + 1)
        if block_size % size == 0
        and all(
            any(
                size % s.base == 0 if isinstance(s, MultipleOf) else size == s
                for s in given
            )
            for given in supported.values()
        )
    ]
    if common:
        assert select_kernel_block_size(block_size, supported) == max(common)
    else:
        with pytest.raises(ConfigError, match="no kernel block size"):
            select_kernel_block_size(block_size, supported)
