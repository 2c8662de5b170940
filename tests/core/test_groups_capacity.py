"""Blocks of a request and of a pool are what the real manager takes.

A request's peak is looked for by running one through a pool that is never short, and
the capacity by filling a pool with requests that each stop at their fullest.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.errors import CapacityError
from kvplugin.groups import (
    Capacity,
    GroupingConfig,
    generate_scheduler_kv_cache_config,
    get_capacity,
    get_kv_cache_configs,
)
from kvplugin.hooks import Hooks
from kvplugin.manager import KVCacheManager
from kvplugin.request import Request
from kvplugin.spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

ROOMY = 2000


@dataclass(frozen=True)
class Step:
    """Tokens of a step, and how many of them are drafts that are rejected."""

    tokens: int
    rejected: int = 0


def state(block_size: int, mode: str, drafts: int = 0) -> MambaSpec:
    """Its page is that of an attention block of `attention`."""
    return MambaSpec(
        block_size=block_size,
        shapes=((16 * block_size,),),
        dtypes=("int8",),
        mamba_cache_mode=mode,
        num_speculative_blocks=drafts,
    )


def attention(kind: type[KVCacheSpec], block_size: int, **sizes: int) -> KVCacheSpec:
    heads: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": "int8"}
    return kind(block_size=block_size, **heads, **sizes)


def manager_of(config: KVCacheConfig, limits: GroupingConfig) -> KVCacheManager:
    sizes = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
    return KVCacheManager(
        config,
        limits.max_model_len,
        min(sizes),
        enable_caching=False,
        limits=limits,
        hooks=Hooks.of(),
    )


def drive(
    kv: KVCacheManager, request: Request, steps: Iterable[Step], limits: GroupingConfig
) -> Iterator[int]:
    """Blocks in use after each step; ends early where a step does not fit."""
    in_flight: deque[int] = deque(maxlen=limits.max_concurrent_batches)
    for step in steps:
        request.num_in_flight_tokens = sum([*in_flight][1:])
        room = limits.max_model_len - request.num_computed_tokens
        tokens = min(step.tokens, room)
        blocks = kv.allocate_slots(
            request, tokens, num_lookahead_tokens=limits.num_lookahead_tokens
        )
        if blocks is None:
            return
        kept = tokens - min(step.rejected, tokens - 1)
        request.num_computed_tokens += kept
        in_flight.append(kept)
        yield kv.block_pool.num_used_blocks
        if request.num_computed_tokens >= limits.max_model_len:
            return


def schedules(spec: KVCacheSpec, limits: GroupingConfig) -> Iterator[list[Step]]:
    """Ways to run a request of which one meets the worst moment.

    Full steps after a first one of any length meet every position of a step in its
    block. Aligned states pile up where drafts are rejected at every token, or where
    prefill steps of one block are in flight.
    """
    length, batch = limits.max_model_len, limits.max_num_batched_tokens
    if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align":
        drafts = min(spec.num_speculative_blocks, batch - 1)
        yield [Step(1)] + [Step(1 + drafts, drafts)] * length
        yield [Step(spec.block_size)] * length
        return
    for first in range(1, min(batch, length) + 1):
        yield [Step(first)] + [Step(batch)] * length


def worst_moment(
    specs: list[KVCacheSpec], limits: GroupingConfig
) -> tuple[int, list[Step]]:
    """Most blocks of one request, and the steps that lead to it."""
    groups = [KVCacheGroupSpec((f"l{i}",), spec) for i, spec in enumerate(specs)]
    kv = manager_of(KVCacheConfig(ROOMY, (), tuple(groups)), limits)
    aligned = [
        spec
        for spec in specs
        if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align"
    ]
    leader = aligned[0] if aligned else specs[0]
    most, worst = 0, [Step(1)]
    for steps in schedules(leader, limits):
        request = Request("r", range(limits.max_model_len))
        for done, used in enumerate(drive(kv, request, steps, limits)):
            if used > most:
                most, worst = used, steps[: done + 1]
        kv.free(request)
    return most, worst


def limits_of(length: int, batch: int, **changes: Any) -> GroupingConfig:
    return GroupingConfig(max_model_len=length, max_num_batched_tokens=batch, **changes)


# -- states that recycle -------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    block_size=st.integers(1, 8),
    drafts=st.integers(0, 9),
    length=st.integers(1, 60),
    batch=st.integers(1, 20),
    lookahead=st.integers(0, 4),
    depth=st.integers(1, 3),
)
def test_a_state_a_block_is_what_the_worst_moment_holds(
    block_size: int, drafts: int, length: int, batch: int, lookahead: int, depth: int
) -> None:
    spec = state(block_size, "all", drafts)
    limits = limits_of(
        length, batch, num_lookahead_tokens=lookahead, max_concurrent_batches=depth
    )
    most, _ = worst_moment([spec], limits)
    assert spec.max_blocks_per_request(limits) == most


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 8), st.integers(0, 9), st.integers(1, 60), st.integers(1, 4))
def test_aligned_states_are_what_the_worst_moment_holds(
    block_size: int, drafts: int, length: int, blocks: int
) -> None:
    """Where drafts span blocks the first of them skip some, so that only a request
    that goes on beyond them is ever at its fullest."""
    spec = state(block_size, "align", drafts)
    limits = limits_of(length, block_size * blocks)
    most, _ = worst_moment([spec], limits)
    assert most <= spec.max_blocks_per_request(limits)
    if drafts < block_size or length >= 3 * (drafts + 1) + block_size:
        assert spec.max_blocks_per_request(limits) == most


@pytest.mark.parametrize(
    ("block_size", "drafts", "states"),
    [(16, 0, 2), (16, 3, 2), (16, 7, 2), (16, 8, 3), (4, 3, 3), (1, 3, 8)],
)
def test_the_old_state_lives_while_drafts_are_not_settled(
    block_size: int, drafts: int, states: int
) -> None:
    spec = state(block_size, "align", drafts)
    limits = limits_of(1000, 64)
    assert spec.max_blocks_per_request(limits) == states + drafts


def test_aligned_states_of_steps_in_flight() -> None:
    """Each step leaves a state, and none is given back before it has settled."""
    spec = state(4, "align")
    for depth in (1, 2, 3):
        limits = limits_of(100, 16, max_concurrent_batches=depth)
        most, _ = worst_moment([spec], limits)
        assert spec.max_blocks_per_request(limits) == most == 1 + depth


STEPS = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 9)), min_size=1)


def check_random_steps(
    spec: MambaSpec, limits: GroupingConfig, prompt: int, cuts: list[tuple[int, int]]
) -> None:
    """Steps as the scheduler cuts them: no drafts in a prefill; mode `align` ends its
    steps at block boundaries until the last one of the prompt is behind."""
    groups = (KVCacheGroupSpec(("l",), spec),)
    kv = manager_of(KVCacheConfig(ROOMY, (), groups), limits)
    request = Request("r", range(limits.max_model_len))
    unit = spec.block_size if spec.mamba_cache_mode == "align" else 1
    most = spec.max_blocks_per_request(limits)
    for i in range(limits.max_model_len):
        asked, rejected = cuts[i % len(cuts)]
        done, batch = request.num_computed_tokens, limits.max_num_batched_tokens
        if done < prompt // unit * unit:
            ahead = prompt // unit * unit - done
            step = Step(min(max(min(asked, batch) // unit, 1) * unit, ahead))
        elif done < prompt:
            step = Step(min(prompt - done, batch))
        else:
            drafts = min(spec.num_speculative_blocks, batch - 1, asked)
            step = Step(1 + drafts, min(rejected, drafts))
        for used in drive(kv, request, [step], limits):
            assert used <= most
        if request.num_computed_tokens >= limits.max_model_len:
            return


@settings(deadline=None, max_examples=100)
@given(
    st.integers(1, 8),
    st.integers(0, 7),
    st.integers(1, 60),
    st.integers(1, 4),
    st.sampled_from(["all", "align"]),
    STEPS,
    st.data(),
)
def test_no_steps_hold_more_states(
    block_size: int,
    drafts: int,
    length: int,
    blocks: int,
    mode: str,
    cuts: list[tuple[int, int]],
    data: st.DataObject,
) -> None:
    prompt = data.draw(st.integers(1, length))
    spec = state(block_size, mode, drafts)
    check_random_steps(spec, limits_of(length, block_size * blocks), prompt, cuts)


@settings(deadline=None, max_examples=100)
@given(
    st.integers(1, 4),
    st.integers(0, 9),
    st.integers(1, 60),
    st.integers(1, 4),
    STEPS,
    st.data(),
)
def test_no_steps_hold_more_aligned_states_where_drafts_span_blocks(
    block_size: int,
    drafts: int,
    length: int,
    blocks: int,
    cuts: list[tuple[int, int]],
    data: st.DataObject,
) -> None:
    prompt = data.draw(st.integers(1, length))
    spec = state(block_size, "align", block_size + drafts)
    check_random_steps(spec, limits_of(length, block_size * blocks), prompt, cuts)


def test_aligned_prefill_steps_in_flight_lose_no_state() -> None:
    spec = state(4, "align")
    limits = limits_of(200, 16, max_concurrent_batches=2)
    groups = (KVCacheGroupSpec(("l",), spec),)
    kv = manager_of(KVCacheConfig(ROOMY, (), groups), limits)
    request = Request("r", range(200))
    used = list(drive(kv, request, [Step(16)] * 12, limits))
    assert max(used) == spec.max_blocks_per_request(limits) == 3


def test_vllm_019_counts_states_without_recycling() -> None:
    old = limits_of(1000, 100, vllm019_arithmetic=True)
    assert state(16, "all", 3).max_blocks_per_request(old) == 63
    assert state(4, "align", 3).max_blocks_per_request(old) == 5


# -- pools ---------------------------------------------------------------------------


def resolved(
    specs: list[KVCacheSpec], limits: GroupingConfig
) -> tuple[KVCacheManager, Capacity]:
    layers = {f"l{i}": spec for i, spec in enumerate(specs)}
    found = get_kv_cache_configs([layers], limits, [0])
    config = generate_scheduler_kv_cache_config(found.configs)
    return manager_of(config, limits), get_capacity(found.configs[0], limits)


def requests_until_refusal(
    kv: KVCacheManager, steps: list[Step], limits: GroupingConfig
) -> int:
    """Equal requests, each left at the end of `steps`."""
    for count in range(ROOMY):
        request = Request(f"r{count}", range(limits.max_model_len))
        if not kv.can_fit_full_sequence(request):
            return count
        if len(list(drive(kv, request, steps, limits))) < len(steps):
            return count
    raise AssertionError("the pool has no end")


def one_spec(block_size: int) -> st.SearchStrategy[KVCacheSpec]:
    small, size = st.integers(1, 20), block_size
    draw_mode = st.tuples(st.sampled_from(["all", "align"]), st.integers(0, 3))
    return st.one_of(
        st.just(attention(FullAttentionSpec, size)),
        small.map(lambda n: attention(SlidingWindowSpec, size, sliding_window=n)),
        small.map(
            lambda n: attention(ChunkedLocalAttentionSpec, size, attention_chunk_size=n)
        ),
        small.map(
            lambda n: attention(SinkFullAttentionSpec, size, sink_len=n // size * size)
        ),
        draw_mode.map(lambda mode: state(size, mode[0], min(mode[1], size - 1))),
    )


MODELS = st.integers(1, 6).flatmap(
    lambda size: st.lists(one_spec(size), min_size=1, max_size=3)
)


@settings(deadline=None, max_examples=150)
@given(MODELS, st.integers(1, 40), st.integers(1, 12), st.integers(2, 120))
def test_a_pool_takes_as_many_requests_as_its_capacity_says(
    specs: list[KVCacheSpec], length: int, batch: int, blocks: int
) -> None:
    """Exactly, for one group; several need not be at their fullest together."""
    batch = max(batch, specs[0].block_size)
    limits = limits_of(length, batch, num_gpu_blocks_override=blocks)
    try:
        kv, capacity = resolved(specs, limits)
    except CapacityError:
        return
    assert capacity.usable_blocks == kv.block_pool.num_usable_blocks
    managed = [m.kv_cache_spec for m in kv.coordinator.single_type_managers]
    most, steps = worst_moment(managed, limits)
    sinks = sum(spec.reserved_blocks for spec in managed)
    count = requests_until_refusal(kv, steps, limits)
    kv.check()
    assert most <= capacity.blocks_per_request
    assert count >= int(capacity.max_concurrency) >= 1
    assert capacity.usable_blocks == blocks - 1 - sinks
    if len(managed) == 1:
        assert most == capacity.blocks_per_request
        assert count == int(capacity.max_concurrency)


def test_the_smallest_pool_that_passes_completes_a_request_of_every_length() -> None:
    """States for drafts: what the check at start lets pass is admitted and ends."""
    spec = state(16, "all", 2)
    limits = limits_of(64, 64)
    needed = spec.max_blocks_per_request(limits)
    page = spec.page_size_bytes
    with pytest.raises(CapacityError):
        get_kv_cache_configs([{"m": spec}], limits, [page * needed])
    found = get_kv_cache_configs([{"m": spec}], limits, [page * (needed + 1)])
    kv = manager_of(found.configs[0], limits)
    for length in range(1, 65):
        request = Request(f"r{length}", range(length))
        assert kv.can_fit_full_sequence(request)
        assert kv.allocate_slots(request, length) is not None
        kv.free(request)


def test_sink_blocks_are_no_room() -> None:
    spec = attention(SinkFullAttentionSpec, 16, sink_len=32)
    page, limits = spec.page_size_bytes, limits_of(128, 128)
    with pytest.raises(CapacityError, match="maximum model length is 96"):
        get_kv_cache_configs([{"a": spec}], limits, [page * 9])
    found = get_kv_cache_configs([{"a": spec}], limits, [page * 11])
    capacity = get_capacity(found.configs[0], limits)
    assert (capacity.usable_blocks, capacity.max_concurrency) == (8, 1.0)
    kv = manager_of(found.configs[0], limits)
    assert kv.can_fit_full_sequence(Request("r", range(128)))
    fitted = limits_of(128, 128, auto_fit_max_model_len=True)
    fits = get_kv_cache_configs([{"a": spec}], fitted, [page * 9])
    assert fits.config.max_model_len == 96


def test_sinks_count_once_a_group_and_not_in_vllm_019() -> None:
    wide = attention(SinkFullAttentionSpec, 16, sink_len=32)
    specs = {
        "a": wide,
        "b": attention(SinkFullAttentionSpec, 16, sink_len=32, head_size_v=16),
    }
    limits = limits_of(128, 128, num_gpu_blocks_override=20)
    found = get_kv_cache_configs([specs], limits, [0])
    assert get_capacity(found.configs[0], limits).usable_blocks == 17
    old = limits_of(128, 128, vllm019_arithmetic=True)
    found = get_kv_cache_configs([{"a": wide}], old, [wide.page_size_bytes * 8])
    assert get_capacity(found.configs[0], old).usable_blocks == 8
