"""The numba engine of `host_batch.py`: a whole batch in one call without the GIL.

Importing this module compiles it, or reads it from numba's cache on disk.
"""

from typing import Final

import numpy as np

from kvplugin.kernels._numba_memory import compile_job, copy_run, fence, streams
from kvplugin.kernels.region import Ids


def _copy_runs(sources: Ids, targets: Ids, sizes: Ids, streamed: bool) -> None:
    for i in range(len(sizes)):
        copy_run(targets[i], sources[i], sizes[i], streamed)
    fence()


_copy: Final = compile_job(
    _copy_runs,
    "void(int64[::1], int64[::1], int64[::1], boolean)",
    *[np.empty(0, np.int64)] * 3,
    False,
)


def copy_runs(sources: Ids, targets: Ids, sizes: Ids) -> None:
    """Copy sizes[i] bytes from address sources[i] to address targets[i]."""
    _copy(sources, targets, sizes, streams(int(sizes.sum())))
