"""Copies of KV blocks by a GPU: between its pools, and from and to pinned host memory.

The device twin of `host.py`. Regions are addresses, so that memory of the host which
the device can read (pinned, or registered with it) is as good as its own, on either
side. Bytes move as they are: dtypes do not matter.
"""

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl

from kvplugin.kernels.region import Region, check_sides, join_neighbours
from kvplugin.kernels.words import (
    PROGRAMS,
    TILE_UNITS,
    Decorator,
    DeviceIds,
    access_bytes,
    on,
    pairs_on,
    pieces,
    pointer,
    programs,
    table_on,
    tile,
)

__all__ = ["DeviceBlockCopier", "copy_batch"]

BATCH_SHARE: Final = 64
"""Programs that share one entry of a batch, at most."""

_blocks_kernel: Decorator = triton.jit(
    do_not_specialize=["items", "rows"],
    do_not_specialize_on_alignment=["table", "source_ids", "target_ids"],
)
_batch_kernel: Decorator = triton.jit(
    do_not_specialize=["entries", "share"],
    do_not_specialize_on_alignment=["sources", "targets", "sizes"],
)


class DeviceBlockCopier:
    """Copies blocks from one list of regions to another, any strides, in one launch.

    Region i of the sources goes to region i of the targets; a block has its id in
    all regions of its side. The copier keeps addresses, not memory: the caller keeps
    both sides alive until the copy has ended on the device.

    All regions move in accesses of one width, the widest that every address, stride
    and size allows: 16 bytes for any page of a KV cache. A region that is not aligned
    slows the others down and deserves a copier of its own.

    The kernel is compiled here; `copy` never compiles.

    Args:
        sources: where blocks are read.
        targets: where they are written; must not overlap the source blocks of a job.
        device: where the kernel runs.

    Raises:
        ValueError: the sides differ in length or in a region's bytes, or are empty.
    """

    def __init__(
        self,
        sources: Sequence[Region],
        targets: Sequence[Region],
        device: torch.device,
    ) -> None:
        check_sides(sources, targets)
        self._source_blocks = min(region.blocks for region in sources)
        self._target_blocks = min(region.blocks for region in targets)
        self._block_bytes = sum(region.nbytes for region in sources)
        sides = [
            (s.address, s.stride, t.address, t.stride, s.nbytes)
            for s, t in join_neighbours(zip(sources, targets, strict=True))
        ]
        self._unit = access_bytes(*(number for row in sides for number in row))
        rows = [
            (source + offset, source_step, target + offset, target_step, count)
            for source, source_step, target, target_step, nbytes in sides
            for offset, count in pieces(nbytes, self._unit)
        ]
        self._table = table_on(device, rows, self._unit)
        none = self._table.new_empty(0)
        self._launch(none, none)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all regions."""
        return self._block_bytes

    def copy(self, source_ids: DeviceIds, target_ids: DeviceIds) -> int:
        """Copy block source_ids[i] to block target_ids[i], for every i.

        The copy is launched on the device's current stream and not waited for. Blocks
        are copied in no particular order; nothing is copied unless all ids are good.

        Args:
            source_ids: flat; an id may appear more than once. An int64 tensor on the
                device is not checked, and must hold good ids.
            target_ids: likewise, and as many, each at most once.

        Returns:
            The bytes that will be copied; 0 for no ids.

        Raises:
            ValueError: ids are not flat lists of integers of one length, or, in host
                memory, are out of range or a target id is repeated.
        """
        sources, targets = pairs_on(
            self._table.device,
            source_ids,
            target_ids,
            self._source_blocks,
            self._target_blocks,
        )
        if len(sources):
            self._launch(sources, targets)
        return len(sources) * self._block_bytes

    def _launch(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        rows = len(self._table)
        items = len(sources) * rows
        with on(self._table.device):
            _copy_blocks[programs(items)](
                self._table, sources, targets, items, rows, **tile(self._unit)
            )


def copy_batch(
    sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor
) -> None:
    """Copy sizes[i] bytes from address sources[i] to address targets[i].

    Nothing needs to be aligned. Where both addresses of an entry are equal modulo 16,
    all but up to 15 bytes at each end moves in accesses of 16 bytes; else in accesses
    of 4 or 1, whichever both agree on. The copy is launched on the current stream of
    the tensors' device and not waited for; the tensors' contents are not checked.

    Args:
        sources: int64 [n], addresses that the device can read.
        targets: int64 [n], addresses that it can write; no two entries overlap.
        sizes: int64 [n], bytes; 0 copies nothing.

    Raises:
        ValueError: the tensors are not flat, int64, of one length and on one device.
    """
    batch = (sources, targets, sizes)
    if (
        any(t.ndim != 1 or t.dtype != torch.int64 for t in batch)
        or len({(t.shape, t.device) for t in batch}) != 1
    ):
        shown = ", ".join(f"{t.dtype} {tuple(t.shape)} on {t.device}" for t in batch)
        raise ValueError(
            "sources, targets and sizes must be flat int64 tensors of one length on "
            f"one device, not {shown}"
        )
    entries = len(sizes)
    if not entries:
        return
    share = max(1, min(BATCH_SHARE, PROGRAMS // entries))
    with on(sizes.device):
        _copy_entries[programs(entries * share)](
            *(t.contiguous() for t in batch), entries, share, units=TILE_UNITS
        )


@_blocks_kernel
def _copy_blocks(
    table: tl.tensor,
    source_ids: tl.tensor,
    target_ids: tl.tensor,
    items: tl.tensor,
    rows: tl.tensor,
    unit: tl.constexpr,
    element: tl.constexpr,
    per: tl.constexpr,
    units: tl.constexpr,
) -> None:
    """An item is one piece of one pair of blocks.

    Rows of the table: source address, source stride, target address, target stride,
    length, all in units.
    """
    lane = tl.arange(0, units)
    index = lane[:, None] * per + tl.arange(0, per)[None, :]
    first = tl.program_id(0).to(tl.int64)
    for item in range(first, items, tl.num_programs(0)):
        pair = item // rows
        row = table + item % rows * 5
        source = tl.load(row) + tl.load(source_ids + pair) * tl.load(row + 1)
        target = tl.load(row + 2) + tl.load(target_ids + pair) * tl.load(row + 3)
        inside = (lane < tl.load(row + 4))[:, None]
        words = tl.load(pointer(source, unit, element) + index, mask=inside)
        tl.store(pointer(target, unit, element) + index, words, mask=inside)


@_batch_kernel
def _copy_entries(
    sources: tl.tensor,
    targets: tl.tensor,
    sizes: tl.tensor,
    entries: tl.tensor,
    share: tl.tensor,
    units: tl.constexpr,
) -> None:
    """`share` programs go through the entries together and take turns in each."""
    program = tl.program_id(0)
    turn = (program % share).to(tl.int64)
    for entry in range(program // share, entries, tl.num_programs(0) // share):
        source = tl.load(sources + entry)
        target = tl.load(targets + entry)
        nbytes = tl.load(sizes + entry)
        shift = source - target
        if shift % 16 == 0:
            _copy_span(source, target, nbytes, turn, share, 16, tl.int64, 2, units)
        elif shift % 4 == 0:
            _copy_span(source, target, nbytes, turn, share, 4, tl.int32, 1, units)
        else:
            _copy_span(source, target, nbytes, turn, share, 1, tl.int8, 1, units)


@triton.jit  # type: ignore[untyped-decorator]
def _copy_span(
    source: tl.tensor,
    target: tl.tensor,
    nbytes: tl.tensor,
    turn: tl.tensor,
    share: tl.tensor,
    unit: tl.constexpr,
    element: tl.constexpr,
    per: tl.constexpr,
    units: tl.constexpr,
) -> None:
    """Bytes up to the first unit, whole units in tiles, and the bytes that are left."""
    head = tl.minimum((unit - source % unit) % unit, nbytes)
    middle = (nbytes - head) // unit
    words = pointer((source + head) // unit, unit, element)
    copies = pointer((target + head) // unit, unit, element)
    for start in range(turn * units, middle, share * units):
        lane = start + tl.arange(0, units)
        inside = (lane < middle)[:, None]
        index = lane[:, None] * per + tl.arange(0, per)[None, :]
        tl.store(copies + index, tl.load(words + index, mask=inside), mask=inside)
    if unit > 1 and turn == 0:
        _copy_few(source, target, head, unit)
        done = head + middle * unit
        _copy_few(source + done, target + done, nbytes - done, unit)


@triton.jit  # type: ignore[untyped-decorator]
def _copy_few(
    source: tl.tensor, target: tl.tensor, nbytes: tl.tensor, limit: tl.constexpr
) -> None:
    """Less than `limit` bytes."""
    byte = tl.arange(0, limit)
    inside = byte < nbytes
    content = tl.load(source.to(tl.pointer_type(tl.int8)) + byte, mask=inside)
    tl.store(target.to(tl.pointer_type(tl.int8)) + byte, content, mask=inside)
