"""Writing new tokens into the caches of a layer, in host memory.

The twin of `cache_write.py` for CPU tensors, and the checks that both make. A token
with *slot* s goes to block s // tokens, place s % tokens of the cache view; slot -1
means that the token is not written (padding, another rank's token, a rejected draft).
No slot may come twice: which token would stay is undefined.

A cache of the tokens' own dtype gets their bytes. Any other gets round(x / scale),
computed in fp32, by the rules of `records.round_to`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvplugin.kernels.records import (
    FLOATS,
    RECORD_BYTES,
    check_latent,
    pack_ds_mla,
    round_to,
)

Pair: TypeAlias = tuple[Tensor, Tensor]
"""Tokens [T, heads, dim] and the view [blocks, tokens, heads, dim] they go to."""

ROUNDED: Final = (*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
"""What tokens of another dtype can be rounded to."""

Encode: TypeAlias = Callable[..., Tensor]
CHUNK_VALUES: Final = 1 << 17
"""Rounded at once: fp32 temporaries of 512 KiB stay in the cache and in memory that
malloc keeps. Those of 16 MiB are faulted in anew, at a sixth of the speed (a Xeon with
AVX-512, one thread, bf16 to e4m3, November 2026)."""


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write keys and values of T tokens at their slots.

    Args:
        key: [T, heads, dim], any strides but dim's, which is contiguous.
        value: [T, heads, value dim], likewise, of the same dtype.
        key_cache: [blocks, tokens, heads, dim], any strides but dim's: NHD, HND, or
            a slice of rows that hold keys and values.
        value_cache: [blocks, tokens, heads, value dim], likewise; same dtype.
        slots: int64 [T], -1 to skip, otherwise distinct.
        k_scale: of a cache that needs rounding (bf16, fp16 or fp32 tokens; bf16,
            fp16, fp32, fp8 or int8 caches); 1.0 where bytes move. A number: to read
            a tensor would mean to wait for its device.
        v_scale: likewise.

    Raises:
        ValueError: shapes, dtypes, strides or devices do not fit, a scale is not
            usable, or a slot is outside of the cache.
    """
    check_kv(key, value, key_cache, value_cache, slots, (k_scale, v_scale))
    places = _Places(slots, key_cache)
    pairs = fold_heads((key, key_cache), (value, value_cache))
    for (rows, cache), scale in zip(pairs, (k_scale, v_scale), strict=True):
        moved = rows.dtype == cache.dtype
        places.write([rows], cache, None if moved else _rounding(scale, cache.dtype))


def write_latent(
    kv_c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor, *, scale: float = 1.0
) -> None:
    """Write MLA tokens, the latent and the rotary part one after the other.

    Args:
        kv_c: [T, latent], contiguous in its last dimension.
        k_pe: [T, rope], likewise, of the same dtype.
        cache: [blocks, tokens, latent + rope], likewise.
        slots: int64 [T], -1 to skip, otherwise distinct.
        scale: as in `write_kv`, of both parts.

    Raises:
        ValueError: as `write_kv`.
    """
    write_kv(*latent_as_kv(kv_c, k_pe, cache), slots, k_scale=scale, v_scale=scale)


def write_ds_mla(kv_c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write MLA tokens as records of `fp8_ds_mla`.

    Args:
        kv_c: [T, 512], bf16, fp16 or fp32, contiguous in its last dimension.
        k_pe: [T, 64], likewise; rounded to bf16.
        cache: uint8 [blocks, tokens, 656], likewise.
        slots: int64 [T], -1 to skip, otherwise distinct.

    Raises:
        ValueError: as `write_kv`.
    """
    check_ds_mla(kv_c, k_pe, cache, slots)
    places = _Places(slots, cache)
    places.write([kv_c, k_pe], cache, pack_ds_mla)


def check_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    scales: tuple[float, float],
) -> None:
    """What `write_kv` takes, all but the slots' values: ValueError otherwise."""
    _check_dim("key", key, 3)
    _check_dim("value", value, 3)
    _check_dim("key_cache", key_cache, 4)
    _check_dim("value_cache", value_cache, 4)
    _check_pair("key", key, key_cache)
    _check_pair("value", value, value_cache)
    for name, a, b in (("", key, value), ("_cache", key_cache, value_cache)):
        if a.dtype != b.dtype:
            raise ValueError(f"key{name} is {a.dtype} but value{name} is {b.dtype}")
        if a.shape[:2] != b.shape[:2]:
            raise ValueError(
                f"key{name} {list(a.shape)} and value{name} {list(b.shape)} differ "
                "before their last dimension"
            )
    _check_dtypes(key.dtype, key_cache.dtype, scales)
    _check_slots(slots, len(key))
    _check_devices(key, value, key_cache, value_cache, slots)


def check_ds_mla(kv_c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor) -> None:
    """What `write_ds_mla` takes, all but the slots' values: ValueError otherwise."""
    check_latent(kv_c, k_pe)
    _check_dim("kv_c", kv_c, 2)
    _check_dim("k_pe", k_pe, 2)
    _check_dim("cache", cache, 3)
    if cache.dtype != torch.uint8 or cache.shape[2] != RECORD_BYTES:
        raise ValueError(
            f"an fp8_ds_mla cache must be uint8 [blocks, tokens, {RECORD_BYTES}], not "
            f"{cache.dtype} {list(cache.shape)}"
        )
    if kv_c.dtype != k_pe.dtype:
        raise ValueError(f"kv_c is {kv_c.dtype} but k_pe is {k_pe.dtype}")
    _check_slots(slots, len(kv_c))
    _check_devices(kv_c, k_pe, cache, slots)


def latent_as_kv(
    kv_c: Tensor, k_pe: Tensor, cache: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The arguments of `write_kv` that put both parts side by side, in one head.

    Raises:
        ValueError: the shapes do not fit.
    """
    _check_dim("kv_c", kv_c, 2)
    _check_dim("k_pe", k_pe, 2)
    _check_dim("cache", cache, 3)
    latent, rope = kv_c.shape[1], k_pe.shape[1]
    if cache.shape[2] != latent + rope:
        raise ValueError(
            f"cache rows of {cache.shape[2]} do not hold kv_c's {latent} and k_pe's "
            f"{rope} values"
        )
    return (
        kv_c.unsqueeze(1),
        k_pe.unsqueeze(1),
        cache[..., :latent].unsqueeze(2),
        cache[..., latent:].unsqueeze(2),
    )


def fold_heads(*pairs: Pair) -> tuple[Pair, ...]:
    """The same elements as one long head, if every token's heads are contiguous."""
    pairs = tuple((_unit_stride(rows), _unit_stride(cache)) for rows, cache in pairs)
    if all(
        t.shape[-2] == 1 or t.stride(-2) == t.shape[-1] for pair in pairs for t in pair
    ):
        return tuple(
            (rows.flatten(1).unsqueeze(1), cache.flatten(2).unsqueeze(2))
            for rows, cache in pairs
        )
    return pairs


def _unit_stride(tensor: Tensor) -> Tensor:
    """The same tensor; where its last dimension is one value, any stride is right, and
    views of bytes want this one."""
    if tensor.shape[-1] != 1 or tensor.stride(-1) == 1:
        return tensor
    return tensor.as_strided(tensor.shape, (*tensor.stride()[:-1], 1))


def _check_dim(name: str, tensor: Tensor, dims: int) -> None:
    if tensor.dim() != dims:
        raise ValueError(
            f"{name} must have {dims} dimensions, not shape {list(tensor.shape)}"
        )
    if 0 in tensor.shape[1:]:
        raise ValueError(f"{name} of shape {list(tensor.shape)} has no elements")
    if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise ValueError(
            f"{name}'s last dimension must be contiguous, not of stride "
            f"{tensor.stride(-1)}"
        )


def _check_pair(name: str, rows: Tensor, cache: Tensor) -> None:
    if rows.shape[1:] != cache.shape[2:]:
        raise ValueError(
            f"{name} {list(rows.shape)} and {name}_cache {list(cache.shape)} differ in "
            "heads or dim"
        )


def _check_dtypes(
    source: torch.dtype, target: torch.dtype, scales: tuple[float, float]
) -> None:
    if source == target:
        if scales != (1.0, 1.0):
            raise ValueError(
                f"tokens and cache are both {source}, so bytes move as they are: the "
                f"scales must be 1.0, not {scales}"
            )
        return
    if source not in FLOATS or target not in ROUNDED:
        hint = "; view the bytes as the fp8 dtype they hold"
        raise ValueError(
            f"tokens of {source} can't be written to a cache of {target}"
            + hint * (target == torch.uint8)
        )
    smallest = torch.finfo(torch.float32).tiny
    largest = torch.finfo(torch.float32).max
    for scale in scales:
        if not (math.isfinite(scale) and smallest <= scale <= largest):
            raise ValueError(f"scale {scale} is not a positive, normal fp32 number")


def _check_slots(slots: Tensor, tokens: int) -> None:
    if slots.dtype != torch.int64 or slots.shape != (tokens,):
        raise ValueError(
            f"slots must be int64 [{tokens}], one a token, not {slots.dtype} "
            f"{list(slots.shape)}"
        )
    if tokens > 1 and slots.stride(0) != 1:
        raise ValueError(f"slots must be contiguous, not of stride {slots.stride(0)}")


def _check_devices(*tensors: Tensor) -> None:
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"all tensors must be on one device, not on {names}")


class _Places:
    """Where tokens go; ValueError for a slot outside of the cache."""

    def __init__(self, slots: Tensor, cache: Tensor) -> None:
        blocks, tokens = cache.shape[:2]
        ids: npt.NDArray[np.int64] = slots.numpy()
        for extreme in (int(ids.min()), int(ids.max())) if len(ids) else ():
            if not -1 <= extreme < blocks * tokens:
                raise ValueError(
                    f"slot {extreme} is out of range: a cache of {blocks} blocks of "
                    f"{tokens} tokens has 0 to {blocks * tokens - 1}, and -1 skips"
                )
        self._written = ids >= 0
        self._blocks, self._offsets = np.divmod(ids, tokens)

    def write(
        self, rows: Sequence[Tensor], cache: Tensor, encode: Encode | None = None
    ) -> None:
        """Write what `encode` makes of the rows, or their bytes; a chunk at once."""
        target = _runs(cache)
        count = len(self._written)
        step = max(1, CHUNK_VALUES // rows[0].shape[1:].numel()) if encode else count
        for start in range(0, count, max(1, step)):
            chunk = slice(start, start + step)
            values = [part[chunk] for part in rows]
            items = _runs(encode(*values) if encode else values[0])
            written = self._written[chunk]
            if not written.all():
                items = items[written]
            blocks, offsets = self._blocks[chunk], self._offsets[chunk]
            target[blocks[written], offsets[written]] = items


def _rounding(scale: float, dtype: torch.dtype) -> Encode:
    divisor = float(np.float32(scale))
    return lambda rows: round_to(rows.float() / divisor, dtype)


def _runs(tensor: Tensor) -> npt.NDArray[np.void]:
    """All dimensions but the last one, whose values become one item."""
    raw: npt.NDArray[np.uint8] = tensor.detach().view(torch.uint8).numpy()
    return raw.view(f"V{raw.shape[-1]}")[..., 0]
