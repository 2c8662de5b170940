"""The numpy engine of `host.py`: one indexed assignment a region and 16 MiB.

A region is an array whose items are whole runs of bytes, so that numpy moves each
with one memcpy, wherever it starts and however odd its length, and leaves the GIL
for all of them.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvplugin.kernels.region import Copy, Ids, Pairs, Region

CHUNK_BYTES: Final = 16 << 20
"""Bytes of one assignment. numpy gathers into a temporary before it scatters:
glibc's malloc keeps memory of up to 32 MiB for the next one, while more is faulted in
anew each time, at half the speed or less. Chunks that fit a cache are 5 % faster but
return to the GIL far more often."""


def bind(pairs: Pairs) -> Copy:
    """A function that copies blocks from the pairs' sources to their targets."""
    arrays = [(_items(source), _items(target)) for source, target in pairs]

    def copy(source_ids: Ids, target_ids: Ids) -> None:
        for source, target in arrays:
            step = max(1, CHUNK_BYTES // target.itemsize)
            for start in range(0, len(target_ids), step):
                chunk = slice(start, start + step)
                target[_index(target_ids[chunk])] = source[_index(source_ids[chunk])]

    return copy


def _items(region: Region) -> npt.NDArray[np.void]:
    """The region as an array [blocks] of runs, over memory that others own."""
    return np.asarray(_ArrayInterface(region))


class _ArrayInterface:
    """How numpy is told of memory by its address."""

    def __init__(self, region: Region) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (region.address, False),
            "typestr": f"|V{region.nbytes}",
            "shape": (region.blocks,),
            "strides": (region.stride,),
        }


def _index(ids: Ids) -> Ids | slice:
    """A slice where the ids go up in step: numpy then needs no temporary."""
    if (np.diff(ids) == 1).all():
        return slice(int(ids[0]), int(ids[-1]) + 1)
    return ids
