"""Memory that others own, as numpy arrays of runs of bytes.

numpy moves an item with one memcpy, wherever it starts and however odd its length. It
leaves the GIL for an assignment of 500 items or more, whatever their size: long runs
are rows of short items, at no loss of speed.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

CHUNK_BYTES: Final = 16 << 20
"""Bytes of one assignment. numpy gathers into a temporary before it scatters:
glibc's malloc keeps memory of up to 32 MiB for the next one, while more is faulted in
anew each time, at half the speed or less. Chunks that fit a cache are 5 % faster but
return to the GIL far more often."""


ITEM_BYTES: Final = 4096
"""Of the items of a long run: an assignment that keeps the GIL moves at most 2 MiB."""


def pieces(nbytes: int) -> list[tuple[int, int]]:
    """A run in pieces for `array_of_runs`: where each begins, and its bytes."""
    rest = nbytes % ITEM_BYTES
    parts = [(0, nbytes - rest), (nbytes - rest, rest)]
    return [(start, length) for start, length in parts if length]


def array_of_runs(
    address: int, nbytes: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> npt.NDArray[np.void]:
    """An array of runs, with one more axis for the items of a run.

    Args:
        address: of the first run.
        nbytes: of a run, one of `pieces`.
        shape: of the array of runs.
        strides: of the same, in bytes.
    """
    item = min(nbytes, ITEM_BYTES)
    shape, strides = (*shape, nbytes // item), (*strides, item)
    return np.asarray(_ArrayInterface(address, item, shape, strides))


class _ArrayInterface:
    """How numpy is told of memory by its address."""

    def __init__(
        self,
        address: int,
        nbytes: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
    ) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (address, False),
            "typestr": f"|V{nbytes}",
            "shape": shape,
            "strides": strides,
        }
