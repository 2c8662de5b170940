"""The numba engine of `host.py`: a whole job in one call that holds no GIL.

Importing this module compiles it, or reads it from numba's cache on disk.
"""

from typing import Final

import numpy as np

from kvplugin.kernels._numba_memory import compile_job, copy_run, fence, jit, streams
from kvplugin.kernels.region import Copy, Ids, Pairs


@jit
def _run_end(source_ids: Ids, target_ids: Ids, first: int) -> int:
    """One past the last pair that goes up in step with pair `first`."""
    end = first + 1
    while (
        end < len(target_ids)
        and source_ids[end] == source_ids[end - 1] + 1
        and target_ids[end] == target_ids[end - 1] + 1
    ):
        end += 1
    return end


def _copy_blocks(table: Ids, source_ids: Ids, target_ids: Ids, streamed: bool) -> None:
    first = 0
    while first < len(target_ids):
        end = _run_end(source_ids, target_ids, first)
        for region in range(len(table)):
            source_stride, target_stride = table[region, 1], table[region, 3]
            source = table[region, 0] + source_ids[first] * source_stride
            target = table[region, 2] + target_ids[first] * target_stride
            nbytes = table[region, 4]
            if source_stride == nbytes == target_stride:
                copy_run(target, source, (end - first) * nbytes, streamed)
            else:
                for block in range(end - first):
                    copy_run(
                        target + block * target_stride,
                        source + block * source_stride,
                        nbytes,
                        streamed,
                    )
        first = end
    fence()


_copy: Final = compile_job(
    _copy_blocks,
    "void(int64[:, ::1], int64[::1], int64[::1], boolean)",
    np.empty((0, 5), np.int64),
    *[np.empty(0, np.int64)] * 2,
    False,
)


def bind(pairs: Pairs) -> Copy:
    """A function that copies blocks from the pairs' sources to their targets."""
    rows = [(s.address, s.stride, t.address, t.stride, s.nbytes) for s, t in pairs]
    table = np.array(rows, dtype=np.int64)
    block_bytes = sum(source.nbytes for source, _ in pairs)

    def copy(source_ids: Ids, target_ids: Ids) -> None:
        streamed = streams(len(target_ids) * block_bytes)
        _copy(table, source_ids, target_ids, streamed)

    return copy
