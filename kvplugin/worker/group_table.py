"""The block table of one group; what its rows are says `block_table.py`."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from kvplugin.errors import CapacityError
from kvplugin.kernels.ids import flat_integers
from kvplugin.worker.buffers import PIPELINE_DEPTH, MirroredTensor
from kvplugin.worker.table_shape import TableShape

MAX_BLOCK_ID: Final = (1 << 31) - 1
"""Entries are int32, as kernels want them."""


class BlockTable:
    """The rows of one group.

    Args:
        shape: of the group.
        max_num_reqs: number of rows.
        device: where kernels read it.
        pipeline_depth: steps in flight.
    """

    def __init__(
        self,
        shape: TableShape,
        max_num_reqs: int,
        device: torch.device | str,
        pipeline_depth: int = PIPELINE_DEPTH,
    ) -> None:
        self.shape = shape
        self.blocks = MirroredTensor(
            max_num_reqs,
            shape.columns,
            dtype=torch.int32,
            device=device,
            pipeline_depth=pipeline_depth,
        )
        self._lengths = [0] * max_num_reqs
        self._parts = np.arange(shape.ratio)

    def row(self, row: int) -> list[int]:
        """The kernel blocks of a row."""
        entries: list[int] = self.blocks.array[row, : self._lengths[row]].tolist()
        return entries

    def expand(self, who: str, start: int, ids: Sequence[int]) -> npt.NDArray:
        """The kernel blocks of the manager's blocks, int64, if a row has room for
        them from its entry `start` on; changes nothing.

        Raises:
            CapacityError: it has not, or an id does not fit the table; names `who`.
            ValueError: ids are not a flat list of integers.
        """
        ratio, columns = self.shape.ratio, self.shape.columns
        entries = flat_integers(ids, f"block ids of {who}")
        if start + len(entries) * ratio > columns:
            raise CapacityError(
                f"{who} would have {start // ratio + len(entries)} blocks of "
                f"{self.shape.block_size} tokens, but the block table is "
                f"{self.shape.width} wide: the request is longer than max_model_len"
            )
        if not len(entries):
            return entries
        first, last = int(entries.min()), int(entries.max())
        if first < 0 or last > (MAX_BLOCK_ID + 1) // ratio - 1:
            raise CapacityError(
                f"block ids {first} to {last} of {who} in parts of {ratio} are not "
                f"from 0 to {MAX_BLOCK_ID}: use larger blocks"
            )
        if ratio > 1:
            entries = (entries[:, None] * ratio + self._parts).reshape(-1)
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

    def skip(self, row: int, before: int, computed: int) -> None:
        """Blank what fell out of sight when computed tokens became more than `before`;
        what had fallen out before is blank."""
        first = self.shape.num_skipped_blocks(before) * self.shape.ratio
        end = self.shape.num_skipped_blocks(computed) * self.shape.ratio
        blank = self.blocks.array[row, first : min(end, self._lengths[row])]
        blank.reshape(-1, self.shape.ratio)[:] = self._parts

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
