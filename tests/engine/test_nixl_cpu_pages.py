"""The inside of CPU attention's pages, as vLLM's own operation writes it."""

import numpy as np
import pytest
import torch
from vllm import _custom_ops as ops

from kvplugin.errors import LayoutMismatchError
from kvplugin.integration.vllm.cpu_pages import (
    PageKind,
    PageOrder,
    find_pieces,
    page_rows,
    probe,
    probe_as,
)
from kvplugin.integration.vllm.translate import kv_tensors
from kvplugin.layout import KVLayout, plan_conversion
from tests.engine.version import is_019

HEADS, BLOCKS = 2, 5
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
not_019 = pytest.mark.skipif(is_019(), reason="vLLM 0.19 has no fp8 on a CPU")


def kind_of(block_size: int, dtype: torch.dtype = torch.bfloat16) -> PageKind:
    return PageKind(dtype, dtype, "auto", block_size, 64)


def fp8(block_size: int) -> PageKind:
    return PageKind(torch.bfloat16, torch.uint8, "fp8_e4m3", block_size, 64)


def empty_cache(kind: PageKind, num_blocks: int) -> torch.Tensor:
    """As vLLM makes it for a layer."""
    inner = (kind.block_size, 2 * kind.head_size)
    if is_019():
        shape = (2, num_blocks, HEADS, kind.block_size, kind.head_size)
        return torch.zeros(shape, dtype=kind.cache_dtype)
    return torch.zeros(num_blocks, HEADS, *inner, dtype=kind.cache_dtype)


def write(
    kind: PageKind, isa: str, cache: torch.Tensor, row: list[int], tokens: torch.Tensor
) -> None:
    """Keys and values of one request into the blocks of its row."""
    places = torch.arange(len(tokens))
    ids = torch.tensor(row)[places // kind.block_size]
    slots = ids * kind.block_size + places % kind.block_size
    if is_019():
        halves = cache.unbind(0)
    else:
        shape = (len(cache), HEADS, 2 * kind.block_size, kind.head_size)
        halves = cache.view(shape).chunk(2, dim=2)
    options = {} if kind.kv_cache_dtype == "auto" else {"kv_cache_dtype": "fp8_e4m3"}
    ops.cpu_attn_reshape_and_cache(tokens, -tokens, *halves, slots, isa, **options)


def rows_of(order: PageOrder, cache: torch.Tensor) -> KVLayout:
    tensor = kv_tensors({"layer": cache}, cache.shape[1 if is_019() else 0])["layer"]
    return page_rows(order, tensor.layout, split=1)


def raw(cache: torch.Tensor) -> np.ndarray:
    return cache.view(torch.uint8).reshape(-1).numpy()


def has_amx() -> bool:
    """Whether vLLM's operation writes that packing here: it takes the processor's."""
    kind, tokens = kind_of(32), torch.ones(32, HEADS, 64).bfloat16()
    try:
        write(kind, "amx", empty_cache(kind, 1), [0], tokens)
    except RuntimeError:
        return False
    return True


AMX = pytest.param(
    "amx",
    marks=pytest.mark.skipif(not has_amx(), reason="this processor has no AMX"),
)


@pytest.mark.parametrize(("source", "target"), [(32, 64), (64, 128), (128, 32)])
@pytest.mark.parametrize("isa", ["vec", "vec16", AMX])
@pytest.mark.parametrize("dtype", DTYPES)
def test_converted_blocks_are_as_if_written_there(source, target, isa, dtype):
    """The whole way: what the operation wrote in blocks of one size becomes, byte for
    byte, what it writes in blocks of the other."""
    converts(kind_of(source, dtype), kind_of(target, dtype), isa)


@not_019
@pytest.mark.parametrize("isa", ["vec", AMX])
def test_converted_blocks_of_eight_bits_too(isa):
    converts(fp8(64), fp8(128), isa)


def converts(one: PageKind, other: PageKind, isa: str) -> None:
    torch.manual_seed(0)
    tokens = torch.randn(256, HEADS, one.head_size).to(one.dtype)
    caches, rows, layouts = [], [], []
    for kind in (one, other):
        count = len(tokens) // kind.block_size
        cache = empty_cache(kind, count + 3)
        row = list(range(count + 1, 1, -1))
        write(kind, isa, cache, row, tokens)
        caches.append(cache)
        rows.append(row)
        layouts.append(rows_of(probe_as(kind, isa), cache))
    conversion = plan_conversion(*layouts)
    made = torch.zeros_like(caches[1])
    sources, targets = conversion.pair_chunks(*rows)
    for chunks in zip(sources, targets, strict=True):
        for source, target, nbytes in conversion.runs(*chunks):
            raw(made)[target : target + nbytes] = raw(caches[0])[
                source : source + nbytes
            ]
    assert np.array_equal(raw(made), raw(caches[1]))


@pytest.mark.parametrize("isa", [AMX])
def test_packings_of_two_instruction_sets_are_not_converted_into_each_other(isa):
    kind, other = kind_of(64), kind_of(128)
    layouts = [
        rows_of(probe_as(one, packing), empty_cache(one, BLOCKS))
        for one, packing in ((kind, "vec"), (other, isa))
    ]
    with pytest.raises(LayoutMismatchError, match="packed"):
        plan_conversion(*layouts)


def test_this_machines_own_packing_is_found():
    kind = kind_of(128)
    order = probe(kind)
    assert order == probe_as(kind, order.isa)
    assert rows_of(order, empty_cache(kind, BLOCKS)).pool_bytes == 2 * 128 * 64 * 2 * 2


def test_another_head_size_takes_another_packing_of_its_own():
    kind = PageKind(torch.bfloat16, torch.bfloat16, "auto", 32, 80)
    assert probe(kind).isa == "vec16"


def test_a_block_without_any_order_is_one_row_of_all_its_tokens():
    """It moves to blocks of its own size and packing only."""
    places = np.random.default_rng(0).permutation(32 * 16).reshape(32, 16)
    pieces = find_pieces(places)
    assert (pieces.tokens, pieces.columns, pieces.size) == (32, 1, 32 * 16)
    assert pieces.order
    assert pieces.order != find_pieces(places[::-1]).order


def test_pieces_of_different_sizes_are_refused():
    places = np.array([[0, 1, 2, 4, 5, 9]])
    with pytest.raises(LayoutMismatchError, match="no regular order"):
        find_pieces(places)


def test_a_cache_of_another_shape_is_refused():
    order = probe_as(kind_of(64), "vec")
    strange = torch.zeros(BLOCKS, 64, HEADS, 128, dtype=torch.bfloat16).transpose(1, 2)
    tensor = kv_tensors({"layer": strange}, BLOCKS)["layer"]
    with pytest.raises(LayoutMismatchError, match="not a cache of CPU attention"):
        page_rows(order, tensor.layout, split=1)
