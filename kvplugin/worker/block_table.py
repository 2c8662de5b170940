"""Which blocks a request's tokens lie in, for the kernels of a step.

Rows are requests, entries are block ids in the order of the request's tokens. Where
kernels count in smaller blocks, an entry of the manager is several: block b becomes
kernel blocks ``b * ratio`` to ``b * ratio + ratio - 1`` (vLLM 0.19.1
`v1/worker/block_table.py`). Entries that a row does not have are 0, the null block,
on the host as on the device: a kernel that reads too far reads nobody's bytes.

All changes are made on the host; `commit` sends them. After that

    append     a running request got blocks
    overwrite  a new or resumed request has these
    clear      a request is gone
    move, swap the batch changes its order
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from kvplugin.errors import CapacityError, ConfigError
from kvplugin.kernels.host_slots import SlotTable, SlotTables
from kvplugin.worker.buffers import MirroredTensor
from kvplugin.worker.context_parallel import ContextParallel
from kvplugin.worker.table_shape import TableShape

MAX_BLOCK_ID: Final = (1 << 31) - 1
"""Entries are int32, as kernels want them."""


class BlockTable:
    """The rows of one group.

    Args:
        shape: of the group.
        max_num_reqs: number of rows.
        device: where kernels read it.
    """

    def __init__(
        self, shape: TableShape, max_num_reqs: int, device: torch.device | str
    ) -> None:
        self.shape = shape
        self.blocks = MirroredTensor(
            max_num_reqs, shape.columns, dtype=torch.int32, device=device
        )
        self._lengths = [0] * max_num_reqs
        self._parts = np.arange(shape.ratio)

    def row(self, row: int) -> list[int]:
        """The kernel blocks of a row."""
        entries: list[int] = self.blocks.array[row, : self._lengths[row]].tolist()
        return entries

    def expand(self, row: int, start: int, ids: Sequence[int]) -> npt.NDArray:
        """The kernel blocks of the manager's blocks, int64, if the row has room for
        them from its entry `start` on; changes nothing.

        Raises:
            CapacityError: it has not, or an id does not fit the table.
        """
        ratio, columns = self.shape.ratio, self.shape.columns
        if start + len(ids) * ratio > columns:
            raise CapacityError(
                f"row {row} would have {start // ratio + len(ids)} blocks of "
                f"{self.shape.block_size} tokens, but the block table is "
                f"{self.shape.width} wide: the request is longer than max_model_len"
            )
        entries = np.asarray(ids, np.int64)
        if ratio > 1:
            entries = (entries[:, None] * ratio + self._parts).reshape(-1)
        if len(entries) and not 0 <= entries.min() <= entries.max() <= MAX_BLOCK_ID:
            raise CapacityError(
                f"block ids {min(ids)} to {max(ids)} in parts of {ratio} are not from "
                f"0 to {MAX_BLOCK_ID}: use larger blocks"
            )
        return entries

    def length(self, row: int) -> int:
        """Kernel blocks that a row has."""
        return self._lengths[row]

    def put(self, row: int, start: int, entries: npt.NDArray) -> None:
        """Make `entries`, from `expand`, the row from entry `start` to its end."""
        end = start + len(entries)
        self.blocks.array[row, start:end] = entries
        self.blocks.array[row, end : self._lengths[row]] = 0
        self._lengths[row] = end

    def move(self, source: int, target: int) -> None:
        """Put row `source` in the place of `target`, and leave it empty."""
        array = self.blocks.array
        self.put(target, 0, array[source, : self._lengths[source]])
        self.put(source, 0, array[source, :0])

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        lengths, array = self._lengths, self.blocks.array
        end = max(lengths[one], lengths[other])
        array[[one, other], :end] = array[[other, one], :end]
        lengths[one], lengths[other] = lengths[other], lengths[one]

    def commit(self, count: int, padded: int) -> torch.Tensor:
        """Send rows [0, count); those up to `padded` are null blocks. A view of all
        `padded` on the device, int32 [padded, columns]."""
        self.blocks.push(count)
        self.blocks.device[count:padded] = 0
        return self.blocks.device[:padded]


class BlockTables:
    """The block tables of all groups; a request has the same row in each.

    Args:
        shapes: one a group.
        max_num_reqs: number of rows.
        max_model_len: tokens of the longest request.
        device: where kernels read them.
        context_parallel: this worker's place in it.

    Raises:
        ConfigError: pieces of context parallelism do not divide a block.
    """

    def __init__(
        self,
        shapes: Sequence[TableShape],
        *,
        max_num_reqs: int,
        max_model_len: int,
        device: torch.device | str = "cpu",
        context_parallel: ContextParallel = ContextParallel(),  # noqa: B008
    ) -> None:
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len
        self.device = torch.device(device)
        self.context_parallel = context_parallel
        for group, shape in enumerate(shapes):
            if shape.is_sharded and shape.block_size % context_parallel.interleave:
                raise ConfigError(
                    f"cp_kv_cache_interleave_size {context_parallel.interleave} must "
                    f"divide block_size {shape.block_size} of group {group}"
                )
        self.tables = [BlockTable(shape, max_num_reqs, device) for shape in shapes]

    def append(self, row: int, ids: Sequence[Sequence[int]]) -> None:
        """Add blocks at the end of a row.

        Args:
            row: of the request.
            ids: block ids of the manager, a list a group.

        Raises:
            CapacityError: a group's row is full; no group is changed.
            ValueError: not as many lists as groups.
        """
        self._put(row, [table.length(row) for table in self.tables], ids)

    def overwrite(self, row: int, ids: Sequence[Sequence[int]]) -> None:
        """Replace a row; otherwise as `append`."""
        self._put(row, [0] * len(self.tables), ids)

    def clear(self, row: int) -> None:
        """Empty a row."""
        self.overwrite(row, [()] * len(self.tables))

    def move(self, source: int, target: int) -> None:
        """Put row `source` in the place of another row, and leave it empty."""
        if source != target:
            for table in self.tables:
                table.move(source, target)

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        for table in self.tables:
            table.swap(one, other)

    def commit(self, count: int, padded: int | None = None) -> list[torch.Tensor]:
        """Send the leading rows to the device.

        On a GPU the copy is asynchronous: change no row before it has passed.

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

    def _put(
        self, row: int, starts: Sequence[int], ids: Sequence[Sequence[int]]
    ) -> None:
        if len(ids) != len(self.tables):
            raise ValueError(f"{len(ids)} lists of ids for {len(self.tables)} groups")
        parts = zip(self.tables, starts, ids, strict=True)
        expanded = [table.expand(row, start, new) for table, start, new in parts]
        for table, start, entries in zip(self.tables, starts, expanded, strict=True):
            table.put(row, start, entries)
