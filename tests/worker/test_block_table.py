"""Block tables are what a dict of lists would be, on the host and once committed."""

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvplugin.errors import CapacityError
from kvplugin.worker.block_table import BlockTables
from kvplugin.worker.group_table import MAX_BLOCK_ID
from kvplugin.worker.table_shape import TableShape
from tests.worker.naive import kernel_blocks, table_of

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


@pytest.mark.parametrize("block", [1 << 31, 1 << 62, (1 << 63) - 1])
@pytest.mark.parametrize("ratio", [1, 4])
def test_ids_beyond_int32_are_refused_without_overflow(block: int, ratio: int) -> None:
    with pytest.raises(CapacityError, match=f"{block}.*use larger blocks"):
        table_of(4, ratio=ratio).append(0, [[block]])


@pytest.mark.parametrize(
    "ids", [[1.0], [1.7], [True], "12", [[1]], [None], 3, [1 << 63], [1 << 64]]
)
def test_ids_that_are_no_list_of_integers_are_refused(ids: Any) -> None:
    tables = table_of(4, groups=2)
    for change in (tables.append, tables.overwrite):
        with pytest.raises(ValueError, match="block ids of row 0"):
            change(0, [[5], ids])
    assert [table.row(0) for table in tables.tables] == [[], []]


@pytest.mark.parametrize("row", [-1, 4])
def test_rows_that_do_not_exist_are_refused(row: int) -> None:
    tables = table_of(4, max_num_reqs=4)
    for change in (tables.append, tables.overwrite):
        with pytest.raises(ValueError, match=f"no row {row}: rows are 0 to 3"):
            change(row, [[1]])
    with pytest.raises(ValueError, match=f"no row {row}"):
        tables.clear(row)
    for change in (tables.move, tables.swap):
        for pair in ((0, row), (row, 0)):
            with pytest.raises(ValueError, match=f"no row {row}"):
                change(*pair)


def test_the_largest_id_fits() -> None:
    tables = table_of(4)
    tables.append(0, [[MAX_BLOCK_ID]])
    assert tables.tables[0].row(0) == [MAX_BLOCK_ID]


def test_ids_are_given_for_every_group() -> None:
    with pytest.raises(ValueError, match="1 lists of ids for 2 groups"):
        table_of(4, groups=2).append(0, [[1]])
