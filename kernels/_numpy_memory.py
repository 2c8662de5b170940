"""Memory that others own, as numpy arrays whose items are whole runs of bytes.

numpy moves such an item with one memcpy, wherever it starts and however odd its
length, and leaves the GIL for all of an assignment.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

CHUNK_BYTES: Final = 16 << 20
"""Bytes of one assignment. numpy gathers into a temporary before it scatters:
glibc's malloc keeps memory of up to 32 MiB for the next one, while more is faulted in
anew each time, at half the speed or less. Chunks that fit a cache are 5 % faster but
return to the GIL far more often."""


MAX_ITEM: Final = 1 << 30
"""Bytes of an item: numpy has none of 2 GiB and more."""


def pieces(nbytes: int) -> list[tuple[int, int]]:
    """A run in pieces that can be items: where each begins, and its bytes."""
    return [
        (start, min(MAX_ITEM, nbytes - start)) for start in range(0, nbytes, MAX_ITEM)
    ]


def array_of_runs(
    address: int, nbytes: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> npt.NDArray[np.void]:
    """An array of runs of `nbytes`; strides in bytes."""
    return np.asarray(_ArrayInterface(address, nbytes, shape, strides))


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
