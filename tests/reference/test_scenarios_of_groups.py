"""Scenarios of requests with several groups of layers; see `test_scenarios.py`."""

from typing import Any

import pytest

from kvplugin.errors import CapacityError
from kvplugin.integration.reference import (
    LayerConfig,
)
from kvplugin.spec import MambaSpec
from tests.reference.bench import (
    Bench,
    shaped,
    tokens,
    window,
)
from tests.reference.models import (
    FULL,
    RECURRENT,
    WINDOW,
    fewest_blocks,
    settings,
    tiny,
)


@pytest.mark.parametrize("mode", ["all", "align"])
def test_a_hit_brings_the_state_of_exactly_its_length(mode: str) -> None:
    """Scenario 6: the state after as many tokens as are credited, for all lengths; at
    a boundary not that of the whole prompt."""
    bench = Bench((FULL, RECURRENT), mamba_cache_mode=mode, block_size=8)
    hits = {}
    for length in range(1, 27):
        bench.ask(tokens(length, length), 1)
        hits[length] = bench.ask(tokens(length, length), 2)
    assert all(not hit % 8 and hit < length for length, hit in hits.items())
    assert hits[17] == 16
    assert hits[16] == (8 if mode == "all" else 0)  # or no step has ended at 8


def test_other_salts_share_nothing() -> None:
    """Scenario 7: no salt, a salt, and salts that end in what the other begins with."""
    bench, prompt = Bench(), tokens(20)
    for salt in (None, "X", "org_1", "org_12"):
        assert bench.ask(prompt, cache_salt=salt) == 0
    for salt in (None, "X", "org_1", "org_12"):
        assert bench.ask(prompt, cache_salt=salt) == 16


def test_a_drafter_drops_a_block_of_a_window_that_stays_whole() -> None:
    """Scenario 10: W=4, blocks of 2; the hit less one block still has its window."""
    bench = Bench((window(4), window(4)), block_size=2, drafter=True, num_drafts=2)
    bench.ask(tokens(9), 8)
    assert bench.ask(tokens(9), 8) in (0, 6)


def test_a_drafter_costs_one_block_of_a_hit() -> None:
    """Scenario 11: full, window and recurrent layers; 8 blocks and a bit cached."""
    layers = (FULL, window(8), RECURRENT)
    more: dict[str, Any] = {"mamba_cache_mode": "all", "max_model_len": 128}
    plain = Bench(layers, **more)
    drafted = Bench(layers, drafter=True, num_drafts=2, **more)
    sizes = [
        group.kv_cache_spec.block_size
        for bench in (plain, drafted)
        for group in bench.engine.plan.scheduler.kv_cache_groups
    ]
    prompt = tokens(8 * max(sizes) + 5)[:100]
    for bench in (plain, drafted):
        bench.ask(prompt)
    lost = plain.ask(prompt) - drafted.ask(prompt)
    assert lost == max(sizes)


def test_without_its_state_a_hit_is_worth_nothing() -> None:
    """Scenario 13: attention blocks are cached, the states are not."""
    bench = Bench((FULL, RECURRENT), max_model_len=96)
    groups = bench.engine.plan.scheduler.kv_cache_groups
    prompt = tokens(66)
    bench.ask(prompt)
    for index, group in enumerate(groups):
        if isinstance(group.kv_cache_spec, MambaSpec):
            states = bench.pool.cached_blocks(index).values()
            assert states
            bench.engine.manager.evict_blocks(list(states))
    assert bench.ask(prompt) == 0


def test_states_are_found_by_their_own_groups_blocks() -> None:
    """Scenario 14: states every 16 tokens beside smaller attention blocks; a request
    goes on at 48."""
    bench = Bench(
        (FULL, RECURRENT),
        mamba_cache_mode="all",
        mamba_chunk_size=16,
        max_model_len=96,
    )
    prompt = tokens(50)
    bench.ask(prompt)
    assert bench.ask(prompt) == 48


@pytest.mark.parametrize("layers", [(FULL, RECURRENT), (FULL, WINDOW)], ids=str)
def test_what_blocks_held_before_does_not_matter(
    layers: tuple[LayerConfig, ...],
) -> None:
    """Scenario 15: all memory is NaN before each round, and the pool wraps around."""
    few = fewest_blocks(shaped(layers), settings(max_model_len=48)) + 2
    bench = Bench(layers, max_model_len=48, num_blocks=few)
    for _ in range(3):
        assert bench.engine.reset_prefix_cache()
        for runner in bench.engine.ranks.runners:
            for buffer in runner.tensors.buffers:
                buffer.fill_(-1)
        for seed in range(3):
            bench.ask(tokens(21, seed))
    for answer in bench.engine.answers.values():
        for logits in answer.logits.values():
            assert logits.isfinite().all()


def test_what_fits_at_the_start_is_served() -> None:
    """Scenario 22: full and W=32, blocks of 16, 32 tokens a step, 160 tokens."""
    layers = (FULL, window(32))
    limits = {"block_size": 16, "max_model_len": 160, "max_num_batched_tokens": 32}
    config = settings(**limits)
    few = fewest_blocks(tiny(layers), config)
    assert few == 1 + 15
    bench = Bench(layers, num_blocks=few, **limits)
    bench.ask(tokens(157), 3)
    with pytest.raises(CapacityError):
        Bench(layers, num_blocks=few - 1, **limits)


def test_admissions_that_fail_cost_no_states() -> None:
    """Scenario 45: a state is matched, there are no blocks for the rest, abort; many
    times."""
    layers = (FULL, RECURRENT)
    few = fewest_blocks(shaped(layers), settings(max_model_len=48))
    bench = Bench(layers, max_model_len=48, num_blocks=few + 2)
    prompt = tokens(20)
    bench.ask(prompt)
    running = bench.add(tokens(20, 1), 26)
    bench.engine.step()
    refused = 0
    for _ in range(20):
        req_id = bench.add([*prompt, *tokens(20, 2)])
        bench.engine.step()
        waiting = bench.engine.scheduler.requests[req_id].request
        refused += not waiting.num_computed_tokens
        bench.engine.abort(req_id)
        rows = bench.engine.manager.get_block_ids(running)
        held = {block for row in rows for block in row if block}
        assert bench.pool.num_used_blocks == len(held)
    assert refused
    bench.finish()
    bench.ask(prompt)


@pytest.mark.parametrize(("budget", "hits"), [(64, [0, 0, 0]), (16, [0, 48, 48])])
def test_a_shared_beginning_needs_a_state_at_its_end(
    budget: int, hits: list[int]
) -> None:
    """Scenario 63: blocks of 16, prompts of 66 tokens that share 48. States are kept
    where steps end: at 64 alone, in tokens that nobody shares, or at 48 too."""
    bench = Bench(
        (FULL, RECURRENT),
        block_size=16,
        max_model_len=96,
        max_num_batched_tokens=budget,
    )
    asked = [tokens(48) + tokens(18, seed) for seed in (1, 2, 3)]
    assert [bench.ask(prompt) for prompt in asked] == hits
    assert bench.ask(asked[0]) == 64


def test_partial_blocks_go_before_cached_ones() -> None:
    """Scenario 64: A has a full block and a partial one; who comes next takes the
    partial one."""
    bench = Bench(block_size=16, num_blocks=5, max_model_len=32)
    bench.ask(tokens(20), 1)
    for seed in range(1, 4):
        bench.ask(tokens(9, seed), 1)
    assert bench.ask(tokens(20), 1) == 16
