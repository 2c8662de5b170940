"""Writes of tokens into caches, checked byte by byte against plain loops.

For every implementation of `write_kv`, `write_latent` and `write_ds_mla`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvplugin.kernels.records import pack_ds_mla, round_to
from tests.kernels.canaries import Guarded

Write = Callable[..., None]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
MOVED = [(dtype, dtype) for dtype in (*FLOATS, *FP8, torch.int8)]
ROUNDED = [
    (source, target)
    for source in FLOATS
    for target in (*FLOATS, *FP8, torch.int8)
    if source != target
]


@dataclass(frozen=True)
class Case:
    """One call of `write_kv`; the defaults are as odd as can be."""

    layout: str = "fused, heads first"
    source: torch.dtype = torch.bfloat16
    target: torch.dtype = torch.bfloat16
    heads: int = 3
    dim: int = 33
    value_dim: int = 20
    blocks: int = 4
    tokens: int = 4
    slots: tuple[int, ...] = (5, -1, 15, 0, 10)
    shift: int = 0
    """Bytes by which the tensors miss their best alignment."""
    scales: tuple[float, float] = (0.03, 0.7)


def cache_views(layout: str, flat: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    """The views of keys and values of all elements, in a backend's way."""
    b, n, h, d, dv = (
        case.blocks, case.tokens, case.heads, case.dim, case.value_dim
    )  # fmt: skip
    keys, values = flat.tensor_split([b * n * h * d])
    match layout:
        case "NHD":
            return keys.view(b, n, h, d), values.view(b, n, h, dv)
        case "HND":
            return (
                keys.view(b, h, n, d).transpose(1, 2),
                values.view(b, h, n, dv).transpose(1, 2),
            )
        case "keys and values in a block":
            first, second = flat.view(b, 2, n, h, d).unbind(1)
            return first, second
        case "fused":
            fused = flat.view(b, n, h, d + dv)
        case "fused, heads first":
            fused = flat.view(b, h, n, d + dv).transpose(1, 2)
        case "halves of a head":
            first, second = flat.view(b, h, 2, n, d).transpose(1, 3).unbind(2)
            return first, second
    return fused[..., :d], fused[..., d:]


LAYOUTS = (
    "NHD",
    "HND",
    "keys and values in a block",
    "fused",
    "fused, heads first",
    "halves of a head",
)


def check_write_kv(write: Write, case: Case) -> None:
    """`write` leaves every byte as the loop does, in the cache and around it."""
    key, value, source = tokens(case)
    elements = case.blocks * case.tokens * case.heads * (case.dim + case.value_dim)
    nbytes = elements * case.target.itemsize
    cache, expected = (Guarded.of(nbytes, shift=case.shift, seed=7) for _ in "ab")
    views, wanted = (
        cache_views(case.layout, guarded.view(case.target, elements), case)
        for guarded in (cache, expected)
    )
    scales = case.scales if case.source != case.target else (1.0, 1.0)
    for rows, view, scale in zip((key, value), wanted, scales, strict=True):
        write_in_a_loop(rows, view, case.slots, scale)
    before = source.data.clone()
    slots = torch.tensor(case.slots, dtype=torch.int64)
    write(key, value, *views, slots, k_scale=scales[0], v_scale=scales[1])
    assert torch.equal(cache.data, expected.data)
    assert torch.equal(source.data, before)
    cache.check()


def check_padded_heads(write: Write) -> None:
    """Aligned heads of an odd number of bytes: what pads them is left alone."""
    rows = torch.randn(2, 3, 48).bfloat16()[..., :33]
    cache, expected = (Guarded.of(2 * 4 * 3 * 48 * 2) for _ in "ab")
    views = [
        guarded.view(torch.bfloat16, 2, 4, 3, 48)[..., :33]
        for guarded in (cache, expected)
    ]
    other = torch.zeros(2, 4, 3, 48).bfloat16()[..., :33]
    write_in_a_loop(rows, views[1], (6, 1), 1.0)
    write(rows, rows, views[0], other, torch.tensor([6, 1]))
    assert torch.equal(cache.data, expected.data)
    cache.check()


def tokens(case: Case) -> tuple[Tensor, Tensor, Guarded]:
    """Keys and values as slices of rows, each in between others' values."""
    count, heads, sizes = len(case.slots), case.heads, (case.dim, case.value_dim)
    width = heads * (2 * case.dim + case.value_dim)
    source = Guarded.of(count * width * case.source.itemsize, shift=case.shift)
    if case.source in FLOATS:
        generator = torch.Generator().manual_seed(3)
        noise = torch.randn(count * width, generator=generator) * 3
        source.data.copy_(noise.to(case.source).view(torch.uint8))
    rows = source.view(case.source, count, width)
    _, keys, values = rows.tensor_split([heads * case.dim, 2 * heads * case.dim], dim=1)
    key, value = (
        part.unflatten(1, (heads, size))
        for part, size in zip((keys, values), sizes, strict=True)
    )
    return key, value, source


def write_in_a_loop(
    rows: Tensor, cache: Tensor, slots: tuple[int, ...], scale: float
) -> None:
    size = cache.shape[1]
    for token, slot in enumerate(slots):
        if slot < 0:
            continue
        for head in range(cache.shape[2]):
            values = rows[token, head]
            if rows.dtype != cache.dtype:
                quotient = values.float().numpy() / np.float32(scale)
                values = round_to(torch.from_numpy(quotient), cache.dtype)
            place = cache[slot // size, slot % size, head]
            place.view(torch.uint8).copy_(values.view(torch.uint8))


def check_write_latent(
    write: Write, source: torch.dtype, target: torch.dtype, latent: int, rope: int
) -> None:
    """MLA rows in pages with something behind them."""
    slots = (6, -1, 11, 0)
    generator = torch.Generator().manual_seed(5)
    parts = [
        torch.randn(4, size + 3, generator=generator).to(source)[:, 1 : size + 1]
        for size in (latent, rope)
    ]
    cache, expected = (
        Guarded.of(3 * (4 * (latent + rope) + 16) * target.itemsize) for _ in "ab"
    )
    views = [
        guarded.view(target, 3, 4 * (latent + rope) + 16)[:, :-16].unflatten(1, (4, -1))
        for guarded in (cache, expected)
    ]
    scale = 0.4 if source != target else 1.0
    start = 0
    for part in parts:
        view = views[1][..., start : start + part.shape[1]].unsqueeze(2)
        write_in_a_loop(part.unsqueeze(1), view, slots, scale)
        start += part.shape[1]
    write(*parts, views[0], torch.tensor(slots), scale=scale)
    assert torch.equal(cache.data, expected.data)
    cache.check()


def check_write_ds_mla(write: Write, dtype: torch.dtype, shift: int) -> None:
    """Records in pages with something behind them, aligned or not."""
    slots = (6, -1, 11, 0)
    generator = torch.Generator().manual_seed(5)
    kv_c, k_pe = (
        (torch.randn(4, size, generator=generator) * 20).to(dtype) for size in (512, 64)
    )
    kv_c[3, :128] = 0
    kv_c[3, 128:256] *= 1e-6
    page = 4 * 656 + 16
    cache, expected = (Guarded.of(3 * page, shift=shift) for _ in "ab")
    views = [
        guarded.data.view(3, page)[:, :-16].view(3, 4, 656)
        for guarded in (cache, expected)
    ]
    records = pack_ds_mla(kv_c, k_pe)
    for token, slot in enumerate(slots):
        if slot >= 0:
            views[1][slot // 4, slot % 4] = records[token]
    write(kv_c, k_pe, views[0], torch.tensor(slots))
    assert torch.equal(cache.data, expected.data)
    cache.check()


def check_rows_of_one_value(write: Write, target: torch.dtype) -> None:
    """Nothing lies beside it, so that a permuted view is as good as any."""
    key = torch.zeros(4, 3, 7).as_strided((4, 3, 1), (21, 7, 3))
    key.copy_(torch.arange(1.0, 13.0).view(4, 3, 1))
    value = torch.arange(21.0, 45.0).view(4, 3, 2)[..., 1:]
    memory = torch.zeros(2, 3, 1, 5, 3).to(target)
    caches = [memory[i].permute(0, 2, 3, 1) for i in range(2)]  # [3, 5, 3, 1]
    assert caches[0].stride(-1) == 15
    slots = torch.tensor([2, -1, 14, 7])
    write(key, value, *caches, slots)
    for rows, cache in ((key, caches[0]), (value, caches[1])):
        wanted = torch.zeros(15, 3, 1)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                wanted[slot] = rows[token]
        found = cache.float().reshape(15, 3, 1)
        assert torch.equal(found, wanted.to(target).float())
