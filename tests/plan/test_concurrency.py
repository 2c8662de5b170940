"""Concurrency equals what a pool takes: filled with requests until it refuses."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.errors import CapacityError, ConfigError
from kvplugin.groups import GroupingConfig
from kvplugin.plan import (
    CacheOptions,
    CachePlan,
    load_models,
    longest_model_len,
    plan_model,
    plan_specs,
)
from kvplugin.spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

MODELS = load_models()


class NaivePool:
    """A number of free blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.free = num_blocks - 1  # one is the null block

    def take(self, blocks: int) -> bool:
        if blocks > self.free:
            return False
        self.free -= blocks
        return True


def blocks_at_worst(spec: KVCacheSpec, length: int, batch: int) -> int:
    """Blocks of one group at the worst moment of a request, step by step.

    Every token count is a step boundary of some schedule, so all are looked at.
    """
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    if isinstance(spec, MambaSpec):
        return 1
    held = []
    for done in range(length):
        first = 0
        if isinstance(spec, SlidingWindowSpec):
            first = max(0, done - spec.sliding_window + 1)
        elif isinstance(spec, ChunkedLocalAttentionSpec):
            first = done // spec.attention_chunk_size * spec.attention_chunk_size
        last = min(done + batch, length) - 1
        held.append(last // spec.block_size - first // spec.block_size + 1)
    return max(held)


def requests_until_refusal(plan: CachePlan, limits: GroupingConfig) -> int:
    """Requests at once, each at its worst moment."""
    pool = NaivePool(plan.config.num_blocks)
    needs = [
        blocks_at_worst(
            group.kv_cache_spec, limits.max_model_len, limits.max_num_batched_tokens
        )
        for group in plan.config.kv_cache_groups
    ]
    count = 0
    while pool.take(sum(needs)):
        count += 1
    return count


@pytest.mark.parametrize("length", [1, 1000, 8192])
@pytest.mark.parametrize("name", MODELS)
def test_every_model(name: str, length: int) -> None:
    limits = GroupingConfig(max_model_len=length, max_num_batched_tokens=2048)
    plan = plan_model(MODELS[name], limits, 40 << 30)
    assert int(plan.capacity.max_concurrency) == requests_until_refusal(plan, limits)
    derived = MODELS[name].derived
    indexer = derived.get("indexer_bytes_per_token_fp8_with_scale", 0)
    growing = derived["growing_bytes_per_token_bf16"] + indexer
    assert plan.growing_bytes_per_token == growing
    key = "recurrent_state_bytes_per_sequence_conv_bf16_ssm_fp32"
    assert plan.state_bytes_per_sequence == derived.get(key, 0)
    assert 0 <= plan.waste < 1
    assert plan.sequence_bytes <= plan.block_bytes


HEADS = {
    "block_size": st.just(4),
    "num_kv_heads": st.just(1),
    "head_size": st.just(8),
    "dtype": st.just("int8"),
}
ANY_SPEC = st.one_of(
    st.builds(FullAttentionSpec, **HEADS),
    st.builds(SlidingWindowSpec, **HEADS, sliding_window=st.integers(1, 20)),
    st.builds(
        ChunkedLocalAttentionSpec, **HEADS, attention_chunk_size=st.integers(1, 20)
    ),
    st.just(MambaSpec(4, ((64,),), ("int8",))),
)


@settings(deadline=None)
@given(
    st.lists(ANY_SPEC, min_size=1, max_size=8),
    st.integers(1, 60),
    st.integers(1, 20),
    st.integers(1, 200),
)
def test_any_model(
    specs_given: list[KVCacheSpec], length: int, batch: int, blocks: int
) -> None:
    specs = {f"layers.{i}": spec for i, spec in enumerate(specs_given)}
    limits = GroupingConfig(
        max_model_len=length,
        max_num_batched_tokens=batch,
        num_gpu_blocks_override=blocks,
    )
    try:
        plan = plan_specs(specs, limits, 0)
    except CapacityError:
        return
    assert int(plan.capacity.max_concurrency) == requests_until_refusal(plan, limits)


@pytest.mark.parametrize("name", ["gemma-3-27b", "llama-4-scout", "gemma-4-31b"])
def test_the_longest_length_is_served_and_a_longer_one_is_not(name: str) -> None:
    limits = GroupingConfig(max_model_len=131072, max_num_batched_tokens=2048)
    memory = 4 << 30
    longest = longest_model_len(MODELS[name], limits, memory)
    assert 1 < longest < 131072
    fits = replace(limits, max_model_len=longest)
    assert requests_until_refusal(plan_model(MODELS[name], fits, memory), fits) == 1
    with pytest.raises(CapacityError, match=f"maximum model length is {longest}"):
        plan_model(MODELS[name], replace(limits, max_model_len=longest + 1), memory)


def test_padding_of_groups_is_the_waste() -> None:
    """Gemma-3-27B: 10 full and 52 window layers in 7 groups of up to 10."""
    limits = GroupingConfig(max_model_len=8192, max_num_batched_tokens=2048)
    plan = plan_model(MODELS["gemma-3-27b"], limits, 40 << 30)
    assert [len(g.layer_names) for g in plan.config.kv_cache_groups] == [
        9, 9, 9, 9, 8, 8, 10
    ]  # fmt: skip
    window, full = 193, 512
    layer_blocks = 10 * full + 52 * window
    assert plan.waste == pytest.approx(1 - layer_blocks / (10 * (full + 6 * window)))
    even = plan_model(MODELS["gpt-oss-20b"], limits, 40 << 30)
    assert even.waste == 0


def test_states_a_block_are_more_and_do_not_grow_with_the_sequence() -> None:
    limits = GroupingConfig(max_model_len=8192, max_num_batched_tokens=2048)
    options = CacheOptions(mamba_cache_mode="all")
    plan = plan_model(MODELS["bamba-9b"], limits, 40 << 30, options)
    none = plan_model(MODELS["bamba-9b"], limits, 40 << 30)
    assert plan.growing_bytes_per_token == none.growing_bytes_per_token
    assert plan.capacity.max_concurrency < none.capacity.max_concurrency
    old = replace(limits, vllm019_arithmetic=True)
    plan = plan_model(MODELS["bamba-9b"], old, 40 << 30, options)
    assert plan.growing_bytes_per_token > none.growing_bytes_per_token


def test_context_parallel_ranks_share_the_growth() -> None:
    limits = GroupingConfig(max_model_len=8192, decode_context_parallel_size=4)
    plan = plan_model(MODELS["deepseek-v3"], limits, 40 << 30)
    assert plan.growing_bytes_per_token == 70272 / 4
    assert plan.capacity.blocks_per_request == 8192 / 4 / 16


def test_nothing_to_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to plan"):
        plan_specs({}, GroupingConfig(max_model_len=1), 1)
