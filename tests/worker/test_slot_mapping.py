"""Every token's slot is where arithmetic by hand puts it; no two tokens share one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.kernels.dispatch import slot_mappings
from kvplugin.kernels.host_slots import NO_ROW, PAD_SLOT, SlotTable, SlotTables
from kvplugin.worker.block_table import BlockTables
from kvplugin.worker.context_parallel import ContextParallel
from kvplugin.worker.step_tokens import step_tokens
from kvplugin.worker.table_shape import table_shape
from tests.worker import naive
from tests.worker.naive import full, limits, state, table_of

BATCH = 3


def mapped(
    tables: SlotTables, rows: list[int], positions: list[int], width: int | None = None
) -> list[list[int]]:
    """Slots, a list a group."""
    shape = (len(tables.tables), len(rows) if width is None else width)
    out = torch.full(shape, 1 << 40, dtype=torch.int64)
    slot_mappings(
        tables,
        torch.tensor(rows, dtype=torch.int32),
        torch.tensor(positions, dtype=torch.int64),
        out,
    )
    return out.tolist()


@st.composite
def places(draw: st.DrawFn) -> tuple[int, int, ContextParallel]:
    """A block size, parts of a block, and a rank."""
    interleave = draw(st.sampled_from((1, 2, 3, 4)))
    ratio = draw(st.sampled_from((1, 2, 4)))
    # A piece divides a block of the manager, but not always one of the kernel.
    block_size = interleave * ratio * draw(st.integers(1, 3))
    ranks = draw(st.integers(1, 4))
    rank = draw(st.integers(0, ranks - 1))
    return (
        block_size,
        ratio,
        ContextParallel(ranks=ranks, rank=rank, interleave=interleave),
    )


@settings(max_examples=150, deadline=None)
@given(places(), st.integers(1, 60), st.randoms(use_true_random=False))
def test_every_token_is_where_arithmetic_puts_it(
    given_place: tuple[int, int, ContextParallel], max_model_len: int, random: object
) -> None:
    block_size, ratio, place = given_place
    tables = table_of(
        block_size, max_model_len, ratio=ratio, max_num_reqs=BATCH, place=place
    )
    ids = list(range(1, 1 + BATCH * tables.tables[0].shape.width))
    random.shuffle(ids)  # type: ignore[attr-defined]
    of_row = [ids[row::BATCH] for row in range(BATCH)]
    for row, blocks in enumerate(of_row):
        tables.append(row, [blocks])
    tables.commit(BATCH)
    tokens = [(row, at) for row in range(BATCH) for at in range(max_model_len)]
    (slots,) = mapped(
        tables.slot_tables(), [row for row, _ in tokens], [at for _, at in tokens]
    )
    assert slots == [
        naive.slot(of_row[row], at, block_size, place) for row, at in tokens
    ]
    kept = [slot for slot in slots if slot != PAD_SLOT]
    assert len(set(kept)) == len(kept)


@settings(deadline=None)
@given(places(), st.integers(0, 100))
def test_ranks_keep_every_token_once(
    given_place: tuple[int, int, ContextParallel], length: int
) -> None:
    _, _, place = given_place
    counted = [0] * place.ranks
    for position in range(length):
        counted[position // place.interleave % place.ranks] += 1
    lengths = torch.tensor([length], dtype=torch.int32)
    for rank, count in enumerate(counted):
        there = ContextParallel(
            ranks=place.ranks, rank=rank, interleave=place.interleave
        )
        local = there.local_lengths(lengths)
        assert (local.item(), local.dtype) == (count, torch.int32)


def test_tokens_without_a_slot() -> None:
    tables = table_of(4, max_model_len=10)
    tables.append(0, [[7, 8, 9]])
    tables.commit(1)
    rows = [0, 0, NO_ROW, 0, 0, 0]
    positions = [9, 10, 3, -1, 1 << 40, 0]
    (slots,) = mapped(tables.slot_tables(), rows, positions, width=9)
    assert slots == [37, -1, -1, -1, -1, 28, -1, -1, -1]


def test_groups_that_keep_no_tokens_or_are_not_shared_out() -> None:
    place = ContextParallel(ranks=2, rank=1, interleave=2)
    bounds = limits(16, decode_context_parallel_size=2)
    window = naive.table_of(4, 16).tables[0].shape
    shapes = [
        table_shape(full(4), bounds),
        table_shape(state(16), bounds),
        type(window)(block_size=8, width=2, kernel_block_size=4),
    ]
    tables = BlockTables(
        shapes, max_num_reqs=1, max_model_len=16, context_parallel=place
    )
    tables.append(0, [[3, 4], [5], [6, 7]])
    tables.commit(1)
    slots = mapped(tables.slot_tables(), [0] * 6, [0, 1, 2, 3, 4, 10])
    assert slots == [
        [-1, -1, 12, 13, -1, 16],
        [-1] * 6,
        [48, 49, 50, 51, 52, 58],
    ]
    assert mapped(tables.slot_tables([2]), [0], [10]) == [[58]]


def test_slots_beyond_31_bits() -> None:
    tables = table_of(16)
    tables.append(0, [[1 << 30]])
    tables.commit(1)
    assert mapped(tables.slot_tables(), [0], [5]) == [[(1 << 34) + 5]]


def test_no_groups_and_no_tokens() -> None:
    assert mapped(SlotTables([], max_model_len=4), [0], [0]) == []
    assert mapped(table_of(4).slot_tables(), [], [], width=2) == [[-1, -1]]


def test_tables_that_cannot_be() -> None:
    blocks = torch.zeros(2, 3, dtype=torch.int32)
    for wrong in (blocks.long(), blocks[0], blocks.t()):
        with pytest.raises(ValueError, match="block table must be int32"):
            SlotTable(wrong, 4)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        SlotTable(blocks, 4, ranks=2, rank=2)
    with pytest.raises(ValueError, match="group 0 has room for 12 tokens"):
        SlotTables([SlotTable(blocks, 4)], max_model_len=13)
    SlotTables([SlotTable(blocks, 4, takes_tokens=False)], max_model_len=13)
    SlotTables([SlotTable(blocks, 4)], max_model_len=12, interleave=5)


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("rows", torch.zeros(3, dtype=torch.int64)),
        ("positions", torch.zeros(3, dtype=torch.int32)),
        ("positions", torch.zeros(2, dtype=torch.int64)),
        ("positions", torch.zeros(6, dtype=torch.int64)[::2]),
        ("out", torch.zeros(1, 3, dtype=torch.int32)),
        ("out", torch.zeros(1, 2, dtype=torch.int64)),
        ("out", torch.zeros(2, 3, dtype=torch.int64)),
        ("out", torch.zeros(1, 6, dtype=torch.int64)[:, ::2]),
    ],
)
def test_arguments_that_do_not_go_together(
    name: str, replacement: torch.Tensor
) -> None:
    arguments = {
        "rows": torch.zeros(3, dtype=torch.int32),
        "positions": torch.zeros(3, dtype=torch.int64),
        "out": torch.zeros(1, 3, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=f"{name} must be"):
        slot_mappings(table_of(4).slot_tables(), **(arguments | {name: replacement}))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=6))
def test_tokens_of_a_step(requests: list[tuple[int, int]]) -> None:
    computed, scheduled = torch.tensor(requests, dtype=torch.int32).view(-1, 2).t()
    tokens = step_tokens(computed.numpy(), scheduled.numpy())
    expected = [
        (row, first + i)
        for row, (first, count) in enumerate(requests)
        for i in range(count)
    ]
    assert list(zip(tokens.rows, tokens.positions, strict=True)) == expected
    starts = [sum(count for _, count in requests[:n]) for n in range(len(requests) + 1)]
    assert tokens.starts.tolist() == starts
    assert (tokens.rows.dtype, tokens.positions.dtype) == ("int32", "int64")
