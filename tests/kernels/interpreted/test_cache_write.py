"""The kernels write what a plain loop writes, and nothing else."""

from dataclasses import replace

import pytest
import torch

from kvplugin.kernels import cache_write, host_cache_write
from kvplugin.kernels.cache_write import write_ds_mla, write_kv, write_latent
from kvplugin.kernels.records import unpack_ds_mla
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

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


@pytest.mark.parametrize(("source", "target"), MOVED + ROUNDED, ids=str)
def test_every_pair_of_dtypes(source: torch.dtype, target: torch.dtype) -> None:
    check_write_kv(write_kv, Case("fused, heads first", source, target))


@pytest.mark.parametrize("target", [torch.float32, E4M3, torch.int8], ids=str)
def test_rows_of_one_value_may_have_any_stride(target: torch.dtype) -> None:
    check_rows_of_one_value(write_kv, target)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("target", [BF16, E4M3], ids=str)
def test_every_layout(layout: str, target: torch.dtype) -> None:
    case = Case(layout, BF16, target, slots=(5, -1, 15))
    check_write_kv(write_kv, replace(case, dim=72, value_dim=72))


@pytest.mark.full
@pytest.mark.parametrize(("source", "target"), MOVED + ROUNDED, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [33, 72, 80, 128])
def test_every_combination(
    layout: str, source: torch.dtype, target: torch.dtype, dim: int
) -> None:
    case = Case(layout, source, target, dim=dim, value_dim=dim)
    check_write_kv(write_kv, replace(case, slots=(5, -1, 15)))


@pytest.mark.parametrize(
    ("source", "shift"),
    [(E4M3, 1), (torch.int8, 3), (BF16, 2), (BF16, 4), (BF16, 8), (torch.float32, 4)],
    ids=str,
)
def test_unaligned_bytes_move(source: torch.dtype, shift: int) -> None:
    case = Case("HND", source, source, dim=32, value_dim=16, slots=(5, -1, 15))
    check_write_kv(write_kv, replace(case, shift=shift))


@pytest.mark.parametrize("target", [BF16, E4M3], ids=str)
@pytest.mark.parametrize(
    ("heads", "dim", "value_dim"), [(40, 128, 64), (1, 5000, 3), (2, 3, 5000)]
)
def test_more_than_one_tile(
    target: torch.dtype, heads: int, dim: int, value_dim: int
) -> None:
    case = Case("HND", BF16, target, heads, dim, value_dim, slots=(7, -1))
    check_write_kv(write_kv, case)


def test_padded_heads() -> None:
    check_padded_heads(write_kv)


@pytest.mark.parametrize("slots", [(), (-1, -1, -1), (3,)], ids=str)
def test_slots(slots: tuple[int, ...]) -> None:
    check_write_kv(write_kv, Case(slots=slots))
    check_write_kv(write_kv, Case(slots=slots, target=E4M3))


@pytest.mark.parametrize("target", [BF16, E4M3, torch.int8], ids=str)
@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (33, 7)])
def test_latent(target: torch.dtype, latent: int, rope: int) -> None:
    check_write_latent(write_latent, BF16, target, latent, rope)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=str)
@pytest.mark.parametrize("shift", [0, 1, 8])
def test_ds_mla(dtype: torch.dtype, shift: int) -> None:
    check_write_ds_mla(write_ds_mla, dtype, shift)


def test_ds_mla_of_nothing() -> None:
    cache = torch.zeros(2, 2, 656, dtype=torch.uint8)
    rows = torch.ones(2, 512), torch.ones(2, 64)
    write_ds_mla(rows[0][:0], rows[1][:0], cache, torch.empty(0, dtype=torch.int64))
    write_ds_mla(*rows, cache, torch.tensor([-1, -1]))
    assert not cache.any()


def test_ds_mla_of_what_is_not_finite() -> None:
    kv_c, k_pe = torch.randn(1, 512), torch.randn(1, 64)
    kv_c[0, 3], kv_c[0, 130], kv_c[0, 400] = float("nan"), float("inf"), 1e-42
    kv_c[0, 384:400] = 0
    k_pe[0, 5], k_pe[0, 6] = float("-inf"), float("nan")
    caches = [torch.zeros(1, 1, 656, dtype=torch.uint8) for _ in "ab"]
    for module, cache in zip((cache_write, host_cache_write), caches, strict=True):
        module.write_ds_mla(kv_c, k_pe, cache, torch.tensor([0]))
    for ours, twins in zip(*(unpack_ds_mla(c[0]) for c in caches), strict=True):
        assert torch.allclose(ours, twins, rtol=0, atol=0, equal_nan=True)


FAR = 3 << 30
"""Bytes of memory that is only reserved, but for a page or two."""


@pytest.mark.parametrize("target", [BF16, E4M3], ids=str)
def test_a_cache_beyond_two_gigabytes(target: torch.dtype) -> None:
    flat = torch.empty(FAR, dtype=torch.uint8).view(target)
    key_cache, value_cache = flat.view(-1, 4, 2, 32).tensor_split(2, dim=-1)
    assert key_cache[-1].data_ptr() - key_cache.data_ptr() > 1 << 31
    rows = (torch.arange(64) % 16).view(2, 2, 16).to(BF16)
    slots = torch.tensor([1, key_cache.shape[0] * 4 - 2])
    write_kv(rows, -rows, key_cache, value_cache, slots)
    for cache, expected in ((key_cache, rows), (value_cache, -rows)):
        assert torch.equal(cache[0, 1].float(), expected[0].float())
        assert torch.equal(cache[-1, 2].float(), expected[1].float())


def test_strides_beyond_two_gigabytes() -> None:
    flat = torch.empty(FAR, dtype=torch.uint8).view(BF16)
    far = (FAR - 1024) // BF16.itemsize
    key = flat.as_strided((2, 1, 16), (far, 16, 1))
    value = flat.as_strided((2, 1, 16), (far, 16, 1), 16)
    key.copy_(torch.arange(32).view(2, 1, 16))
    value.copy_(-key)
    heads = torch.empty(FAR, dtype=torch.uint8).view(BF16)
    cache = heads.as_strided((1, 2, 2, 16), (256, 16, far, 1))
    both = torch.cat([key, value], dim=1)
    others = torch.zeros(1, 2, 2, 16, dtype=BF16)
    write_kv(both, both, cache, others, torch.tensor([1, 0]))
    assert torch.equal(cache, torch.stack([both[1], both[0]]).unsqueeze(0))
    small = [torch.zeros(1, 2, 1, 16, dtype=BF16) for _ in "kv"]
    write_kv(key, value, *small, torch.tensor([1, 0]))
    assert torch.equal(small[0], key.flip(0).unsqueeze(0))
    assert torch.equal(small[1], value.flip(0).unsqueeze(0))


def test_a_record_beyond_two_gigabytes() -> None:
    cache = torch.empty(FAR // 656 // 4 * 4 * 656, dtype=torch.uint8).view(-1, 4, 656)
    kv_c, k_pe = torch.randn(1, 512), torch.randn(1, 64)
    write_ds_mla(kv_c, k_pe, cache, torch.tensor([cache.shape[0] * 4 - 1]))
    near = torch.zeros(1, 1, 656, dtype=torch.uint8)
    write_ds_mla(kv_c, k_pe, near, torch.tensor([0]))
    assert torch.equal(cache[-1, -1], near[0, 0])


def test_wrong_arguments() -> None:
    rows, cache = torch.zeros(2, 3, 8), torch.zeros(4, 4, 3, 8)
    slots = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="slots must be int64"):
        write_kv(rows, rows, cache, cache.clone(), slots.int())
    with pytest.raises(ValueError, match="one a token"):
        write_ds_mla(
            torch.zeros(2, 512),
            torch.zeros(2, 64),
            torch.zeros(4, 4, 656, dtype=torch.uint8),
            slots[:1],
        )


def test_values_at_odd_addresses() -> None:
    cache = torch.zeros(4, 4, 3, 8).to(E4M3)
    odd = torch.frombuffer(bytearray(2 * 3 * 8 * 4 + 16), dtype=torch.uint8)
    skip = (1 - odd.data_ptr()) % 4
    rows = torch.frombuffer(
        odd.numpy().data, dtype=torch.float32, count=48, offset=skip
    ).view(2, 3, 8)
    with pytest.raises(ValueError, match="multiples of 4 bytes, not of 1"):
        write_kv(rows, rows, cache, cache.clone(), torch.tensor([0, 1]))
