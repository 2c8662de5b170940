"""Every element is where the layout says, before and after any conversions."""

from itertools import pairwise
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.kernels.dispatch import block_converter, block_zeroer
from kvplugin.layout import KVLayout, plan_conversion
from kvplugin.spec import FullAttentionSpec
from kvplugin.worker.backend_table import BACKENDS
from kvplugin.worker.backends import BackendLayout
from kvplugin.worker.describe import kv_layout
from kvplugin.worker.tensors import KVTensors, LayerCache
from kvplugin.worker.zeroing import BlockZeroing
from tests.worker_tensors.cases import (
    any_block_size,
    codes,
    convert,
    digits,
    expected,
    logical,
    memory_from,
    one_layer,
    read,
    spec_for,
    write,
)

DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")
PAGES = [
    (name, layout)
    for name, backend in BACKENDS.items()
    for layout in backend.orders
    if not backend.opaque
]
CONTENTS = {
    name: "packed" if "FP8" in name else "latent" if "MLA" in name else "kv"
    for name, _ in PAGES
}


def rows_of(layout: KVLayout, part: int, memory: np.ndarray) -> np.ndarray:
    """Bytes [blocks, tokens, heads, row] at the places that the layout names."""
    places = np.array(
        [
            [
                [layout.row(part, block, token, head) for head in range(layout.heads)]
                for token in range(layout.tokens)
            ]
            for block in range(layout.num_blocks)
        ]
    )
    row = np.arange(layout.parts[part].row_bytes)
    return memory[places[..., None] + row]


@pytest.mark.parametrize(("name", "layout"), PAGES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("block_size", "heads", "ratio"), [(4, 4, 1), (4, 2, 1), (6, 3, 2), (8, 2, 4)]
)
def test_element_written_through_view_is_where_layout_says(
    name: str, layout: str, dtype: str, block_size: int, heads: int, ratio: int
) -> None:
    backend = any_block_size(name)
    spec = spec_for(backend, block_size, heads, dtype)
    tensors = one_layer(backend, layout, spec, 5, ratio)
    cache = tensors.layers["x"]
    described, memory = kv_layout(cache), memory_from(cache, tensors)
    assert (described.num_blocks, described.tokens) == (5 * ratio, block_size // ratio)
    assert described.split == ratio
    views = logical(cache)
    assert [part.name for part in described.parts] == list(views)
    start = 0
    for i, view in enumerate(views.values()):
        numbers = codes(view.shape, start)
        start += numbers.size
        for shift in digits(start, view.element_size()):
            write(view, numbers, shift)
            wanted = expected(view, numbers, shift).view(np.uint8)
            assert np.array_equal(rows_of(described, i, memory), wanted)


class Page(NamedTuple):
    """One place where a request's rows may lie."""

    backend: BackendLayout
    layout: str
    spec: FullAttentionSpec
    ratio: int


@st.composite
def chains(draw: st.DrawFn) -> list[Page]:
    """Pages of one content, of any backends, layouts and block sizes."""
    content = draw(st.sampled_from(sorted(set(CONTENTS.values()))))
    dtype, heads = draw(st.sampled_from(DTYPES)), draw(st.integers(1, 4))
    names = [page for page in PAGES if CONTENTS[page[0]] == content]
    pages = []
    for name, layout in draw(st.lists(st.sampled_from(names), min_size=2, max_size=4)):
        kernel = draw(st.sampled_from([heads, 1, 2, 3, 4]))
        ratio = draw(st.integers(1, 3))
        backend = any_block_size(name)
        spec = spec_for(backend, kernel * ratio, heads, dtype)
        pages.append(Page(backend, layout, spec, ratio))
    return pages


@settings(deadline=None)
@given(chains(), st.integers(1, 12), st.randoms(use_true_random=False))
def test_elements_survive_any_chain_of_conversions(
    chain: list[Page], num_tokens: int, random: Random
) -> None:
    places = []
    for page in chain:
        needed = -(-num_tokens // page.spec.block_size)
        tensors = one_layer(*page[:3], num_blocks=needed + 2, ratio=page.ratio)
        blocks = random.sample(range(needed + 2), needed)
        kernel_ids = [b * page.ratio + i for b in blocks for i in range(page.ratio)]
        places.append((tensors.layers["x"], tensors, kernel_ids, blocks))
    first = logical(places[0][0])
    total = sum(view[0, 0].numel() for view in first.values()) * num_tokens
    for shift in digits(total, first["kv" if "kv" in first else "k"].element_size()):
        wanted = fill(places[0][:3], num_tokens, shift)
        for source, target in pairwise(places):
            plan = plan_conversion(kv_layout(source[0]), kv_layout(target[0]))
            convert(
                plan,
                memory_from(*source[:2]),
                memory_from(*target[:2]),
                source[3],
                target[3],
                num_tokens,
            )
        for part, view in logical(places[-1][0]).items():
            assert np.array_equal(
                tokens_of(view, places[-1][2], num_tokens), wanted[part]
            )


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
@pytest.mark.parametrize("ratios", [(1, 4), (4, 1), (2, 4)])
def test_a_conversion_and_a_zeroer_mean_the_same_block(
    layout: str, ratios: tuple[int, int]
) -> None:
    """One id of the pool, whatever kernels count."""
    backend = any_block_size("FLASHINFER")
    spec = spec_for(backend, 4, 2, "bfloat16")
    source, target = (one_layer(backend, layout, spec, 6, ratio) for ratio in ratios)
    plan = plan_conversion(kv_layout(source.layers["x"]), kv_layout(target.layers["x"]))
    source.buffers[0].fill_(1)
    target.buffers[0].fill_(7)
    BlockZeroing(target, block_zeroer).zero([4])
    addresses = (t.layers["x"].tensors[0].data_ptr() for t in (source, target))
    block_converter(plan, *addresses).convert(*plan.pair_chunks([3], [4]))
    pages = target.buffers[0].view(6, -1)
    found = [set(page.tolist()) for page in pages]
    assert found == [{1} if block == 4 else {7} for block in range(6)]


def fill(
    place: tuple[LayerCache, KVTensors, list[int]], num_tokens: int, shift: int
) -> dict[str, np.ndarray]:
    """Write a request's tokens; what each part has, [tokens, heads, elements]."""
    cache, _, ids = place
    wanted, start = {}, 0
    for part, view in logical(cache).items():
        size = view.shape[1]
        numbers = codes((num_tokens, *view.shape[2:]), start)
        start += numbers.size
        for token in range(num_tokens):
            write(view[ids[token // size], token % size], numbers[token], shift)
        wanted[part] = expected(view, numbers, shift)
    return wanted


def tokens_of(view: torch.Tensor, ids: list[int], num_tokens: int) -> np.ndarray:
    size = view.shape[1]
    slots = [(ids[token // size], token % size) for token in range(num_tokens)]
    return np.stack([read(view[slot]) for slot in slots])


def test_the_reference_would_notice_heads_taken_for_tokens() -> None:
    # As many heads as tokens: nothing but the contents tells NHD from HND.
    spec = spec_for(any_block_size("FLASH_ATTN"), 4, 4, "int8")
    nhd = one_layer(any_block_size("FLASH_ATTN"), "LBNHC", spec, 3)
    hnd = one_layer(any_block_size("FLASH_ATTN"), "LBHNC", spec, 3)
    view = logical(nhd.layers["x"])["k"]
    write(view, codes(view.shape), 0)
    hnd.buffers[0].copy_(nhd.buffers[0])
    assert not np.array_equal(read(logical(hnd.layers["x"])["k"]), read(view))
