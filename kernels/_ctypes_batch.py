"""`host_batch.py` without numba: a memmove a run, each without the GIL."""

import ctypes

from kvplugin.kernels.region import Ids


def copy_runs(sources: Ids, targets: Ids, sizes: Ids) -> None:
    """Copy sizes[i] bytes from address sources[i] to address targets[i]."""
    runs = zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True)
    for target, source, nbytes in runs:
        ctypes.memmove(target, source, nbytes)
