"""Which blocks a request's tokens lie in, for the kernels of a step.

Rows are requests, entries are block ids in the order of the request's tokens. Where
kernels count in smaller blocks, an entry of the manager is several: block b becomes
kernel blocks ``b * ratio`` to ``b * ratio + ratio - 1`` (vLLM 0.19.1
`v1/worker/block_table.py`). Entries that a row does not have are 0, which is in the
null block, on the host as on the device; so are those behind a window or a chunk,
whose blocks the manager gives to others: a kernel that reads whole tiles, beyond
what its queries see on either side, reads nobody else's bytes. (Rows of states are
left alone: kernels read single entries of them.)

All changes are made on the host; `commit` sends them. Before that

    append     a running request got blocks
    skip       it has computed tokens, and some fell out of the window
    overwrite  a new or resumed request has these
    clear      a request is gone
    move, swap the batch changes its order
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy.typing as npt
import torch

from kvplugin.errors import ConfigError
from kvplugin.kernels.host_slots import SlotTable, SlotTables
from kvplugin.worker.buffers import PIPELINE_DEPTH
from kvplugin.worker.context_parallel import ContextParallel
from kvplugin.worker.group_table import BlockTable
from kvplugin.worker.table_shape import TableShape

Entries: TypeAlias = Sequence[tuple[int, npt.NDArray]]
"""Of each group where a row is written from, and kernel blocks."""


class BlockTables:
    """The block tables of all groups; a request has the same row in each.

    Args:
        shapes: one a group.
        max_num_reqs: number of rows.
        max_model_len: tokens of the longest request.
        device: where kernels read them.
        context_parallel: this worker's place in it.
        pipeline_depth: steps that may be in flight at once (that of the scheduler's
            config): so many steps may be on their way to a GPU before one is waited
            for.

    Raises:
        ConfigError: pieces of context parallelism do not divide a block, or there are
            as many ranks as the limits of a shape do not say.
    """

    def __init__(
        self,
        shapes: Sequence[TableShape],
        *,
        max_num_reqs: int,
        max_model_len: int,
        device: torch.device | str = "cpu",
        context_parallel: ContextParallel = ContextParallel(),  # noqa: B008
        pipeline_depth: int = PIPELINE_DEPTH,
    ) -> None:
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len
        self.device = torch.device(device)
        self.context_parallel = context_parallel
        self.pipeline_depth = pipeline_depth
        for group, shape in enumerate(shapes):
            if shape.is_sharded:
                _check_sharded(group, shape, context_parallel)
        self.tables = [
            BlockTable(shape, max_num_reqs, device, pipeline_depth) for shape in shapes
        ]

    def append(self, row: int, ids: Sequence[Sequence[int]]) -> None:
        """Add blocks at the end of a row.

        Args:
            row: of the request.
            ids: block ids of the manager, a list a group.

        Raises:
            CapacityError: a group's row is full, or an id does not fit the table; no
                group is changed.
            ValueError: there is no such row, ids are not integers, or not as many
                lists as groups.
        """
        self._check_row(row)
        self.put(row, self.expand(f"row {row}", ids, self.lengths(row)))

    def overwrite(self, row: int, ids: Sequence[Sequence[int]]) -> None:
        """Replace a row; otherwise as `append`."""
        self._check_row(row)
        self.put(row, self.expand(f"row {row}", ids))

    def clear(self, row: int) -> None:
        """Empty a row."""
        self.overwrite(row, [()] * len(self.tables))

    def lengths(self, row: int) -> list[int]:
        """Kernel blocks that a row has in each group."""
        return [table.length(row) for table in self.tables]

    def expand(
        self,
        who: str,
        ids: Sequence[Sequence[int]],
        starts: Sequence[int] | None = None,
    ) -> Entries:
        """What `put` would write, checked; changes nothing.

        Args:
            who: for messages.
            ids: block ids of the manager, a list a group.
            starts: entries that stay, a number a group; None for none.

        Raises:
            CapacityError: a group's row has no room, or an id does not fit the table.
            ValueError: ids are not integers, or not as many lists as groups.
        """
        if len(ids) != len(self.tables):
            raise ValueError(f"{len(ids)} lists of ids for {len(self.tables)} groups")
        starts = [0] * len(ids) if starts is None else starts
        parts = zip(self.tables, starts, ids, strict=True)
        return [(start, table.expand(who, start, new)) for table, start, new in parts]

    def put(self, row: int, entries: Entries) -> None:
        """Write what `expand` has made into a row."""
        for table, (start, expanded) in zip(self.tables, entries, strict=True):
            table.put(row, start, expanded)

    def skip(self, row: int, before: int, computed: int) -> None:
        """Blank the entries that no query from now on sees.

        Args:
            row: of a request.
            before: its computed tokens at the last `skip`, or when it came.
            computed: those it has now.
        """
        for table in self.tables:
            table.skip(row, before, computed)

    def sees_again(self, before: int, computed: int) -> bool:
        """Whether queries after so many computed tokens see what `skip` has blanked
        for `before`."""
        shapes = [table.shape for table in self.tables]
        return any(
            shape.num_skipped_blocks(computed) < shape.num_skipped_blocks(before)
            for shape in shapes
        )

    def move(self, source: int, target: int) -> None:
        """Put row `source` in the place of another row, and leave it empty."""
        self._check_row(source)
        self._check_row(target)
        if source != target:
            for table in self.tables:
                table.move(source, target)

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        self._check_row(one)
        self._check_row(other)
        for table in self.tables:
            table.swap(one, other)

    def commit(self, count: int, padded: int | None = None) -> list[torch.Tensor]:
        """Send the leading rows to the device.

        Rows may be changed again at once, also while a GPU still copies.

        Args:
            count: rows in use.
            padded: rows that kernels will read, for graphs of fixed sizes; those
                behind `count` are null blocks.

        Returns:
            Views, int32 [padded, columns] a group; the same memory at every call.
        """
        padded = count if padded is None else padded
        return [table.commit(count, padded) for table in self.tables]

    def slot_tables(self, groups: Sequence[int] | None = None) -> SlotTables:
        """What slot mappings read: all groups, or those of a drafter."""
        chosen = range(len(self.tables)) if groups is None else groups
        return SlotTables(
            [self._slot_table(self.tables[group]) for group in chosen],
            max_model_len=self.max_model_len,
            interleave=self.context_parallel.interleave,
        )

    def _slot_table(self, table: BlockTable) -> SlotTable:
        shape, place = table.shape, self.context_parallel
        return SlotTable(
            table.blocks.device,
            shape.kernel_block_size,
            ranks=place.ranks if shape.is_sharded else 1,
            rank=place.rank if shape.is_sharded else 0,
            takes_tokens=shape.takes_tokens,
        )

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.max_num_reqs:
            raise ValueError(
                f"there is no row {row}: rows are 0 to {self.max_num_reqs - 1}"
            )


def _check_sharded(group: int, shape: TableShape, place: ContextParallel) -> None:
    if shape.ranks != place.ranks:
        raise ConfigError(
            f"ContextParallel.ranks is {place.ranks}, but the limits that the table of "
            f"group {group} was made for have decode_context_parallel_size * "
            f"prefill_context_parallel_size = {shape.ranks}: they must be the same"
        )
    if shape.block_size % place.interleave:
        raise ConfigError(
            f"cp_kv_cache_interleave_size {place.interleave} must divide block_size "
            f"{shape.block_size} of group {group}"
        )
