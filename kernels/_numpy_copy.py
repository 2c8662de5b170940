"""The numpy engine of `host.py`: one indexed assignment a region and 16 MiB."""

import numpy as np

from kvplugin.kernels._numpy_memory import CHUNK_BYTES, array_of_runs, pieces
from kvplugin.kernels.region import Copy, Ids, Pairs


def bind(pairs: Pairs) -> Copy:
    """A function that copies blocks from the pairs' sources to their targets."""
    arrays = [
        tuple(
            array_of_runs(r.address + start, nbytes, (r.blocks,), (r.stride,))
            for r in pair
        )
        for pair in pairs
        for start, nbytes in pieces(pair[0].nbytes)
    ]

    def copy(source_ids: Ids, target_ids: Ids) -> None:
        for source, target in arrays:
            step = max(1, CHUNK_BYTES // target[0].nbytes)
            for start in range(0, len(target_ids), step):
                chunk = slice(start, start + step)
                target[_index(target_ids[chunk])] = source[_index(source_ids[chunk])]

    return copy


def _index(ids: Ids) -> Ids | slice:
    """A slice where the ids go up in step: numpy then needs no temporary."""
    if (np.diff(ids) == 1).all():
        return slice(int(ids[0]), int(ids[-1]) + 1)
    return ids
