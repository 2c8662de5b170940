"""The host twins write what a plain loop writes, and refuse what does not fit."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvplugin.kernels.host_cache_write import write_ds_mla, write_kv, write_latent
from tests.kernels.cache_writes import (
    LAYOUTS,
    MOVED,
    ROUNDED,
    Case,
    check_padded_heads,
    check_rows_of_one_value,
    check_write_ds_mla,
    check_write_kv,
    check_write_latent,
)


@pytest.mark.parametrize(("source", "target"), MOVED + ROUNDED, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_and_values(layout: str, source: torch.dtype, target: torch.dtype) -> None:
    case = Case(layout, source, target)
    for dim in (33, 72, 80, 128):
        check_write_kv(write_kv, replace(case, dim=dim, value_dim=dim))
    if layout in ("NHD", "HND", "fused", "fused, heads first"):
        check_write_kv(write_kv, case)


@pytest.mark.parametrize("shift", [1, 2, 4, 8])
@pytest.mark.parametrize(("source", "target"), MOVED, ids=str)
def test_unaligned(shift: int, source: torch.dtype, target: torch.dtype) -> None:
    if shift % source.itemsize == 0:
        check_write_kv(write_kv, Case("HND", source, target, shift=shift))


def test_padded_heads() -> None:
    check_padded_heads(write_kv)


@pytest.mark.parametrize("slots", [(), (-1, -1, -1), (3,), tuple(range(16))])
def test_slots(slots: tuple[int, ...]) -> None:
    check_write_kv(write_kv, Case(slots=slots))
    check_write_kv(write_kv, Case(slots=slots, target=torch.float8_e4m3fn))


@pytest.mark.parametrize(("source", "target"), MOVED + ROUNDED, ids=str)
@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (33, 7)])
def test_latent(
    source: torch.dtype, target: torch.dtype, latent: int, rope: int
) -> None:
    check_write_latent(write_latent, source, target, latent, rope)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shift", [0, 1, 8])
def test_ds_mla(dtype: torch.dtype, shift: int) -> None:
    check_write_ds_mla(write_ds_mla, dtype, shift)


def test_ds_mla_of_nothing() -> None:
    cache = torch.zeros(2, 2, 656, dtype=torch.uint8)
    rows = torch.ones(2, 512), torch.ones(2, 64)
    write_ds_mla(rows[0][:0], rows[1][:0], cache, torch.empty(0, dtype=torch.int64))
    write_ds_mla(*rows, cache, torch.tensor([-1, -1]))
    assert not cache.any()


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_more_tokens_than_are_rounded_at_once(
    monkeypatch: pytest.MonkeyPatch, target: torch.dtype
) -> None:
    monkeypatch.setattr("kvplugin.kernels.host_cache_write.CHUNK_VALUES", 2 * 3 * 33)
    for layout in ("NHD", "fused, heads first"):
        check_write_kv(write_kv, Case(layout, target=target))
    check_write_ds_mla(write_ds_mla, torch.bfloat16, 0)


def arguments(**changes: Any) -> dict[str, Any]:
    """Of a good call of `write_kv`, but for the changes."""
    good = {
        "key": torch.zeros(2, 3, 8),
        "value": torch.zeros(2, 3, 8),
        "key_cache": torch.zeros(4, 4, 3, 8),
        "value_cache": torch.zeros(4, 4, 3, 8),
        "slots": torch.tensor([0, 1]),
    }
    return {**good, **changes}


half = torch.zeros(2, 3, 8, dtype=torch.bfloat16)
WRONG = [
    ({"key": torch.zeros(2, 24)}, "key must have 3 dimensions, not shape"),
    ({"key_cache": torch.zeros(16, 3, 8)}, "key_cache must have 4 dimensions"),
    ({"key": torch.zeros(2, 3, 16)[..., ::2]}, "last dimension must be contiguous"),
    ({"key_cache": torch.zeros(4, 4, 3, 9)}, r"key \[2, 3, 8\] and key_cache \[4, 4"),
    ({"value_cache": torch.zeros(4, 4, 2, 8)}, "differ in heads or dim"),
    ({"key": torch.zeros(1, 3, 8)}, "differ before their last dimension"),
    ({"value_cache": torch.zeros(5, 4, 3, 8)}, "differ before their last dimension"),
    ({"value": half}, "key is torch.float32 but value is torch.bfloat16"),
    ({"key_cache": torch.zeros(4, 4, 3, 8).half()}, "key_cache is torch.float16 but"),
    ({"slots": torch.tensor([0, 1], dtype=torch.int32)}, "slots must be int64"),
    ({"slots": torch.tensor([0, 1, 2])}, r"slots must be int64 \[2\], one a token"),
    ({"slots": torch.tensor([0, 9, 1, 9])[::2]}, "slots must be contiguous"),
    ({"k_scale": 2.0}, "the scales must be 1.0"),
    ({"value": torch.zeros(2, 3, 8, device="meta")}, "on one device, not on cpu, meta"),
    (
        {"key": torch.zeros(2, 3, 0), "key_cache": torch.zeros(4, 4, 3, 0)},
        "has no elements",
    ),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=lambda x: str(x)[:40])
def test_wrong_arguments(changes: dict[str, Any], message: str) -> None:
    write_kv(**arguments())
    with pytest.raises(ValueError, match=message):
        write_kv(**arguments(**changes))


@pytest.mark.parametrize("target", [torch.float32, torch.float8_e4m3fn, torch.int8])
def test_rows_of_one_value_may_have_any_stride(target: torch.dtype) -> None:
    check_rows_of_one_value(write_kv, target)


@pytest.mark.parametrize("slot", [16, -2, 1 << 40])
def test_slot_out_of_range(slot: int) -> None:
    cache = torch.zeros(4, 4, 3, 8)
    wrong = arguments(
        key=torch.ones(2, 3, 8), key_cache=cache, slots=torch.tensor([3, slot])
    )
    with pytest.raises(ValueError, match=f"slot {slot} is out of range.*0 to 15"):
        write_kv(**wrong)
    assert not cache.any()


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (torch.bfloat16, torch.uint8, "view the bytes as the fp8 dtype they hold"),
        (torch.int8, torch.bfloat16, "can't be written to a cache of torch.bfloat16"),
        (torch.float8_e4m3fn, torch.float8_e5m2, "can't be written"),
    ],
)
def test_wrong_dtypes(source: torch.dtype, target: torch.dtype, message: str) -> None:
    rows = torch.zeros(2, 3, 8).to(source)
    cache = torch.zeros(4, 4, 3, 8).to(target)
    with pytest.raises(ValueError, match=message):
        write_kv(rows, rows, cache, cache.clone(), torch.tensor([0, 1]))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-40, 1e39])
def test_wrong_scale(scale: float) -> None:
    cache = torch.zeros(4, 4, 3, 8).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="is not a positive, normal fp32 number"):
        write_kv(**arguments(key_cache=cache, value_cache=cache.clone()), v_scale=scale)


def test_wrong_latent() -> None:
    slots = torch.tensor([0, 1])
    cache = torch.zeros(4, 4, 10)
    with pytest.raises(ValueError, match="cache rows of 10 do not hold kv_c's 8"):
        write_latent(torch.zeros(2, 8), torch.zeros(2, 4), cache, slots)
    with pytest.raises(ValueError, match="k_pe must have 2 dimensions"):
        write_latent(torch.zeros(2, 8), torch.zeros(2, 1, 2), cache, slots)
    with pytest.raises(ValueError, match="differ before their last dimension"):
        write_latent(torch.zeros(2, 8), torch.zeros(3, 2), cache, slots)


def test_wrong_ds_mla() -> None:
    kv_c, k_pe, slots = torch.zeros(2, 512), torch.zeros(2, 64), torch.tensor([0, 1])
    cache = torch.zeros(4, 4, 656, dtype=torch.uint8)
    write_ds_mla(kv_c, k_pe, cache, slots)
    with pytest.raises(ValueError, match=r"must be uint8 \[blocks, tokens, 656\]"):
        write_ds_mla(kv_c, k_pe, cache[..., :640], slots)
    with pytest.raises(ValueError, match=r"kv_c must be \[T, 512\]"):
        write_ds_mla(kv_c[:, :256], k_pe, cache, slots)
    with pytest.raises(ValueError, match=r"kv_c is torch\.float32 but k_pe"):
        write_ds_mla(kv_c, k_pe.half(), cache, slots)
    with pytest.raises(ValueError, match="one a token"):
        write_ds_mla(kv_c, k_pe, cache, slots[:1])
    with pytest.raises(ValueError, match="slot 16 is out of range"):
        write_ds_mla(kv_c, k_pe, cache, torch.tensor([0, 16]))
