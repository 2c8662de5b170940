"""Buffers are what the configuration says; block b is the same bytes in all views."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvplugin.groups import GroupingConfig, get_kv_cache_configs
from kvplugin.spec import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)
from kvplugin.worker.backend_table import BACKENDS
from kvplugin.worker.backends import BackendLayout
from kvplugin.worker.tensors import KVTensors, allocate_kv_cache
from tests.worker_tensors.cases import any_block_size, attention, config_of
from tests.worker_tensors.shared import FLASH, FLASHINFER, FULL, STATES, WINDOW, touched


def check_blocks_never_meet(tensors: KVTensors) -> None:
    """Different blocks of any layers of a buffer have no byte in common, and layers
    without padding have all bytes of a block."""
    for index, buffer in enumerate(tensors.buffers):
        layers = [n for n, c in tensors.layers.items() if c.buffer == index]
        owner = np.full(buffer.nbytes, -1)
        for layer in layers:
            for block in range(tensors.num_blocks):
                changed = touched(tensors, layer, block)[1]
                assert set(owner[changed]) <= {-1, block}
                owner[changed] = block


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    "backends",
    [
        (FLASH, FLASH),
        (FLASHINFER, FLASHINFER),
        (FLASH, FLASHINFER),
        (any_block_size("FLASH_ATTN@0.32"), FLASH),
    ],
    ids=lambda pair: "+".join(b.name for b in pair),
)
@pytest.mark.parametrize("ratios", [(1, 1), (2, 1), (2, 4)])
def test_layers_that_share_a_buffer_find_a_block_in_the_same_bytes(
    layout: str, backends: tuple[BackendLayout, BackendLayout], ratios: tuple[int, int]
) -> None:
    config = config_of([(FULL, ["a0", "a1"]), (WINDOW, ["b0", "b1"])], 5)
    names = {"a0": 0, "a1": 0, "b0": 1, "b1": 1}
    tensors = allocate_kv_cache(
        config,
        {name: backends[i] for name, i in names.items()},
        layout,
        kernel_block_sizes=[4 // ratio for ratio in ratios],
    )
    check_blocks_never_meet(tensors)
    for block in range(5):
        ours, theirs = (touched(tensors, name, block)[1] for name in ("a0", "b0"))
        assert np.array_equal(ours, theirs)
        assert len(ours) == FULL.page_size_bytes


def test_window_with_larger_blocks_and_fewer_heads_shares_bytes_of_keys_first() -> None:
    wide = replace(WINDOW, block_size=8, num_kv_heads=1)
    config = config_of([(FULL, ["a"]), (wide, ["b"])], 3)
    tensors = allocate_kv_cache(config, {"a": FLASH, "b": FLASH}, "NHD")
    assert tensors.layers["a"].tensors[0].stride()[0] > FULL.page_size_bytes // 2
    check_blocks_never_meet(tensors)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("ratio", [1, 2])
def test_attention_beside_states_is_block_major(layout: str, ratio: int) -> None:
    config = config_of([(FULL, ["a0", "a1"]), (STATES, ["m"])], 4)
    tensors = allocate_kv_cache(
        config,
        {"a0": FLASH, "a1": FLASH},
        layout,
        kernel_block_sizes=[4 // ratio, 64],
    )
    check_blocks_never_meet(tensors)
    page = FULL.page_size_bytes
    for block in range(4):
        for layer in ("a0", "a1", "m"):
            changed = touched(tensors, layer, block)[1]
            assert changed.min() == block * page
            assert changed.max() < (block + 1) * page
    # The layer that shares with no state lies as its neighbours do.
    a0, a1 = (tensors.layers[name].tensors[0] for name in ("a0", "a1"))
    assert a0.stride() == a1.stride()
    # The same strides as vLLM 0.19.1's: (hidden, 2 * hidden, ...).
    hidden = a0[0, 0].numel()
    assert a0.stride()[:2] == (hidden, 2 * hidden)


def test_latents_beside_keys_first_are_block_major() -> None:
    latent = MLAAttentionSpec(
        block_size=4, num_kv_heads=1, head_size=12, dtype="bfloat16"
    )
    config = config_of([(FULL, ["a"]), (latent, ["b"])], 3)
    backends = {"a": FLASH, "b": any_block_size("FLASHMLA")}
    tensors = allocate_kv_cache(config, backends, "NHD")
    check_blocks_never_meet(tensors)
    assert np.array_equal(touched(tensors, "a", 2)[1], touched(tensors, "b", 2)[1])


def test_states_follow_each_other_in_a_page() -> None:
    tensors = allocate_kv_cache(
        config_of([(FULL, ["a"]), (STATES, ["m"])], 3), {"a": FLASH}, "NHD"
    )
    states = tensors.layers["m"].kv_cache
    assert isinstance(states, list)
    page = STATES.page_size_bytes
    assert [(s.dtype, tuple(s.shape)) for s in states] == [
        (torch.float32, (3, 5, 2)),
        (torch.bfloat16, (3, 3)),
    ]
    assert [s.stride() for s in states] == [(page // 4, 2, 1), (page // 2, 1)]
    assert [s.storage_offset() for s in states] == [0, 40 // 2]


def test_padded_pages_keep_their_distance() -> None:
    padded = replace(FULL, page_size_padded=FULL.page_size_bytes + 32)
    config = config_of([(padded, ["a"])], 4)
    for backend in (FLASH, FLASHINFER, any_block_size("FLASH_ATTN@0.32")):
        for layout in ("LBNHC", "LBHNC"):
            tensors = allocate_kv_cache(config, {"a": backend}, layout)
            for block in range(4):
                changed = touched(tensors, "a", block)[1]
                start = block * padded.page_size_bytes
                assert np.array_equal(
                    changed, start + np.arange(padded.real_page_size_bytes)
                )


@pytest.mark.parametrize("name", sorted(BACKENDS))
@pytest.mark.parametrize("ratio", [1, 2])
def test_layers_dimension_puts_a_block_of_all_layers_together(
    name: str, ratio: int
) -> None:
    backend = any_block_size(name)
    names = ["a", "b", "c"]
    spec = attention()
    if "MLA" in name:
        spec = MLAAttentionSpec(
            block_size=4,
            num_kv_heads=1,
            head_size=6,
            dtype="uint8" if "FP8" in name else "bfloat16",
            cache_dtype_str="fp8_ds_mla" if "FP8" in name else None,
        )
    for layout in (x for x in backend.orders if not x.startswith("L")):
        config = config_of([(spec, names)], 4)
        backends, sizes = dict.fromkeys(names, backend), [4 // ratio]
        tensors = allocate_kv_cache(config, backends, layout, kernel_block_sizes=sizes)
        (buffer,) = tensors.buffers
        assert buffer.nbytes == sum(tensor.size for tensor in config.kv_cache_tensors)
        block = 3 * spec.page_size_bytes
        seen = np.zeros(buffer.nbytes, np.int64)
        for layer in names:
            for i in range(4):
                changed = touched(tensors, layer, i)[1]
                assert {*(changed // block)} == {i}
                seen[changed] += 1
        assert (seen == 1).all()


def test_memory_is_exactly_what_the_configuration_says() -> None:
    specs = {"full": FULL} | {f"sw.{i}": WINDOW for i in range(2)}
    config = get_kv_cache_configs(
        [specs], GroupingConfig(max_model_len=16), [10_000]
    ).configs[0]
    tensors = allocate_kv_cache(config, dict.fromkeys(specs, FLASH), "NHD")
    assert [b.nbytes for b in tensors.buffers] == [
        t.size for t in config.kv_cache_tensors
    ]
    assert all(b.dtype is torch.int8 and not b.any() for b in tensors.buffers)
    storages = {
        tensor.untyped_storage().data_ptr()
        for cache in tensors.layers.values()
        for tensor in cache.tensors
    }
    assert storages == {buffer.data_ptr() for buffer in tensors.buffers}


def test_one_group_of_different_pages_has_a_buffer_a_layer() -> None:
    wide = attention(num_kv_heads=4)
    spec = UniformTypeKVCacheSpecs.from_specs({"a": FULL, "b": wide})
    config = KVCacheConfig(
        3,
        (
            KVCacheTensor(3 * FULL.page_size_bytes, ("a",)),
            KVCacheTensor(3 * wide.page_size_bytes, ("b",)),
        ),
        (KVCacheGroupSpec(("a", "b"), spec),),
    )
    tensors = allocate_kv_cache(config, {"a": FLASH, "b": FLASH}, "NHD")
    assert tensors.layers["b"].tensors[0].shape == (2, 3, 4, 4, 3)
    check_blocks_never_meet(tensors)


def test_layer_that_uses_anothers_cache_has_its_tensor() -> None:
    group = KVCacheGroupSpec(("a", "late"), FULL, {"late": "a"})
    tensor = KVCacheTensor(3 * FULL.page_size_bytes, ("a",))
    tensors = allocate_kv_cache(
        KVCacheConfig(3, (tensor,), (group,)), {"a": FLASH}, "NHD"
    )
    caches = tensors.kv_caches()
    assert caches["late"] is caches["a"]
