"""Which blocks must be zeroed is a table, and zeroing is exactly those pages."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvplugin.errors import ConfigError
from kvplugin.kernels.dispatch import block_zeroer
from kvplugin.kernels.host_zero import BlockZeroer
from kvplugin.spec import (
    UNWRITTEN,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    Unwritten,
    unwritten,
    zeroing_reasons,
)
from kvplugin.worker.backend_table import BACKENDS
from kvplugin.worker.describe import regions
from kvplugin.worker.tensors import allocate_kv_cache
from kvplugin.worker.zeroing import BlockZeroing
from tests.worker_tensors.cases import any_block_size, attention, config_of

FLASH = any_block_size("FLASH_ATTN")
FULL = attention()
FP8 = attention(num_kv_heads=4, dtype="float8_e4m3fn")
HEADS = {"num_kv_heads": 2, "head_size": 3}
WINDOW = SlidingWindowSpec(block_size=4, dtype="bfloat16", sliding_window=8, **HEADS)
STATES = MambaSpec(
    block_size=64,
    shapes=((5, 2),),
    dtypes=("float32",),
    page_size_padded=FULL.page_size_bytes,
)
BYTES = attention(num_kv_heads=1, head_size=328, dtype="uint8")
RECORDS = MLAAttentionSpec(
    block_size=4,
    num_kv_heads=1,
    head_size=576,
    dtype="uint8",
    cache_dtype_str="fp8_ds_mla",
)


class _Foreign(KVCacheSpec):
    """A kind that nobody here knows."""


@pytest.mark.parametrize(
    ("specs", "needing"),
    [
        ([FULL], []),
        ([FULL, WINDOW], []),
        ([STATES], [0]),
        ([FULL, STATES], [0, 1]),
        ([FP8, FULL], [0, 1]),
        ([FULL, attention(dtype="int8", num_kv_heads=4), WINDOW], [0, 1, 2]),
        ([FULL, CrossAttentionSpec(block_size=4, dtype="bfloat16", **HEADS)], []),
    ],
)
def test_configurations_that_need_it(
    specs: Sequence[KVCacheSpec], needing: list[int]
) -> None:
    config = config_of([(spec, [f"x{i}"]) for i, spec in enumerate(specs)], 3)
    reasons = zeroing_reasons(config.kv_cache_groups)
    assert [reason.partition(",")[0] for reason in reasons] == [
        f"group {i}" for i in needing
    ]
    # The scheduler, which collects the ids, goes by the same.
    assert bool(reasons) == config.needs_kv_cache_zeroing


def test_one_dtype_in_two_formats_needs_it() -> None:
    config = config_of([(BYTES, ["a"]), (RECORDS, ["b"])], 3)
    reasons = zeroing_reasons(config.kv_cache_groups)
    assert len(reasons) == 2
    assert "uint8; others: uint8/fp8_ds_mla" in reasons[0]
    assert config.needs_kv_cache_zeroing


def test_layers_of_one_group_never_meet() -> None:
    uniform = UniformTypeKVCacheSpecs.from_specs({"a": FULL, "b": FP8})
    config = config_of([(uniform, ["a", "b"])], 3)
    assert zeroing_reasons(config.kv_cache_groups) == ()
    assert not config.needs_kv_cache_zeroing


def test_kinds() -> None:
    assert unwritten(STATES) is Unwritten.STARTS_FROM
    assert unwritten(RECORDS) is Unwritten.WEIGHS_BY_ZERO
    encoder = EncoderOnlyAttentionSpec(block_size=4, dtype="bfloat16", **HEADS)
    assert unwritten(encoder) is Unwritten.NEVER_READS
    assert unwritten(_Foreign(4)) is Unwritten.STARTS_FROM
    assert list(UNWRITTEN)[-1] is KVCacheSpec


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (name, layout)
        for name in ("FLASH_ATTN", "FLASHINFER", "FLASH_ATTN@0.32")
        for layout in BACKENDS[name].orders
    ],
)
@pytest.mark.parametrize("ids", [[1], [0, 3], [2, 1], []])
def test_exactly_the_pages_of_the_ids_are_zeroed(
    name: str, layout: str, ids: list[int]
) -> None:
    backend = any_block_size(name)
    groups = [(FULL, ["a0", "a1"]), (WINDOW, ["b0", "b1"])]
    if layout.startswith("B"):
        groups = groups[:1]
    config = config_of(groups, 5)
    names = [name for _, layers in groups for name in layers]
    tensors = allocate_kv_cache(config, dict.fromkeys(names, backend), layout)
    for buffer in tensors.buffers:
        buffer.fill_(-1)
    nbytes = BlockZeroing(tensors, BlockZeroer).zero(ids)
    assert nbytes == len(ids) * 2 * FULL.page_size_bytes
    zeroed = sum(int((buffer == 0).sum()) for buffer in tensors.buffers)
    assert zeroed == nbytes
    for layer in names:
        view = tensors.layers[layer].tensors[0]
        blocks = view.movedim(backend.axes.index("block"), 0).float()
        for i, block in enumerate(blocks):
            assert bool((block == 0).all()) == (i in ids)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (name, layout)
        for name in ("FLASH_ATTN", "FLASHINFER", "FLASH_ATTN@0.32")
        for layout in BACKENDS[name].orders
    ],
)
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("padding", [0, 32])
def test_a_pool_of_one_block(name: str, layout: str, ratio: int, padding: int) -> None:
    backend = any_block_size(name)
    padded = replace(FULL, page_size_padded=FULL.page_size_bytes + padding)
    config = config_of([(padded if padding else FULL, ["a", "b"])], 1)
    try:
        tensors = allocate_kv_cache(
            config,
            dict.fromkeys("ab", backend),
            layout,
            kernel_block_sizes=[4 // ratio],
        )
    except ConfigError:
        assert padding  # which rules some layouts out
        return
    for buffer in tensors.buffers:
        buffer.fill_(7)
    found = regions(tensors.layers["b"])
    block_zeroer(found).zero([0])
    assert not tensors.layers["b"].tensors[0].any()
    assert sum(region.nbytes for region in found) == FULL.page_size_bytes
    zeroed = sum(int((buffer == 0).sum()) for buffer in tensors.buffers)
    assert zeroed == FULL.page_size_bytes
    assert BlockZeroing(tensors, BlockZeroer).zero([0]) == 2 * (
        FULL.page_size_bytes + padding
    )
    assert not any(buffer.any() for buffer in tensors.buffers)


def test_padding_and_states_are_zeroed_with_their_page() -> None:
    config = config_of([(FULL, ["a0", "a1"]), (STATES, ["m"])], 4)
    tensors = allocate_kv_cache(config, {"a0": FLASH, "a1": FLASH}, "NHD")
    for buffer in tensors.buffers:
        buffer.fill_(7)
    BlockZeroing(tensors, BlockZeroer).zero([2])
    page = FULL.page_size_bytes
    for buffer in tensors.buffers:
        zeros = np.flatnonzero(buffer.numpy() == 0)
        assert np.array_equal(zeros, np.arange(2 * page, 3 * page))


def test_worker_without_layers_has_nothing_to_zero() -> None:
    config = config_of([(FULL, [])], 1)
    tensors = allocate_kv_cache(config, {}, "NHD")
    assert BlockZeroing(tensors, BlockZeroer).zero([0]) == 0
