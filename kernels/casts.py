"""Triton casts by integer code: the same bits on every GPU and in the interpreter.

Triton's own casts differ by target (what overflows, which instruction rounds) and its
interpreter gets bf16 and fp8 wrong. These round to the nearest value, ties to even.

What a value becomes that the format can't hold follows vLLM's fp8 cache writes
(`csrc/quantization/w8a8/fp8`, CUDA's `__NV_SATFINITE`): fp8 *saturates*, infinities
included, at 448 (e4m3fn) and 57344 (e5m2); bf16 and fp16 become infinite; int8 ends at
-128 and 127, the bounds of vLLM's int8 caches. NaN stays NaN (with which payload is
left open) but for int8, which has none: 0.

bf16 and fp8 are loaded and stored as integers of their size (`STORED`).
"""

from typing import Final

import torch
import triton
import triton.language as tl

_INFINITY = tl.constexpr(0x7F800000)
"""Bits of fp32's infinity: a larger magnitude is NaN."""


STORED: Final = {
    "fp32": tl.float32,
    "fp16": tl.float16,
    "bf16": tl.int16,
    "e4m3": tl.uint8,
    "e5m2": tl.uint8,
    "int8": tl.int8,
}
"""What a format is loaded and stored as."""
FORMATS: Final = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.int8: "int8",
}


@triton.jit  # type: ignore[untyped-decorator]
def widen(raw: tl.tensor, form: tl.constexpr) -> tl.tensor:
    """fp32 of what is stored for fp32, fp16 or bf16: exact."""
    if form == "bf16":
        wide = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        tl.static_assert(form == "fp32" or form == "fp16", "unknown format")
        wide = raw.to(tl.float32)
    return wide


@triton.jit  # type: ignore[untyped-decorator]
def narrow(x: tl.tensor, form: tl.constexpr) -> tl.tensor:
    """What is stored for the fp32 `x`."""
    if form == "e4m3":
        code = _fp8(x, 3, 7, 0x7E)
    elif form == "e5m2":
        code = _fp8(x, 2, 15, 0x7B)
    elif form == "bf16":
        code = _bf16(x)
    elif form == "int8":
        code = _int8(x)
    elif form == "fp16":
        code = x.to(tl.float16)
    else:
        tl.static_assert(form == "fp32", "unknown format")
        code = x
    return code


@triton.jit  # type: ignore[untyped-decorator]
def magnitude(x: tl.tensor) -> tl.tensor:
    """The bits of |x|, int32, which are in the order of the values: NaN last."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit  # type: ignore[untyped-decorator]
def is_nan(x: tl.tensor) -> tl.tensor:
    """Whether `x` is NaN, which no compiler may assume away."""
    return magnitude(x) > _INFINITY


@triton.jit  # type: ignore[untyped-decorator]
def _bf16(x: tl.tensor) -> tl.tensor:
    bits = x.to(tl.int32, bitcast=True)
    # A half less one, and one more where the kept part is odd; what carries into the
    # exponent is right, up to infinity.
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(is_nan(x), (bits >> 16) | 0x40, rounded).to(tl.int16)


@triton.jit  # type: ignore[untyped-decorator]
def _fp8(
    x: tl.tensor, mantissa: tl.constexpr, bias: tl.constexpr, largest: tl.constexpr
) -> tl.tensor:
    """The code of `x`, uint8. largest is the code of the largest finite value."""
    size = magnitude(x)
    dropped: tl.constexpr = 23 - mantissa
    rebiased = size - ((127 - bias) << 23)
    half = (1 << (dropped - 1)) - 1
    normal = (rebiased + half + ((rebiased >> dropped) & 1)) >> dropped
    # Below the normal values codes are multiples of the smallest one. Added to a float
    # whose last bit is worth that much, the sum's last bits are the code, and the
    # addition has rounded.
    anchor_bits: tl.constexpr = 127 + 24 - bias - mantissa << 23
    anchor = tl.full(x.shape, anchor_bits, tl.int32).to(tl.float32, bitcast=True)
    sums = size.to(tl.float32, bitcast=True) + anchor
    subnormal = sums.to(tl.int32, bitcast=True) - anchor_bits
    code = tl.where(size < ((128 - bias) << 23), subnormal, normal)
    code = tl.minimum(code, largest)
    code = tl.where(is_nan(x), 0x7F, code)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit  # type: ignore[untyped-decorator]
def _int8(x: tl.tensor) -> tl.tensor:
    bounded = tl.where(x > 127.0, 127.0, tl.where(x < -128.0, -128.0, x))
    bounded = tl.where(is_nan(x), 0.0, bounded)
    # The last bit of 1.5 * 2**23 is worth one: adding it rounds to a whole number.
    anchor = 12582912.0
    sums = (bounded + anchor).to(tl.int32, bitcast=True)
    return (sums - 0x4B400000).to(tl.int8)
