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

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvplugin.errors import ConfigError, unknown_name
from kvplugin.kernels import _numpy_copy
from kvplugin.kernels.region import Copy, Ids, Pairs, Region, join_neighbours

__all__ = ["BlockCopier", "Region", "warm_up"]

logger = logging.getLogger("vllm.kvplugin.kernels")


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
        engine: Literal["auto", "numba", "numpy"] = "auto",
    ) -> None:
        _check_sides(sources, targets)
        self._source_blocks = min(region.blocks for region in sources)
        self._target_blocks = min(region.blocks for region in targets)
        self._block_bytes = sum(region.nbytes for region in sources)
        pairs = join_neighbours(zip(sources, targets, strict=True))
        self._copy = _bind(engine)(pairs)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all regions."""
        return self._block_bytes

    def copy(
        self,
        source_ids: Sequence[int] | npt.NDArray[np.integer],
        target_ids: Sequence[int] | npt.NDArray[np.integer],
    ) -> int:
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
        sources, targets = _as_ids(source_ids, "source"), _as_ids(target_ids, "target")
        if len(sources) != len(targets):
            raise ValueError(
                f"{len(sources)} source ids do not pair with {len(targets)} target ids"
            )
        if not len(sources):
            return 0
        _check_range(sources, self._source_blocks, "source")
        _check_range(targets, self._target_blocks, "target")
        _check_distinct(targets, self._target_blocks)
        self._copy(*_by_source(sources, targets))
        return len(sources) * self._block_bytes


def warm_up() -> None:
    """Compile what the first copier of this process would have to compile."""
    _bind("auto")


def _check_sides(sources: Sequence[Region], targets: Sequence[Region]) -> None:
    if len(sources) != len(targets):
        raise ValueError(
            f"{len(sources)} source regions do not pair with "
            f"{len(targets)} target regions"
        )
    if not sources:
        raise ValueError("a copier needs at least one region a side")
    for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if source.nbytes != target.nbytes:
            raise ValueError(
                f"region {i} has {source.nbytes} bytes a block in the source and "
                f"{target.nbytes} in the target"
            )


def _as_ids(ids: Sequence[int] | npt.NDArray[np.integer], side: str) -> Ids:
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"{side} ids must be a flat list of integers, not {array.dtype} of shape "
            f"{array.shape}"
        )
    # Always a copy: writable, contiguous, and no one else's to change in mid-copy.
    return np.array(array, dtype=np.int64)


def _check_range(ids: Ids, blocks: int, side: str) -> None:
    for extreme in (int(ids.min()), int(ids.max())):
        if not 0 <= extreme < blocks:
            raise ValueError(
                f"{side} id {extreme} is out of range: there are {blocks} blocks, "
                f"0 to {blocks - 1}"
            )


def _check_distinct(targets: Ids, blocks: int) -> None:
    seen = np.zeros(blocks, np.bool_)
    seen[targets] = True
    if np.count_nonzero(seen) < len(targets):
        ids, counts = np.unique(targets, return_counts=True)
        raise ValueError(f"target id {ids[counts > 1][0]} appears more than once")


def _by_source(sources: Ids, targets: Ids) -> tuple[Ids, Ids]:
    """Pairs in order of the source, where runs that can be joined lie side by side.

    Reading upwards is also the faster order, writing upwards less so.
    """
    # Ids have 31 bits: one number a pair sorts faster than an argsort of the sources.
    pairs = (sources << 32) | targets
    pairs.sort()
    return pairs >> 32, pairs & 0xFFFF_FFFF


_Bind: TypeAlias = Callable[[Pairs], Copy]


def _bind(name: str) -> _Bind:
    """The `bind` of the named engine."""
    if name not in ("auto", "numba", "numpy"):
        raise unknown_name("copy engine", name, ("auto", "numba", "numpy"), "engine")
    numba_bind = _numba_bind() if name != "numpy" else None
    if isinstance(numba_bind, ImportError) and name == "numba":
        raise ConfigError(
            f"engine 'numba' can't be used ({numba_bind}): install numba, or set "
            "engine to 'auto'"
        ) from numba_bind
    if numba_bind is None or isinstance(numba_bind, ImportError):
        return _numpy_copy.bind
    return numba_bind


@functools.cache
def _numba_bind() -> _Bind | ImportError:
    """Compile the numba engine, once a process (the import lock sees to that)."""
    try:
        from kvplugin.kernels import _numba_copy
    except ImportError as error:
        logger.warning(
            "numba can't be used (%s): copies of KV blocks go through numpy, at a "
            "third of the speed",
            error,
        )
        return error
    return _numba_copy.bind
