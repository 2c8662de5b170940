"""The slot kernel against its host twin, with canaries around what it writes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.kernels import host_slots, slots
from kvplugin.kernels.host_slots import SlotTable, SlotTables
from tests.kernels.canaries import Guarded

MAX_LEN = 48


@st.composite
def tables_and_pieces(draw: st.DrawFn) -> SlotTables:
    """One to three groups: some shared out, some with states."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    rows, piece = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    tables = []
    for _ in range(draw(st.integers(1, 3))):
        ranks = draw(st.integers(1, 3))
        size = draw(st.integers(1, 5))
        width = 2 + (MAX_LEN + piece * ranks) // size + draw(st.integers(0, 3))
        most = draw(st.sampled_from((100, (1 << 31) - 1)))
        blocks = torch.randint(most, (rows, width), generator=generator)
        tables.append(
            SlotTable(
                blocks.to(torch.int32),
                size,
                ranks=ranks,
                rank=draw(st.integers(0, ranks - 1)),
                takes_tokens=draw(st.booleans()),
            )
        )
    return SlotTables(tables, max_model_len=MAX_LEN, interleave=piece)


def check(
    tables: SlotTables, rows: torch.Tensor, positions: torch.Tensor, width: int
) -> None:
    """Kernel and twin write the same, and the kernel nothing else."""
    groups, stride = len(tables.tables), width + 3
    guarded = Guarded.of(groups * stride * 8)
    out = guarded.view(torch.int64, groups, stride)
    wanted = out.clone()
    host_slots.slot_mappings(tables, rows, positions, wanted[:, :width])
    slots.slot_mappings(tables, rows, positions, out[:, :width])
    assert torch.equal(out, wanted)
    guarded.check()


@settings(max_examples=60, deadline=None)
@given(tables_and_pieces(), st.data())
def test_kernel_is_the_reference(tables: SlotTables, data: st.DataObject) -> None:
    height = tables.tables[0].blocks.shape[0]
    token = st.tuples(
        st.integers(-1, height - 1),
        st.integers(-2, MAX_LEN + 2) | st.sampled_from((1 << 31, 1 << 40, -(1 << 40))),
    )
    tokens = data.draw(st.lists(token, max_size=40))
    rows = torch.tensor([row for row, _ in tokens], dtype=torch.int32)
    positions = torch.tensor([at for _, at in tokens], dtype=torch.int64)
    check(tables, rows, positions, len(tokens) + data.draw(st.integers(0, 5)))


@pytest.mark.parametrize("count", [1023, 1024, 1025, 2500])
def test_more_tokens_than_a_program(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    blocks = torch.randint(1 << 20, (7, 40), generator=generator).to(torch.int32)
    tables = SlotTables(
        # Rows longer than what is used of them.
        [SlotTable(blocks[:, :32], 16), SlotTable(blocks[:, :16], 32)],
        max_model_len=500,
    )
    rows = torch.randint(-1, 7, (count,), generator=generator).to(torch.int32)
    positions = torch.randint(510, (count,), generator=generator)
    check(tables, rows, positions, count + 1100)


def test_nothing_to_write() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    blocks = torch.zeros(1, 4, dtype=torch.int32)
    tables = SlotTables([SlotTable(blocks, 4)], max_model_len=16)
    check(tables, none, none.long(), 0)
    check(SlotTables([], max_model_len=16), none, none.long(), 5)


def test_arguments_are_checked() -> None:
    tables = SlotTables(
        [SlotTable(torch.zeros(1, 4, dtype=torch.int32), 4)], max_model_len=16
    )
    rows = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="positions must be"):
        slots.slot_mappings(tables, rows, rows, torch.zeros(1, 3, dtype=torch.int64))
