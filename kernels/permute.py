"""Copies that reorder: a GPU executes the plans of `kvplugin.layout`.

NHD <-> HND, larger <-> smaller blocks, and slices of heads, each row of a token and
head moved to where the other layout wants it. The device twin of `host_convert.py`.
"""

from collections.abc import Iterator
from typing import Final

import torch
import triton
import triton.language as tl

from kvplugin.kernels.host_convert import chunk_counts
from kvplugin.kernels.words import (
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
from kvplugin.layout import Axis, Box, Conversion

__all__ = ["DeviceBlockConverter"]

MAX_UNITS: Final = 1 << 30
"""Units of a box, at most: a kernel counts them in 32 bits."""

_kernel: Decorator = triton.jit(
    do_not_specialize=["items", "rows", "source_chunks", "target_chunks"],
    do_not_specialize_on_alignment=["table", "source_ids", "target_ids"],
)


class DeviceBlockConverter:
    """Carries chunks of one layout into chunks of another, in one launch.

    A piece is not a row but as many units as a program moves at once, in the order in
    which the target has them: rows of 64 bytes keep all threads as busy as rows of
    8 KiB. A thread finds its row, and the row's place, by two divisions.

    As with a copier, the caller keeps both sides alive, everything moves in accesses
    of one width, and the kernel is compiled here.

    Args:
        conversion: what goes where, in offsets from the two addresses.
        source_address: of the source's KV memory; the device can read it.
        target_address: of the target's, which must not overlap; it can write it.
        device: where the kernel runs.

    Raises:
        ValueError: an address is not positive, a side has more than `MAX_BLOCKS`
            chunks, or a chunk has too many bytes to be counted in 32 bits.
    """

    def __init__(
        self,
        conversion: Conversion,
        source_address: int,
        target_address: int,
        device: torch.device,
    ) -> None:
        self._source_count, self._target_count = chunk_counts(
            conversion, source_address, target_address
        )
        self._conversion = conversion
        boxes = [_steps(b, source_address, target_address) for b in conversion.boxes]
        runs = [box.nbytes for box in conversion.boxes]
        self._unit = access_bytes(*runs, *(step for box in boxes for step in box))
        self._check_sizes()
        self._table = table_on(
            device,
            (
                row
                for box, steps in zip(conversion.boxes, boxes, strict=True)
                for row in _rows(box, steps, self._unit)
            ),
        )
        none = self._table.new_empty(0)
        self._launch(none, none)

    @property
    def chunk_bytes(self) -> int:
        """Bytes that move with one chunk."""
        return self._conversion.chunk_bytes

    def convert(self, source_chunks: DeviceIds, target_chunks: DeviceIds) -> int:
        """Carry chunk source_chunks[i] to chunk target_chunks[i], for every i.

        The work is launched on the device's current stream and not waited for.

        Args:
            source_chunks: flat, as `Conversion.pair_chunks` gives them; one may appear
                more than once. An int64 tensor on the device is not checked, and must
                hold good ids.
            target_chunks: likewise, and as many, each at most once.

        Returns:
            The bytes that will be moved; 0 for no chunks.

        Raises:
            ValueError: ids are not flat lists of integers of one length, or, in host
                memory, are out of range or a target id is repeated.
        """
        sources, targets = pairs_on(
            self._table.device,
            source_chunks,
            target_chunks,
            self._source_count,
            self._target_count,
            "chunks",
        )
        if len(sources):
            self._launch(sources, targets)
        return len(sources) * self.chunk_bytes

    def _check_sizes(self) -> None:
        largest = max(box.total_bytes for box in self._conversion.boxes)
        if largest // self._unit >= MAX_UNITS:
            raise ValueError(
                f"a chunk of {self.chunk_bytes} bytes is too large to be moved "
                f"{self._unit} bytes at a time: use smaller blocks"
            )

    def _launch(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        rows = len(self._table)
        items = len(sources) * rows
        with on(self._table.device):
            _convert_chunks[programs(items)](
                self._table,
                sources,
                targets,
                items,
                rows,
                self._conversion.source_chunks,
                self._conversion.target_chunks,
                **tile(self._unit),
            )


def _steps(box: Box, source_address: int, target_address: int) -> tuple[int, ...]:
    """Address, block, chunk, outer and inner stride of the source, then the target."""
    outer, inner = ((Axis(1, 0, 0),) * 2 + box.axes)[-2:]
    source, target = box.source, box.target
    return (
        source_address + source.offset,
        source.block_stride,
        source.chunk_stride,
        outer.source_stride,
        inner.source_stride,
        target_address + target.offset,
        target.block_stride,
        target.chunk_stride,
        outer.target_stride,
        inner.target_stride,
    )


def _rows(box: Box, steps: tuple[int, ...], unit: int) -> Iterator[tuple[int, ...]]:
    """The box's rows of the kernel's table, one a piece."""
    inner = box.axes[-1].extent if box.axes else 1
    for offset, nbytes in pieces(box.total_bytes, unit):
        yield (
            *(step // unit for step in steps),
            box.nbytes // unit,
            inner,
            offset // unit,
            (offset + nbytes) // unit,
        )


@_kernel
def _convert_chunks(
    table: tl.tensor,
    source_ids: tl.tensor,
    target_ids: tl.tensor,
    items: tl.tensor,
    rows: tl.tensor,
    source_chunks: tl.tensor,
    target_chunks: tl.tensor,
    unit: tl.constexpr,
    element: tl.constexpr,
    per: tl.constexpr,
    units: tl.constexpr,
) -> None:
    """An item is one piece of one pair of chunks.

    Rows of the table: `_steps`, length of a run, runs of the inner axis, first and
    last unit of the piece, the box's units counted run by run; all but the number of
    runs in units.
    """
    first = tl.program_id(0).to(tl.int64)
    for item in range(first, items, tl.num_programs(0)):
        pair = item // rows
        row = table + item % rows * 14
        length = tl.load(row + 10).to(tl.int32)
        extent = tl.load(row + 11).to(tl.int32)
        lane = tl.load(row + 12).to(tl.int32) + tl.arange(0, units)
        inside = (lane < tl.load(row + 13).to(tl.int32))[:, None]
        run = lane // length
        outer, inner, place = run // extent, run % extent, lane % length
        source, source_index = _locate(
            row, tl.load(source_ids + pair), source_chunks, outer, inner, place, per
        )
        target, target_index = _locate(
            row + 5, tl.load(target_ids + pair), target_chunks, outer, inner, place, per
        )
        words = tl.load(pointer(source, unit, element) + source_index, mask=inside)
        tl.store(pointer(target, unit, element) + target_index, words, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _locate(
    steps: tl.tensor,
    chunk: tl.tensor,
    chunks: tl.tensor,
    outer: tl.tensor,
    inner: tl.tensor,
    place: tl.tensor,
    per: tl.constexpr,
) -> tl.tensor:
    """A chunk's address in units, and each element's index from there."""
    address = tl.load(steps) + chunk // chunks * tl.load(steps + 1)
    address += chunk % chunks * tl.load(steps + 2)
    index = outer * tl.load(steps + 3) + inner * tl.load(steps + 4) + place
    return address, index[:, None] * per + tl.arange(0, per)[None, :]
