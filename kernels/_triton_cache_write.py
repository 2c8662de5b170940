"""The kernels that `cache_write.py` launches."""

from typing import Final

import triton
import triton.language as tl

from kvplugin.kernels.casts import is_nan, magnitude, narrow, widen
from kvplugin.kernels.records import (
    LATENT,
    ROPE,
    ROPE_AT,
    SCALES_AT,
    SMALLEST_SCALE,
    TILE,
)
from kvplugin.kernels.words import Decorator

# A kernel reads globals only if they are `constexpr`.
_TILES: Final = tl.constexpr(LATENT // TILE)
_TILE: Final = tl.constexpr(TILE)
_ROPE: Final = tl.constexpr(ROPE)
_SCALES_AT: Final = tl.constexpr(SCALES_AT)
_ROPE_AT: Final = tl.constexpr(ROPE_AT)
_SMALLEST_SCALE: Final = tl.constexpr(SMALLEST_SCALE)

_rows_kernel: Decorator = triton.jit(
    do_not_specialize=[
        "k_rows", "k_row", "k_row_head", "k_cache", "k_block", "k_place", "k_head",
        "v_rows", "v_row", "v_row_head", "v_cache", "v_block", "v_place", "v_head",
    ]
)  # fmt: skip
_records_kernel: Decorator = triton.jit(
    do_not_specialize=[
        "kv_c",
        "kv_c_row",
        "k_pe",
        "k_pe_row",
        "cache",
        "block",
        "place",
    ]
)


@_rows_kernel
def write_rows(
    slots: tl.tensor,
    k_rows: tl.int64,
    k_row: tl.int64,
    k_row_head: tl.int64,
    k_cache: tl.int64,
    k_block: tl.int64,
    k_place: tl.int64,
    k_head: tl.int64,
    v_rows: tl.int64,
    v_row: tl.int64,
    v_row_head: tl.int64,
    v_cache: tl.int64,
    v_block: tl.int64,
    v_place: tl.int64,
    v_head: tl.int64,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    tokens: tl.constexpr,
    heads: tl.constexpr,
    k_dim: tl.constexpr,
    v_dim: tl.constexpr,
    head_tile: tl.constexpr,
    dim_tile: tl.constexpr,
    source: tl.constexpr,
    target: tl.constexpr,
    loaded: tl.constexpr,
    stored: tl.constexpr,
    read_align: tl.constexpr,
    write_align: tl.constexpr,
) -> None:
    """One tile of one token, of the keys and of the values.

    Strides are in elements of `loaded` and `stored`, which are words where `source`
    is None, and the formats' elements otherwise.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        block, place = slot // tokens, slot % tokens
        k_read = k_rows.to(tl.pointer_type(loaded)) + token * k_row
        k_write = (
            k_cache.to(tl.pointer_type(stored)) + block * k_block + place * k_place
        )
        _write_tile(
            k_read, k_row_head, k_write, k_head, k_scale,
            heads, k_dim, head_tile, dim_tile, source, target, read_align, write_align,
        )  # fmt: skip
        v_read = v_rows.to(tl.pointer_type(loaded)) + token * v_row
        v_write = (
            v_cache.to(tl.pointer_type(stored)) + block * v_block + place * v_place
        )
        _write_tile(
            v_read, v_row_head, v_write, v_head, v_scale,
            heads, v_dim, head_tile, dim_tile, source, target, read_align, write_align,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _write_tile(
    read: tl.tensor,
    read_head: tl.tensor,
    write: tl.tensor,
    write_head: tl.tensor,
    scale: tl.tensor,
    heads: tl.constexpr,
    dim: tl.constexpr,
    head_tile: tl.constexpr,
    dim_tile: tl.constexpr,
    source: tl.constexpr,
    target: tl.constexpr,
    read_align: tl.constexpr,
    write_align: tl.constexpr,
) -> None:
    dim_tiles: tl.constexpr = (dim + dim_tile - 1) // dim_tile
    tile = tl.program_id(1)
    head = tile // dim_tiles * head_tile + tl.arange(0, head_tile)
    within = (tile % dim_tiles * dim_tile + tl.arange(0, dim_tile))[None, :]
    mask = (head < heads)[:, None] & (within < dim)
    head = head.to(tl.int64)
    # The hints must stand on the rows' pointers: alignment is not followed to them.
    reads = tl.multiple_of(read + head * read_head, read_align)[:, None] + within
    writes = tl.multiple_of(write + head * write_head, write_align)[:, None] + within
    values = tl.load(reads, mask=mask)
    if source is not None:
        values = narrow(tl.div_rn(widen(values, source), scale), target)
    tl.store(writes, values, mask=mask)


@_records_kernel
def write_records(
    slots: tl.tensor,
    kv_c: tl.int64,
    kv_c_row: tl.int64,
    k_pe: tl.int64,
    k_pe_row: tl.int64,
    cache: tl.int64,
    block: tl.int64,
    place: tl.int64,
    tokens: tl.constexpr,
    source: tl.constexpr,
    loaded: tl.constexpr,
    read_align: tl.constexpr,
    write_align: tl.constexpr,
) -> None:
    """One token's record: see `records.py`."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        latent = kv_c.to(tl.pointer_type(loaded)) + token * kv_c_row
        rope = k_pe.to(tl.pointer_type(loaded)) + token * k_pe_row
        record = cache.to(tl.pointer_type(tl.uint8))
        record += slot // tokens * block + slot % tokens * place
        record = tl.multiple_of(record, write_align)
        row = tl.arange(0, _TILES)
        at = row[:, None] * _TILE + tl.arange(0, _TILE)[None, :]
        x = widen(tl.load(tl.multiple_of(latent, read_align) + at), source)
        # A NaN has no say in the scale.
        largest = tl.max(tl.where(is_nan(x), 0, magnitude(x)), axis=1)
        scales = tl.div_rn(largest.to(tl.float32, bitcast=True), 448.0)
        scales = tl.maximum(scales, _SMALLEST_SCALE)
        tl.store(record + at, narrow(tl.div_rn(x, scales[:, None]), "e4m3"))
        pe_at = tl.arange(0, _ROPE)
        pe = widen(tl.load(tl.multiple_of(rope, read_align) + pe_at), source)
        codes = narrow(pe, "bf16")
        scale_bits = scales.to(tl.int32, bitcast=True)
        if write_align >= 4:
            words = tl.pointer_type(tl.int32)
            tl.store((record + _SCALES_AT).to(words) + row, scale_bits)
            halves = tl.pointer_type(tl.int16)
            tl.store((record + _ROPE_AT).to(halves) + pe_at, codes)
        else:
            _store_bytes(record + _SCALES_AT, scale_bits, row, 4)
            _store_bytes(record + _ROPE_AT, codes.to(tl.int32), pe_at, 2)


@triton.jit  # type: ignore[untyped-decorator]
def _store_bytes(
    write: tl.tensor, codes: tl.tensor, at: tl.tensor, size: tl.constexpr
) -> None:
    """Store integers byte by byte, little-endian, where words are not aligned."""
    byte = tl.arange(0, size)[None, :]
    parts = (codes[:, None] >> (byte * 8)) & 0xFF
    tl.store(write + at[:, None] * size + byte, parts.to(tl.uint8))
