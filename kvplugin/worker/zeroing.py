"""Zeroing of new blocks in a worker's memory; whether it is needed and why says
`kvplugin.spec.zeroing_reasons`."""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvplugin.kernels.region import Region
from kvplugin.worker.tensors import KVTensors, LayerCache


class Zeroer(Protocol):
    """Writes zeros over blocks of regions."""

    def zero(self, ids: Sequence[int]) -> int:
        """Zero these blocks; the bytes written."""


class BlockZeroing:
    """Zeroes new blocks in all buffers of a worker.

    Args:
        tensors: the worker's memory.
        make_zeroer: the engine for the memory's device, e.g. `BlockZeroer` of
            `kvplugin.kernels.host_zero`.
    """

    def __init__(
        self,
        tensors: KVTensors,
        make_zeroer: Callable[[Sequence[Region]], Zeroer],
    ) -> None:
        self._tensors = tensors  # The zeroer keeps addresses only.
        pages = page_regions(tensors)
        self._zeroer = make_zeroer(pages) if pages else None

    def zero(self, new_block_ids_to_zero: Sequence[int]) -> int:
        """Zero the pages of these blocks, padding included, in every buffer.

        Call it before the step that gets the blocks writes to them.

        Returns:
            The bytes written.
        """
        if self._zeroer is None or not len(new_block_ids_to_zero):
            return 0
        return self._zeroer.zero(new_block_ids_to_zero)


def page_regions(tensors: KVTensors) -> list[Region]:
    """All bytes of a block in all buffers, padding included."""
    first: dict[int, LayerCache] = {}
    for cache in tensors.layers.values():
        first.setdefault(cache.buffer, cache)
    found = []
    for index, cache in sorted(first.items()):
        buffer = tensors.buffers[index]
        address, block = buffer.data_ptr(), buffer.nbytes // tensors.num_blocks
        if all(run.stride == block for run in cache.runs()):
            found.append(Region(address, block, block, tensors.num_blocks))
        else:
            # Keys before values, or heads before blocks: alike in every layer here.
            found += [
                Region(address + run.offset, run.stride, run.nbytes, tensors.num_blocks)
                for run in cache.runs()
            ]
    return found
