"""The casts against tables of nearest values made of fractions, ties to even."""

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import torch
import triton
import triton.language as tl

from kvplugin.kernels.casts import FORMATS, STORED, narrow, widen
from kvplugin.kernels.records import round_to

Bits = npt.NDArray[np.int64]
MOST = 1 << 20
"""Elements of a Triton tensor, at most."""


@dataclass(frozen=True)
class Binary:
    """A binary format; codes follow on each other in the order of magnitudes."""

    mantissa: int
    bias: int
    largest: int
    """Code of the largest magnitude: finite where it saturates, else infinity."""
    sign: int

    def value(self, code: int) -> Fraction:
        exponent, fraction = divmod(code, 1 << self.mantissa)
        if exponent == 0:
            exponent, fraction = 1, fraction - (1 << self.mantissa)
        scaled = (1 << self.mantissa) + fraction
        return scaled * Fraction(2) ** (exponent - self.bias - self.mantissa)


BINARY = {
    torch.float8_e4m3fn: Binary(3, 7, 0x7E, 0x80),
    torch.float8_e5m2: Binary(2, 15, 0x7B, 0x80),
    torch.float16: Binary(10, 15, 0x7C00, 0x8000),
    torch.bfloat16: Binary(7, 127, 0x7F80, 0x8000),
}
UNSIGNED = {1: torch.uint8, 2: torch.uint16}


@cache
def halfway(dtype: torch.dtype) -> npt.NDArray[np.float64]:
    """Between each code's value and the next one's: exact in float64."""
    form = BINARY[dtype]
    values = [form.value(code) for code in range(form.largest + 1)]
    middles = [(a + b) / 2 for a, b in pairwise(values)]
    assert all(Fraction(float(middle)) == middle for middle in middles)
    return np.array([float(middle) for middle in middles])


def nearest(x: npt.NDArray[np.float32], dtype: torch.dtype) -> Bits:
    """Codes of the nearest values; -1 for NaN."""
    form, middles = BINARY[dtype], halfway(dtype)
    with np.errstate(invalid="ignore"):
        magnitude = np.abs(x.astype(np.float64))
    code = np.searchsorted(middles, magnitude, side="left")
    tie = middles[np.minimum(code, len(middles) - 1)] == magnitude
    code = code + (tie & (code % 2 == 1))
    code = code | np.where(np.signbit(x), form.sign, 0)
    return np.where(np.isnan(x), -1, code)


def bits_of(codes: torch.Tensor) -> Bits:
    """Codes as integers; -1 for NaN."""
    bits = codes.view(UNSIGNED[codes.dtype.itemsize]).numpy().astype(np.int64)
    return np.where(codes.float().isnan().numpy(), -1, bits)


def floats(bits: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
    return bits.astype(np.uint32).view(np.float32)


def inputs(dtype: torch.dtype) -> npt.NDArray[np.float32]:
    """Every bf16, every halfway case with its neighbours, and random fp32 bits."""
    middles = halfway(dtype).astype(np.float32).view(np.uint32).astype(np.int64)
    around = np.concatenate([middles - 1, middles, middles + 1])
    random = np.random.default_rng(0).integers(0, 1 << 32, 1 << 17)
    every = np.arange(1 << 16) << 16
    return floats(np.concatenate([every, around, around | 1 << 31, random]))


@triton.jit
def narrow_all(x, y, count, size: tl.constexpr, form: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    values = tl.load(x + at, mask=at < count, other=0.0)
    tl.store(y + at, narrow(values, form), mask=at < count)


@triton.jit
def widen_all(x, y, size: tl.constexpr, form: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(y + at, widen(tl.load(x + at), form))


def narrowed(x: npt.NDArray[np.float32], dtype: torch.dtype) -> torch.Tensor:
    form = FORMATS[dtype]
    codes = torch.zeros(len(x), dtype=dtype)
    stored = triton.reinterpret(codes, STORED[form])
    size = min(MOST, triton.next_power_of_2(len(x)))
    grid = (triton.cdiv(len(x), size),)
    narrow_all[grid](torch.from_numpy(x), stored, len(x), size=size, form=form)
    return codes


@pytest.mark.parametrize("dtype", BINARY, ids=str)
def test_nearest_value(dtype: torch.dtype) -> None:
    x = inputs(dtype)
    expected = nearest(x, dtype)
    assert np.array_equal(bits_of(round_to(torch.from_numpy(x), dtype)), expected)
    assert np.array_equal(bits_of(narrowed(x, dtype)), expected)


@pytest.mark.full
@pytest.mark.parametrize("dtype", BINARY, ids=str)
def test_many_random_values(dtype: torch.dtype) -> None:
    x = floats(np.random.default_rng(1).integers(0, 1 << 32, 4 * MOST))
    expected = nearest(x, dtype)
    assert np.array_equal(bits_of(round_to(torch.from_numpy(x), dtype)), expected)
    assert np.array_equal(bits_of(narrowed(x, dtype)), expected)


def test_int8() -> None:
    eighths = np.arange(-1100, 1101, dtype=np.float32) / 8
    x = np.concatenate(
        [
            eighths,
            np.nextafter(eighths, np.float32(1e9)),
            np.nextafter(eighths, np.float32(-1e9)),
            floats(np.arange(1 << 16) << 16),
        ]
    )
    expected = np.array([whole(float(value)) for value in x])
    assert np.array_equal(round_to(torch.from_numpy(x), torch.int8).numpy(), expected)
    assert np.array_equal(narrowed(x, torch.int8).numpy(), expected)


def whole(value: float) -> int:
    """Python rounds fractions to the nearest whole number, ties to even."""
    if value != value:
        return 0
    return round(Fraction(min(max(value, -128.0), 127.0)))


def test_fp32_is_kept() -> None:
    x = inputs(torch.bfloat16)
    assert np.array_equal(narrowed(x, torch.float32).numpy(), x, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_widening_is_exact(dtype: torch.dtype) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    wide = torch.empty(1 << 16)
    form = FORMATS[dtype]
    widen_all[(1,)](
        triton.reinterpret(every, STORED[form]), wide, size=1 << 16, form=form
    )
    assert torch.allclose(wide, every.float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(wide.signbit(), every.float().signbit())
