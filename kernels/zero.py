"""Zeroing of KV blocks by a GPU, before what they held can be taken for values.

The device twin of `host_zero.py`. Which blocks need it is the caller's knowledge.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvplugin.kernels.region import Region
from kvplugin.kernels.words import (
    Decorator,
    DeviceIds,
    access_bytes,
    ids_on,
    on,
    pieces,
    pointer,
    programs,
    table_on,
    tile,
)

__all__ = ["DeviceBlockZeroer"]

_kernel: Decorator = triton.jit(
    do_not_specialize=["items", "rows"],
    do_not_specialize_on_alignment=["table", "ids"],
)


class DeviceBlockZeroer:
    """Fills blocks with zero bytes in all their regions, in one launch.

    As with a copier, the caller keeps the memory alive, all regions are written in
    accesses of one width, and the kernel is compiled here.

    Args:
        regions: where a block lies; it has its id in all of them.
        device: where the kernel runs; it can write to all regions.

    Raises:
        ValueError: there are no regions.
    """

    def __init__(self, regions: Sequence[Region], device: torch.device) -> None:
        if not regions:
            raise ValueError("a zeroer needs at least one region")
        self._blocks = min(region.blocks for region in regions)
        self._block_bytes = sum(region.nbytes for region in regions)
        self._unit = access_bytes(
            *(n for r in regions for n in (r.address, r.stride, r.nbytes))
        )
        rows = [
            (region.address + offset, region.stride, nbytes)
            for region in regions
            for offset, nbytes in pieces(region.nbytes, self._unit)
        ]
        self._table = table_on(device, rows, self._unit)
        self._launch(self._table.new_empty(0))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all regions."""
        return self._block_bytes

    def zero(self, ids: DeviceIds) -> int:
        """Fill blocks with zeros; launched on the current stream and not waited for.

        Args:
            ids: flat; an id may appear more than once. An int64 tensor on the device
                is not checked, and must hold good ids.

        Returns:
            The bytes that will be written; 0 for no ids.

        Raises:
            ValueError: ids are not a flat list of integers or, in host memory, are
                out of range.
        """
        found = ids_on(self._table.device, ids, self._blocks)
        if len(found):
            self._launch(found)
        return len(found) * self._block_bytes

    def _launch(self, ids: torch.Tensor) -> None:
        rows = len(self._table)
        items = len(ids) * rows
        with on(self._table.device):
            _zero_blocks[programs(items)](
                self._table, ids, items, rows, **tile(self._unit)
            )


@_kernel
def _zero_blocks(
    table: tl.tensor,
    ids: tl.tensor,
    items: tl.tensor,
    rows: tl.tensor,
    unit: tl.constexpr,
    element: tl.constexpr,
    per: tl.constexpr,
    units: tl.constexpr,
) -> None:
    """An item is one piece of one block.

    Rows of the table: address, stride, length, all in units.
    """
    lane = tl.arange(0, units)
    index = lane[:, None] * per + tl.arange(0, per)[None, :]
    zeros = tl.zeros((units, per), element)
    first = tl.program_id(0).to(tl.int64)
    for item in range(first, items, tl.num_programs(0)):
        row = table + item % rows * 3
        address = tl.load(row) + tl.load(ids + item // rows) * tl.load(row + 1)
        inside = (lane < tl.load(row + 2))[:, None]
        tl.store(pointer(address, unit, element) + index, zeros, mask=inside)
