"""Copies of KV blocks between two places in host memory: KV tensors, a host pool.

A block is rarely one run of bytes: a layer keeps its page, a host slot keeps a slice
a layer. A `Region` describes the runs of one layer, block by block; a `BlockCopier`
pairs the regions of two sides, and one call of its `copy` moves any blocks from one
side to the other, byte by byte the same. Gather, scatter and pool to pool are the
same call.

Two engines do it. With numba, a job leaves the GIL once, however many blocks and
regions it has (`_numba_copy.py`). Without, numpy leaves it twice a region and
16 MiB, at a third of the speed (`_numpy_copy.py`). How often matters: beside a
thread that polls without sleeping, each return to the interpreter waits some five
milliseconds.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvplugin.kernels import _numpy_copy
from kvplugin.kernels.engines import Engine, choose
from kvplugin.kernels.ids import AnyIds, checked_pairs
from kvplugin.kernels.region import Copy, Pairs, Region, check_sides, join_neighbours

__all__ = ["BlockCopier", "Region", "warm_up"]


class BlockCopier:
    """Copies blocks from one list of regions to another, any strides.

    Region i of the sources goes to region i of the targets; a block has its id in
    all regions of its side. The copier keeps addresses, not memory: the caller keeps
    both sides alive, and keeps others from writing to what is being copied. Several
    threads may copy at once as long as their target blocks differ.

    The first copier of a process compiles the numba engine or reads it from numba's
    cache, some tenths of a second, unless `warm_up` has; `copy` never compiles.

    Args:
        sources: where blocks are read.
        targets: where they are written; must not overlap the source blocks of a job.
        engine: ``"auto"`` takes numba where it can be imported.

    Raises:
        ValueError: the sides differ in length or in a region's bytes, or are empty.
        ConfigError: `engine` is unknown, or is numba where numba can't be used.
    """

    def __init__(
        self,
        sources: Sequence[Region],
        targets: Sequence[Region],
        *,
        engine: Engine = "auto",
    ) -> None:
        check_sides(sources, targets)
        self._source_blocks = min(region.blocks for region in sources)
        self._target_blocks = min(region.blocks for region in targets)
        self._block_bytes = sum(region.nbytes for region in sources)
        pairs = join_neighbours(zip(sources, targets, strict=True))
        self._copy = _bind(engine)(pairs)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all regions."""
        return self._block_bytes

    def copy(self, source_ids: AnyIds, target_ids: AnyIds) -> int:
        """Copy block source_ids[i] to block target_ids[i], for every i.

        Blocks are copied in no particular order; nothing is copied unless all ids
        are good. Pairs whose ids go up in step on both sides are copied as one run
        where regions have no gaps. Beyond the copy a job costs some 10 microseconds
        and 0.03 a pair of ids, 0.08 if they come as lists.

        Args:
            source_ids: flat; an id may appear more than once.
            target_ids: flat and as many, each at most once.

        Returns:
            The bytes copied; 0 for no ids.

        Raises:
            ValueError: ids are not flat lists of integers of one length, are out of
                range, or a target id is repeated.
        """
        sources, targets = checked_pairs(
            source_ids, target_ids, self._source_blocks, self._target_blocks
        )
        if not len(sources):
            return 0
        self._copy(sources, targets)
        return len(sources) * self._block_bytes


def warm_up() -> None:
    """Compile what the first copier of this process would have to compile."""
    _bind("auto")


_Bind: TypeAlias = Callable[[Pairs], Copy]


def _bind(engine: Engine) -> _Bind:
    bind: _Bind = choose(engine, "_numba_copy", _numpy_copy).bind
    return bind
