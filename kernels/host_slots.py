"""Slot mappings on the host, and what a slot mapping reads (`slots.py` does the same
on a device).

A token's KV lies at ``slot = block * block_size + offset`` of its layer, where `block`
is the entry of its request's row for its position. With context parallelism every rank
keeps some tokens only: pieces of `interleave` tokens go to the ranks in turn, and a
rank packs its own tightly. Formulas after vLLM 0.19.1 `v1/worker/block_table.py`,
written for an `interleave` that divides the block size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kvplugin.spec import cdiv

PAD_SLOT: Final = -1
"""The slot of a token that nobody keeps; writers skip it."""
NO_ROW: Final = -1
"""The row of such a token."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotTable:
    """The block table of one group.

    Raises:
        ValueError: not int32 [rows, width] with contiguous rows, or sizes that cannot
            be.
    """

    blocks: torch.Tensor
    """Block ids, int32 [rows, width]. Only read; must stay where it is."""
    block_size: int
    """Tokens of one of these blocks on one rank."""
    ranks: int = 1
    """Context-parallel ranks that share the group's tokens."""
    rank: int = 0
    takes_tokens: bool = True
    """False: blocks hold something else (a state), and no token has a slot."""

    def __post_init__(self) -> None:
        blocks = self.blocks
        if blocks.dtype != torch.int32 or blocks.dim() != 2 or blocks.stride(1) != 1:
            raise ValueError(
                "a block table must be int32 [rows, width] with contiguous rows, not "
                f"{blocks.dtype} {list(blocks.shape)} with strides {blocks.stride()}"
            )
        if self.block_size < 1 or not 0 <= self.rank < self.ranks:
            raise ValueError(
                f"block_size {self.block_size}, rank {self.rank} of {self.ranks}: "
                "sizes must be positive, and a rank below their number"
            )


class SlotTables:
    """The block tables of all groups, described once for every later mapping.

    Args:
        tables: one a group, all on one device.
        max_model_len: tokens of the longest request; no position from here on has a
            slot.
        interleave: tokens in a piece of a context-parallel rank. It must divide the
            block sizes of the manager, of which a table's blocks may be parts.

    Raises:
        ValueError: devices differ, or a table has no room for `max_model_len` tokens.
    """

    def __init__(
        self, tables: Sequence[SlotTable], *, max_model_len: int, interleave: int = 1
    ) -> None:
        self.tables = tuple(tables)
        self.max_model_len = max_model_len
        self.interleave = interleave
        devices = {table.blocks.device for table in self.tables}
        if len(devices) > 1:
            raise ValueError(f"block tables lie on several devices: {devices}")
        for group, table in enumerate(self.tables):
            self._check_room(group, table)
        self.device = devices.pop() if devices else torch.device("cpu")
        self.descriptors = torch.tensor(
            [self._describe(table) for table in self.tables], dtype=torch.int64
        ).to(self.device)
        """For the kernel, int64 [groups, 6]: address, elements from row to row, tokens
        of a block, ranks, rank, and the first position without a slot."""

    def _describe(self, table: SlotTable) -> tuple[int, ...]:
        blocks = table.blocks
        limit = self.max_model_len if table.takes_tokens else 0
        sizes = (table.block_size, table.ranks, table.rank, limit)
        return blocks.data_ptr(), blocks.stride(0), *sizes

    def _check_room(self, group: int, table: SlotTable) -> None:
        piece = self.interleave if table.ranks > 1 else 1
        most = cdiv(self.max_model_len, piece * table.ranks) * piece
        room = table.blocks.shape[1] * table.block_size
        if table.takes_tokens and most > room:
            raise ValueError(
                f"the block table of group {group} has room for {room} tokens, but a "
                f"request of max_model_len {self.max_model_len} has up to {most} on "
                "this rank"
            )


def slot_mappings(
    tables: SlotTables, rows: torch.Tensor, positions: torch.Tensor, out: torch.Tensor
) -> None:
    """Write the slots of all tokens in all groups.

    A token gets `PAD_SLOT` if its row is `NO_ROW`, its position is negative or not
    below `max_model_len`, another context-parallel rank keeps it, or its group keeps
    no tokens. Rows are not checked against the tables' height.

    Args:
        tables: the groups, on the device of everything else.
        rows: row of each token's request, int32 [tokens].
        positions: of each token in its request, int64 [tokens].
        out: int64 [groups, at least tokens]; what lies behind the tokens becomes
            `PAD_SLOT`.

    Raises:
        ValueError: a shape, dtype, stride or device is another.
    """
    check_arguments(tables, rows, positions, out)
    out[:, len(rows) :] = PAD_SLOT
    for group, table in enumerate(tables.tables):
        out[group, : len(rows)] = _slots(tables, table, rows, positions)


def _slots(
    tables: SlotTables, table: SlotTable, rows: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    if not table.takes_tokens:
        return torch.full_like(positions, PAD_SLOT)
    piece = tables.interleave
    kept = (rows >= 0) & (positions >= 0) & (positions < tables.max_model_len)
    kept &= positions // piece % table.ranks == table.rank
    local = positions // (piece * table.ranks) * piece + positions % piece
    local = torch.where(kept, local, 0)
    blocks = table.blocks[rows.clamp(min=0), local // table.block_size]
    slots = blocks.to(torch.int64) * table.block_size + local % table.block_size
    return torch.where(kept, slots, PAD_SLOT)


def check_arguments(
    tables: SlotTables, rows: torch.Tensor, positions: torch.Tensor, out: torch.Tensor
) -> None:
    """Refuse arguments of `slot_mappings` that do not go together.

    Raises:
        ValueError: naming what does not fit.
    """
    _check_tokens("rows", rows, torch.int32, len(rows))
    _check_tokens("positions", positions, torch.int64, len(rows))
    shape = (len(tables.tables), max(out.shape[-1], len(rows)))
    if out.dtype != torch.int64 or out.shape != shape or out.stride(-1) != 1:
        raise ValueError(
            f"out must be int64 [{shape[0]}, at least {len(rows)}] with contiguous "
            f"rows, not {out.dtype} {list(out.shape)} with strides {out.stride()}"
        )
    devices = {rows.device, positions.device, out.device}
    if tables.tables:
        devices.add(tables.device)
    if len(devices) > 1:
        raise ValueError(f"tables, rows, positions and out are on {devices}")


def _check_tokens(
    name: str, given: torch.Tensor, dtype: torch.dtype, count: int
) -> None:
    if given.dtype != dtype or given.shape != (count,) or not given.is_contiguous():
        raise ValueError(
            f"{name} must be {dtype} [{count}], contiguous, not {given.dtype} "
            f"{list(given.shape)} with strides {given.stride()}"
        )
