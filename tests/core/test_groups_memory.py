"""Memory checks, the longest length that fits, capacity, and Mamba's block sizes."""

import logging
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplugin.errors import CapacityError, ConfigError
from kvplugin.groups import (
    GroupingConfig,
    MambaPages,
    align_mamba_page,
    align_mamba_specs,
    estimate_max_model_len,
    get_capacity,
    get_kv_cache_config_from_groups,
    get_kv_cache_configs,
    get_kv_cache_groups,
    max_memory_usage_bytes,
    vllm019_token_count,
)
from kvplugin.spec import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

HEADS: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 2,
    "head_size": 64,
    "dtype": "bfloat16",
}
FULL = FullAttentionSpec(**HEADS)
WINDOW = SlidingWindowSpec(**HEADS, sliding_window=64)
PAGE = FULL.page_size_bytes
ONE: dict[str, KVCacheSpec] = {"a": FULL}


def config(**changes: Any) -> GroupingConfig:
    base = {"max_model_len": 1000, "max_num_batched_tokens": 100}
    return GroupingConfig(**base | changes)


# -- does it fit ---------------------------------------------------------------------


def test_one_request_and_the_null_block_must_fit() -> None:
    found = get_kv_cache_configs([ONE], config(), [64 * PAGE])
    assert found.configs[0].num_blocks == 64
    with pytest.raises(CapacityError, match=r"max seq len \(1000\).*length is 992"):
        get_kv_cache_configs([ONE], config(), [63 * PAGE])
    old = config(vllm019_arithmetic=True)
    assert get_kv_cache_configs([ONE], old, [63 * PAGE]).configs[0].num_blocks == 63


@pytest.mark.parametrize("memory", [-5, 0, PAGE])
def test_no_memory_at_all(memory: int) -> None:
    with pytest.raises(CapacityError, match="No available memory for the cache bl"):
        get_kv_cache_configs([ONE], config(), [memory])


def test_an_override_counts_before_the_checks() -> None:
    choice = config(num_gpu_blocks_override=64)
    assert get_kv_cache_configs([ONE], choice, [PAGE * 999]).configs[0].num_blocks == 64
    few = config(num_gpu_blocks_override=10)
    with pytest.raises(CapacityError, match="length is 144") as refusal:
        get_kv_cache_configs([ONE], few, [PAGE * 999])
    assert "increasing `num_gpu_blocks_override` (10) or" in str(refusal.value)
    assert "gpu_memory_utilization" not in str(refusal.value)
    old = replace(few, vllm019_arithmetic=True)
    assert get_kv_cache_configs([ONE], old, [PAGE * 999]).configs[0].num_blocks == 10


@pytest.mark.parametrize("fit", [False, True])
def test_an_override_without_a_usable_block_names_itself(fit: bool) -> None:
    none = config(num_gpu_blocks_override=1, auto_fit_max_model_len=fit)
    with pytest.raises(CapacityError, match="increasing `num_gpu_blocks_override` "):
        get_kv_cache_configs([ONE], none, [PAGE * 999])


@pytest.mark.parametrize("memory", [PAGE * 99.0, 1e9, float("inf"), "9", None, True])
@pytest.mark.parametrize("override", [None, 64])
def test_a_memory_that_is_no_number_of_bytes(memory: Any, override: int | None) -> None:
    choice = config(num_gpu_blocks_override=override)
    with pytest.raises(ConfigError, match="available_memory must be an integer"):
        get_kv_cache_configs([ONE, {}], choice, [PAGE * 99, memory])
    with pytest.raises(ConfigError, match="available_memory must be an integer"):
        get_kv_cache_config_from_groups(
            get_kv_cache_groups(ONE, choice), choice, memory
        )


def test_an_override_beyond_the_memory_is_announced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "vllm.kvplugin"):
        get_kv_cache_configs([ONE], config(num_gpu_blocks_override=99), [PAGE])
    assert "Overriding num_gpu_blocks=1 with num_gpu_blocks_override=99" in caplog.text
    assert "more than the memory holds" in caplog.text


def test_auto_fit_takes_the_poorest_worker_and_changes_nothing_given() -> None:
    choice = config(auto_fit_max_model_len=True)
    workers = [{"a": FULL}, {"b": FULL}]
    found = get_kv_cache_configs(workers, choice, [30 * PAGE, 11 * PAGE])
    assert found.config.max_model_len == 160
    assert choice.max_model_len == 1000
    assert [each.num_blocks for each in found.configs] == [11, 11]
    roomy = get_kv_cache_configs(workers, choice, [99 * PAGE, 99 * PAGE])
    assert roomy.config.max_model_len == 1000
    with pytest.raises(CapacityError, match="Cannot auto-fit max_model_len"):
        get_kv_cache_configs(workers, choice, [30 * PAGE, PAGE])


STATE = MambaSpec(1000, ((PAGE,),), ("int8",))
MIXES: list[dict[str, KVCacheSpec]] = [
    ONE,
    {"a": FULL, "b": WINDOW},
    {"a": FULL, "b": WINDOW, "c": WINDOW, "d": STATE},
    {"a": FULL, "b": FullAttentionSpec(**HEADS | {"num_kv_heads": 1})},
    {"a": STATE},
]


@given(st.sampled_from(MIXES), st.integers(0, 80), st.integers(1, 400), st.booleans())
def test_the_estimate_is_the_longest_length_that_fits(
    specs: dict[str, KVCacheSpec], pages: int, length: int, old: bool
) -> None:
    choice = config(max_model_len=length, vllm019_arithmetic=old)
    groups = get_kv_cache_groups(specs, choice)
    fitting = [
        n
        for n in range(1, length + 1)
        if max_memory_usage_bytes(groups, replace(choice, max_model_len=n))
        <= pages * PAGE
    ]
    found = estimate_max_model_len(groups, choice, pages * PAGE)
    assert found == max(fitting, default=0)


# -- capacity ------------------------------------------------------------------------


def test_figures_of_the_report_agree() -> None:
    """Scenario 66: tokens are concurrency times length, not the pool cut in groups."""
    specs = {"full": FULL} | {f"sw.{i}": WINDOW for i in range(5)}
    choice = config(max_model_len=32768)
    found = get_kv_cache_configs([specs], choice, [30001 * PAGE]).configs[0]
    capacity = get_capacity(found, choice)
    per_request = 2048 + 5 * 12  # 163 tokens of a window lie in 12 blocks at most
    assert capacity.blocks_per_request == per_request
    assert capacity.max_concurrency == 30000 / per_request
    assert capacity.num_tokens == 30000 * 32768 // per_request
    assert vllm019_token_count(found, choice) == 30001 // 6 * 16
    assert capacity.min_blocks_per_request == 6
    assert capacity.lines() == [
        f"KV cache size: {capacity.num_tokens:,} tokens in 30,001 blocks of 8,192 "
        "bytes",
        "Maximum concurrency for 32,768 tokens per request: 14.23x",
        "Minimum footprint of a 1-token request: 6 blocks, 49,152 bytes (0.02% of the "
        "pool)",
    ]


def test_large_aligned_blocks_show_in_the_smallest_footprint() -> None:
    """Scenario 66: 23 groups of huge blocks, of which any prompt takes one each."""
    state = MambaSpec(1000, ((4096, 128),), ("bfloat16",))
    specs: dict[str, KVCacheSpec] = {"full.0": FULL}
    specs |= {f"mamba.{i}": state for i in range(22)}
    aligned = align_mamba_specs(specs, max_model_len=1000)
    choice = config()
    page = aligned["full.0"].page_size_bytes
    found = get_kv_cache_configs([aligned], choice, [71 * page]).configs[0]
    capacity = get_capacity(found, choice)
    assert capacity.min_blocks_per_request == 23
    assert capacity.min_footprint == 23 / 70
    assert "(32.86% of the pool)" in capacity.lines()[-1]


def test_padding_of_a_block() -> None:
    specs = {f"full.{i}": FULL for i in range(5)} | {
        f"sw.{i}": WINDOW for i in range(4)
    }
    found = get_kv_cache_configs([specs], config(), [1 << 24]).configs[0]
    assert get_capacity(found, config()).padding_bytes_per_block == PAGE


def test_no_cache_is_infinite_capacity() -> None:
    found = get_kv_cache_configs([{}], config(), [0]).configs[0]
    capacity = get_capacity(found, config())
    assert capacity.max_concurrency == float("inf")
    assert capacity.min_footprint == 0


# -- Mamba beside attention ----------------------------------------------------------


def pages(**changes: Any) -> MambaPages:
    base = {
        "attention_token_bytes": 2048,
        "state_bytes": 788 * 1024,
        "block_size": 16,
        "max_model_len": 4096,
    }
    return MambaPages(**base | changes)


@pytest.mark.parametrize(
    ("changes", "block_size", "mamba_block_size"),
    [
        ({}, 400, 4096),
        ({"mamba_cache_mode": "align"}, 400, 400),
        ({"mamba_cache_mode": "all", "mamba_block_size": 256}, 512, 512),
        ({"block_size": 528}, 528, 4096),
        ({"block_size": 528, "mamba_cache_mode": "align"}, 528, 528),
        ({"kernel_alignment": 64}, 448, 4096),
        ({"mamba_block_size": 1024}, 400, 1024),
    ],
)
def test_attention_blocks_that_hold_a_state(
    changes: dict[str, Any], block_size: int, mamba_block_size: int
) -> None:
    """The example of vLLM's own comment: a state of 788 KiB, 2 KiB a token."""
    aligned = align_mamba_page(pages(**changes))
    assert aligned.block_size == block_size
    assert aligned.mamba_block_size == mamba_block_size
    assert aligned.mamba_page_size_padded == block_size * 2048
    assert aligned.padding_bytes == block_size * 2048 - 788 * 1024


def test_no_padding_where_pages_agree() -> None:
    aligned = align_mamba_page(pages(state_bytes=64 * 2048))
    assert (aligned.block_size, aligned.mamba_page_size_padded) == (64, None)


def test_mode_all_needs_the_chunk() -> None:
    with pytest.raises(ConfigError, match="mamba_block_size"):
        align_mamba_page(pages(mamba_cache_mode="all"))


@given(
    st.integers(1, 5000),
    st.integers(1, 1 << 20),
    st.integers(1, 600),
    st.sampled_from([16, 64, 128]),
    st.sampled_from(["none", "align", "all"]),
)
def test_pages_agree_whatever_the_sizes(
    token: int, state: int, block_size: int, alignment: int, mode: str
) -> None:
    aligned = align_mamba_page(
        pages(
            attention_token_bytes=token,
            state_bytes=state,
            block_size=block_size,
            kernel_alignment=alignment,
            mamba_cache_mode=mode,
            mamba_block_size=256 if mode == "all" else None,
        )
    )
    page = aligned.block_size * token
    assert page == (aligned.mamba_page_size_padded or state) >= state
    if aligned.block_size == block_size:
        return
    step = math.lcm(alignment, 256) if mode == "all" else alignment
    assert aligned.block_size % step == 0
    assert (aligned.block_size - step) * token < state


def test_latent_attention_is_aligned_to_its_kernel() -> None:
    mla = MLAAttentionSpec(**HEADS | {"num_kv_heads": 1, "head_size": 576})
    specs: dict[str, KVCacheSpec] = {"a": mla, "b": MambaSpec(1, ((9,),), ("int8",))}
    aligned = align_mamba_specs(specs, max_model_len=100)
    assert aligned["a"].block_size == 64
    assert aligned["b"].block_size == 100
    assert aligned["a"].page_size_bytes == aligned["b"].page_size_bytes
    assert len(get_kv_cache_groups(aligned, config())) == 2


@pytest.mark.parametrize(
    "odd",
    [
        {"b": FullAttentionSpec(**HEADS | {"head_size": 32})},
        {"b": MambaSpec(1, ((7,),), ("int8",))},
        {"b": FullAttentionSpec(**HEADS | {"block_size": 32})},
    ],
)
def test_layers_of_several_sizes_are_not_aligned(odd: dict[str, KVCacheSpec]) -> None:
    specs = {"a": FULL, "m": MambaSpec(1, ((9,),), ("int8",))} | odd
    with pytest.raises(ConfigError, match="cannot be aligned"):
        align_mamba_specs(specs, max_model_len=100)


def test_one_kind_alone_is_left_as_it_is() -> None:
    assert align_mamba_specs(ONE, max_model_len=100) == ONE
