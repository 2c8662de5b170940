"""The numba engine of `host_zero.py`: a whole job in one call without the GIL.

Importing this module compiles it, or reads it from numba's cache on disk.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numba
import numpy as np

from kvplugin.kernels._numba_memory import compile_job
from kvplugin.kernels.region import Ids, Region

_memset = numba.types.ExternalFunction(
    "memset",
    numba.types.intp(numba.types.intp, numba.types.intc, numba.types.intp),
)


def _zero_blocks(table: Ids, ids: Ids) -> None:
    for i in range(len(ids)):
        for region in range(len(table)):
            address = table[region, 0] + ids[i] * table[region, 1]
            _memset(address, 0, table[region, 2])


_zero: Final = compile_job(
    _zero_blocks,
    "void(int64[:, ::1], int64[::1])",
    np.empty((0, 3), np.int64),
    np.empty(0, np.int64),
)


def bind(regions: Sequence[Region]) -> Callable[[Ids], None]:
    """A function that zeroes blocks of the regions."""
    rows = [(region.address, region.stride, region.nbytes) for region in regions]
    table = np.array(rows, dtype=np.int64)
    return lambda ids: _zero(table, ids)
