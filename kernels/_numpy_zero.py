"""The numpy engine of `host_zero.py`: one indexed assignment a region."""

from collections.abc import Callable, Sequence

import numpy as np

from kvplugin.kernels._numpy_memory import array_of_runs, pieces
from kvplugin.kernels.region import Ids, Region


def bind(regions: Sequence[Region]) -> Callable[[Ids], None]:
    """A function that zeroes blocks of the regions."""
    arrays = [
        array_of_runs(
            region.address + start, nbytes, (region.blocks,), (region.stride,)
        )
        for region in regions
        for start, nbytes in pieces(region.nbytes)
    ]

    def zero(ids: Ids) -> None:
        for array in arrays:
            array[ids] = np.zeros((), array.dtype)

    return zero
