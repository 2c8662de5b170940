"""Writing new tokens into the caches of a layer, in Triton; one launch a layer.

The three functions take what their twins in `host_cache_write.py` take, where the
arguments are described, on any device. What can't be checked on a device is the
slots' values: they must be -1 or inside of the cache, and none may come twice, or
memory is overwritten.

A program writes a tile of one token's heads, keys and then values. Every run of bytes
is accessed as widely as its address and strides allow, up to 16 bytes.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import triton
from torch import Tensor

from kvplugin.kernels._triton_cache_write import write_records, write_rows
from kvplugin.kernels.casts import FORMATS, STORED
from kvplugin.kernels.host_cache_write import (
    Pair,
    check_ds_mla,
    check_kv,
    fold_heads,
    latent_as_kv,
)
from kvplugin.kernels.words import access_bytes, on
from kvplugin.kernels.words import tile as words

# Not measured yet.
TILE_BYTES: Final = 4096
"""Of what a program reads for the keys at once, and again for the values."""
WARP_BYTES: Final = 1024
"""Of a tile a warp: 16 bytes a thread on AMD's, with 64 threads."""
MAX_WARPS: Final = 4


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
    """Write keys and values of T tokens at their slots; see the twin.

    Raises:
        ValueError: shapes, dtypes, strides or devices do not fit, a scale is not
            usable, or values that need rounding are not aligned to their size.
    """
    check_kv(key, value, key_cache, value_cache, slots, (k_scale, v_scale))
    if not len(slots):
        return
    pairs = fold_heads((key, key_cache), (value, value_cache))
    constants = _move(pairs) if key.dtype == key_cache.dtype else _rounding(pairs)
    numbers = [number for pair in pairs for number in _numbers(pair, constants)]
    tiles, sizes = _tiles(pairs, constants["loaded"])
    with on(key.device):
        write_rows[(len(slots), tiles)](
            slots, *numbers, float(k_scale), float(v_scale), **constants, **sizes
        )


def write_latent(
    kv_c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor, *, scale: float = 1.0
) -> None:
    """Write MLA tokens, the latent and the rotary part one after the other.

    Raises:
        ValueError: as `write_kv`.
    """
    write_kv(*latent_as_kv(kv_c, k_pe, cache), slots, k_scale=scale, v_scale=scale)


def write_ds_mla(kv_c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write MLA tokens as records of `fp8_ds_mla` (`records.py`).

    Raises:
        ValueError: as `write_kv`.
    """
    check_ds_mla(kv_c, k_pe, cache, slots)
    if not len(slots):
        return
    source = FORMATS[kv_c.dtype]
    with on(cache.device):
        write_records[(len(slots),)](
            slots,
            kv_c.data_ptr(),
            kv_c.stride(0),
            k_pe.data_ptr(),
            k_pe.stride(0),
            cache.data_ptr(),
            cache.stride(0),
            cache.stride(1),
            tokens=cache.shape[1],
            source=source,
            loaded=STORED[source],
            read_align=_aligned_to_items(kv_c, k_pe),
            write_align=_alignment(cache),
            num_warps=1,
        )


def _move(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Words, as wide as every address, stride and run of bytes allows."""
    tensors = [tensor for pair in pairs for tensor in pair]
    runs = (tensor.shape[-1] * tensor.element_size() for tensor in tensors)
    align = access_bytes(_alignment(*tensors), *runs)
    word = words(align)["element"]
    return {
        "source": None,
        "target": None,
        "loaded": word,
        "stored": word,
        "read_align": align,
        "write_align": align,
    }


def _rounding(pairs: Sequence[Pair]) -> dict[str, Any]:
    rows, caches = zip(*pairs, strict=True)
    source, target = FORMATS[rows[0].dtype], FORMATS[caches[0].dtype]
    return {
        "source": source,
        "target": target,
        "loaded": STORED[source],
        "stored": STORED[target],
        "read_align": _aligned_to_items(*rows),
        "write_align": _aligned_to_items(*caches),
    }


def _alignment(*tensors: Tensor) -> int:
    """The widest access that addresses and strides allow, the last one apart."""
    return access_bytes(
        *(tensor.data_ptr() for tensor in tensors),
        *(
            tensor.stride(dim) * tensor.element_size()
            for tensor in tensors
            for dim in range(tensor.dim() - 1)
            if tensor.shape[dim] > 1
        ),
    )


def _aligned_to_items(*tensors: Tensor) -> int:
    align, size = _alignment(*tensors), tensors[0].element_size()
    if align < size:
        raise ValueError(
            f"tensors of {tensors[0].dtype} must lie at multiples of {size} bytes, "
            f"not of {align}"
        )
    return align


def _numbers(pair: Pair, constants: dict[str, Any]) -> Iterator[int]:
    """Addresses, and strides in elements of what is loaded and stored."""
    for tensor, element in zip(
        pair, (constants["loaded"], constants["stored"]), strict=True
    ):
        yield tensor.data_ptr()
        for dim in range(tensor.dim() - 1):
            stride = tensor.stride(dim) * tensor.element_size()
            yield stride // (element.primitive_bitwidth // 8)


def _tiles(pairs: Sequence[Pair], loaded: Any) -> tuple[int, dict[str, int]]:
    """How many tiles hold a token's heads, and the sizes that are compiled in."""
    item = loaded.primitive_bitwidth // 8
    dims = [rows.shape[2] * rows.element_size() // item for rows, _ in pairs]
    heads = pairs[0][0].shape[1]
    dim_tile = min(triton.next_power_of_2(max(dims)), TILE_BYTES // item)
    head_tile = min(triton.next_power_of_2(heads), TILE_BYTES // item // dim_tile)
    # Less than a warp's bytes would be split into narrower accesses.
    dim_tile = max(dim_tile, WARP_BYTES // item // head_tile)
    warps = head_tile * dim_tile * item // WARP_BYTES
    return math.ceil(heads / head_tile) * math.ceil(max(dims) / dim_tile), {
        "tokens": pairs[0][1].shape[1],
        "heads": heads,
        "k_dim": dims[0],
        "v_dim": dims[1],
        "head_tile": head_tile,
        "dim_tile": dim_tile,
        "num_warps": max(1, min(warps, MAX_WARPS)),
    }
