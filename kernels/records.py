"""Cache formats in torch: rounding to a cache's dtype, and `fp8_ds_mla` records.

A record of 656 bytes is one token of a sparse MLA layer (DeepSeek V3.2), as described
in vLLM 0.32's `v1/attention/backends/mla/flashmla_sparse.py` and written by its
`concat_and_cache_ds_mla`:

```
bytes    0 .. 511   512 latent values, fp8 e4m3, in 4 tiles of 128
bytes  512 .. 527   the tiles' scales, fp32, little-endian
bytes  528 .. 655   64 rotary values, bf16
```

A tile's scale is its largest magnitude / 448, at least fp32's smallest normal number; a
value is its code times the scale. A NaN has no say in the scale and stays a NaN; beside
an infinity, finite values become 0 and the infinity itself a NaN.
"""

from typing import Final

import torch
from torch import Tensor

LATENT: Final = 512
TILE: Final = 128
ROPE: Final = 64
SCALES_AT: Final = LATENT
ROPE_AT: Final = SCALES_AT + LATENT // TILE * 4
RECORD_BYTES: Final = ROPE_AT + ROPE * 2
SMALLEST_SCALE: Final = torch.finfo(torch.float32).tiny

_E4M3: Final = torch.float8_e4m3fn
_SATURATE: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x`, fp32 of any shape, in a cache's dtype; the torch twin of `casts.narrow`.

    To the nearest value, ties to even. fp8 saturates (infinities too), int8 ends at
    -128 and 127 and makes NaN 0; fp16 and bf16 overflow to infinity.
    """
    if dtype in _SATURATE:
        limit = torch.finfo(dtype).max
        return x.clamp(-limit, limit).to(dtype)
    if dtype == torch.int8:
        return x.clamp(-128, 127).nan_to_num(nan=0.0).round().to(dtype)
    return x.to(dtype)


def pack_ds_mla(kv_c: Tensor, k_pe: Tensor) -> Tensor:
    """Records of `fp8_ds_mla`.

    Args:
        kv_c: latent values [T, 512], fp32, fp16 or bf16.
        k_pe: rotary values [T, 64], likewise; rounded to bf16.

    Returns:
        uint8 [T, 656]. `unpack_ds_mla` gives finite latent values back within
        max(|x| / 16, scale / 1024), and a millionth of that for the arithmetic: half
        of e4m3's last mantissa bit, or half of its smallest value.

    Raises:
        ValueError: another shape or dtype.
    """
    check_latent(kv_c, k_pe)
    tiles = kv_c.float().unflatten(1, (-1, TILE))
    largest = tiles.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1, keepdim=True)
    scales = (largest / torch.finfo(_E4M3).max).clamp(min=SMALLEST_SCALE)
    parts = (
        round_to(tiles / scales, _E4M3).flatten(1),
        scales.flatten(1),
        k_pe.to(torch.bfloat16).contiguous(),
    )
    return torch.cat([part.view(torch.uint8) for part in parts], dim=1)


def unpack_ds_mla(records: Tensor) -> tuple[Tensor, Tensor]:
    """Latent values fp32 [T, 512] and rotary values bf16 [T, 64] of records.

    Args:
        records: uint8 [T, 656].

    Raises:
        ValueError: another shape or dtype.
    """
    if records.dtype != torch.uint8 or records.shape[1:] != (RECORD_BYTES,):
        raise ValueError(
            f"records must be uint8 [T, {RECORD_BYTES}], not {records.dtype} "
            f"{list(records.shape)}"
        )
    codes, scales, rope = (
        part.contiguous() for part in records.tensor_split((SCALES_AT, ROPE_AT), dim=1)
    )
    tiles = codes.view(_E4M3).float().unflatten(1, (-1, TILE))
    latent = tiles * scales.view(torch.float32).unsqueeze(-1)
    return latent.flatten(1), rope.view(torch.bfloat16)


def check_latent(kv_c: Tensor, k_pe: Tensor) -> None:
    """What a record is made of: ValueError for another shape or dtype."""
    for name, values, size in (("kv_c", kv_c, LATENT), ("k_pe", k_pe, ROPE)):
        if values.dim() != 2 or values.shape[1] != size:
            raise ValueError(
                f"{name} must be [T, {size}] for fp8_ds_mla, not {list(values.shape)}"
            )
        if values.dtype not in FLOATS:
            raise ValueError(
                f"{name} must be fp32, fp16 or bf16 for fp8_ds_mla, not {values.dtype}"
            )
    if len(kv_c) != len(k_pe):
        raise ValueError(f"kv_c has {len(kv_c)} tokens and k_pe has {len(k_pe)}")
