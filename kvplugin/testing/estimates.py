"""Oracle 7: what the estimator says is what the manager does."""

from collections import deque

from kvplugin.groups.capacity import get_capacity
from kvplugin.manager import KVCacheManager
from kvplugin.request import Request
from kvplugin.spec import EngineLimits, KVCacheConfig


def brute_force_blocks(config: KVCacheConfig, limits: EngineLimits) -> int:
    """Most blocks that a request of `max_model_len` tokens holds at one time.

    Seen by running one, for every length of its first step: full steps after a first
    one of any length meet every position of a step in its block. Meant for limits of
    some hundred tokens. No drafts are verified on the way, so what states of rejected
    ones take is not seen.
    """
    first_steps = range(1, min(limits.max_num_batched_tokens, limits.max_model_len) + 1)
    return max(_peak(config, limits, first) for first in first_steps)


def _peak(config: KVCacheConfig, limits: EngineLimits, first_step: int) -> int:
    length, encoder = limits.max_model_len, limits.max_num_encoder_input_tokens
    block_sizes = [g.kv_cache_spec.block_size for g in config.kv_cache_groups]
    draft_states = sum(
        getattr(g.kv_cache_spec, "num_speculative_blocks", 0)
        for g in config.kv_cache_groups
    )
    # Nothing is reused before its time: so many blocks are always enough.
    rows = sum((length + encoder) // size + 2 for size in block_sizes) + draft_states
    roomy = KVCacheConfig(1 + rows, config.kv_cache_tensors, config.kv_cache_groups)
    manager = KVCacheManager(
        roomy, length, min(block_sizes), enable_caching=False, limits=limits
    )
    request = Request("r", range(length))
    in_flight: deque[int] = deque(maxlen=limits.max_concurrent_batches - 1)
    peak, step = 0, first_step
    while request.num_computed_tokens < length:
        step = min(step, length - request.num_computed_tokens)
        request.num_in_flight_tokens = sum(in_flight)
        blocks = manager.allocate_slots(
            request,
            step,
            num_lookahead_tokens=limits.num_lookahead_tokens,
            num_encoder_tokens=0 if request.num_computed_tokens else encoder,
        )
        if blocks is None:
            raise AssertionError(f"a request of {length} tokens does not fit {rows}")
        request.num_computed_tokens += step
        in_flight.append(step)
        peak = max(peak, manager.block_pool.num_used_blocks)
        step = limits.max_num_batched_tokens
    return peak


def assert_estimate(config: KVCacheConfig, limits: EngineLimits) -> None:
    """Blocks a request, and so the concurrency, are what brute force finds.

    Raises:
        AssertionError: with both figures.
    """
    capacity = get_capacity(config, limits)
    brute = brute_force_blocks(config, limits)
    if capacity.blocks_per_request != brute:
        raise AssertionError(
            f"a request of {limits.max_model_len} tokens is estimated to hold "
            f"{capacity.blocks_per_request} blocks, by brute force it holds {brute}"
        )
    usable = capacity.usable_blocks
    if capacity.max_concurrency != usable / brute:
        raise AssertionError(
            f"{capacity.max_concurrency} requests are estimated to fit {usable} blocks "
            f"of which each takes {brute}"
        )
