"""The numba engine of `host_convert.py`: a whole job in one call without the GIL.

Importing this module compiles it, or reads it from numba's cache on disk.

A streamed store writes its line without reading it first, so where rows are whole
lines the order of writing costs nothing, and the loops follow the source: processors
prefetch what is read upwards. Rows that share lines are written upwards instead, in
narrower streamed stores: a line that is left half written for too long goes to memory
in pieces. Measured, as shares of one contiguous copy: 128 MiB in random order, blocks
of 16 tokens from NHD to HND (EPYC with AVX-512, two busy cores, November 2026):

    heads, row      order   streamed   memcpy
    8, 256 bytes    source     188 %    109 %
    8, 256 bytes    target     108 %     81 %
    32, 160 bytes   source      78 %     74 %
    32, 160 bytes   target     192 %    100 %
    32, 48 bytes    source      25 %     75 %
    32, 48 bytes    target      85 %     60 %

Where a job fits the caches, plain stores are as wide, and up to a third faster than a
memcpy a row.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvplugin.kernels._numba_memory import (
    LINE_BYTES,
    STREAM_PIECE_BYTES,
    compile_job,
    copy_run,
    fence,
    jit,
    store_of,
    streams,
)
from kvplugin.kernels.region import Copy, Ids
from kvplugin.layout import Axis, Box, Conversion

NARROWEST_BYTES: Final = 16
"""Rows whose size and target are not multiples of it go through memcpy."""

_stream_64 = store_of(64, streamed=True)
_stream_32 = store_of(32, streamed=True)
_stream_16 = store_of(16, streamed=True)
_store_64 = store_of(64, streamed=False)
_store_32 = store_of(32, streamed=False)
_store_16 = store_of(16, streamed=False)


@jit
def _copy_row(
    target: int, source: int, nbytes: int, width: int, streamed: bool
) -> None:
    """Copy one row in stores of `width` bytes, 0 for whatever fits.

    The choice is the same for all rows of a box, which a processor soon predicts.
    """
    if width == 0:
        copy_run(target, source, nbytes, streamed)
    elif width == 64:
        for at in range(0, nbytes, 64):
            if streamed:
                _stream_64(target + at, source + at)
            else:
                _store_64(target + at, source + at)
    elif width == 32:
        for at in range(0, nbytes, 32):
            if streamed:
                _stream_32(target + at, source + at)
            else:
                _store_32(target + at, source + at)
    else:
        for at in range(0, nbytes, 16):
            if streamed:
                _stream_16(target + at, source + at)
            else:
                _store_16(target + at, source + at)


def _convert_chunks(
    table: Ids,
    source_chunks: int,
    target_chunks: int,
    source_ids: Ids,
    target_ids: Ids,
    streamed: bool,
) -> None:
    for pair in range(len(target_ids)):
        source_block, source_place = divmod(source_ids[pair], source_chunks)
        target_block, target_place = divmod(target_ids[pair], target_chunks)
        for box in range(len(table)):
            row = table[box]
            source = row[0] + source_block * row[1] + source_place * row[2]
            target = row[3] + target_block * row[4] + target_place * row[5]
            outer, outer_source, outer_target = row[6], row[7], row[8]
            inner, inner_source, inner_target = row[9], row[10], row[11]
            nbytes, width = row[12], row[13]
            for i in range(outer):
                for j in range(inner):
                    _copy_row(
                        target + i * outer_target + j * inner_target,
                        source + i * outer_source + j * inner_source,
                        nbytes,
                        width,
                        streamed,
                    )
    fence()


_convert: Final = compile_job(
    _convert_chunks,
    "void(int64[:, ::1], int64, int64, int64[::1], int64[::1], boolean)",
    np.empty((0, 14), np.int64),
    1,
    1,
    *[np.empty(0, np.int64)] * 2,
    False,
)


def bind(conversion: Conversion, source_address: int, target_address: int) -> Copy:
    """A function that converts chunks from one memory to another."""
    table = np.array(
        [_row_of(box, source_address, target_address) for box in conversion.boxes],
        dtype=np.int64,
    )
    chunks = conversion.source_chunks, conversion.target_chunks
    chunk_bytes = conversion.chunk_bytes

    def convert(source_ids: Ids, target_ids: Ids) -> None:
        streamed = streams(len(target_ids) * chunk_bytes)
        _convert(table, *chunks, source_ids, target_ids, streamed)

    return convert


def _row_of(box: Box, source_address: int, target_address: int) -> list[int]:
    source = box.source._replace(offset=box.source.offset + source_address)
    target = box.target._replace(offset=box.target.offset + target_address)
    steps = [*target, *(axis.target_stride for axis in box.axes), box.nbytes]
    width = _width(steps)
    axes = list(box.axes)  # in order of the target
    if width in (0, LINE_BYTES):
        axes.sort(key=lambda axis: -axis.source_stride)
    outer, inner = [Axis(1, 0, 0)] * (2 - len(axes)) + axes
    return [*source, *target, *outer, *inner, box.nbytes, width]


def _width(steps: Sequence[int]) -> int:
    """The widest store that fits all of a box's targets; 0 where memcpy is better."""
    width = math.gcd(LINE_BYTES, *steps)
    return width if width >= NARROWEST_BYTES and steps[-1] < STREAM_PIECE_BYTES else 0
