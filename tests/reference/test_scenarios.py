"""Faults that users of such engines met, on real tensors: each answer is that of the
dense forward, each pool comes back whole.

Every test names its scenario. Wherever transfers allow it the content model stands
under the engine. These scenarios are here in part only:

    number | what is left out, and why
    -------+------------------------------------------------------------------------
    7      | adapters and media: this engine has salts only
    10, 11 | which lengths are hit when cached blocks have gaps: the core's tests; here
           | the answers after such hits, and what they lose
    16     | a rewind in place: this engine's loads are asynchronous
    18     | the point of the rewind itself: the scheduler's tests
    22     | refusal at submit: a request that long is refused by its length here
    50     | who is preempted: the scheduler's tests
    63     | which states to keep: a hook's choice, tested with the hooks
"""

import re
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvplugin.contract import CopyJob
from kvplugin.integration.reference import (
    LayerConfig,
    ReferenceEngine,
    SamplingParams,
    dense_generate,
)
from kvplugin.testing import COMPLETES, FAILS, LATE, NEVER_ENDS, Fate
from tests.reference import test_scenarios_of_groups
from tests.reference.bench import (
    Bench,
    of_loads,
    of_stores,
    shaped,
    sources,
    tokens,
    window,
)
from tests.reference.donors import Donor
from tests.reference.models import (
    FULL,
    RECURRENT,
    WINDOW,
    assert_empty,
    compare,
    settings,
    step_to_the_end,
    tiny,
)

SCENARIOS = {
    *(1, 2, 3, 5, 6, 7, 10, 11, 13, 14, 15, 16, 18, 19, 20, 22, 26, 28, 34, 38, 39),
    *(41, 45, 47, 50, 52, 53, 63, 64),
}


def test_every_scenario_is_here() -> None:
    modules = sys.modules[__name__], test_scenarios_of_groups
    found = [item for module in modules for item in vars(module).items()]
    texts = [
        test.__doc__ or ""
        for name, test in found
        if name[:5] == "test_" and callable(test)
    ]
    named = re.findall(r"\bScenario (\d+)\b", " ".join(texts))
    assert set(map(int, named)) == SCENARIOS


# -- blocks that somebody still needs -------------------------------------------------


def test_a_store_reads_what_it_was_started_for() -> None:
    """Scenario 1: 4 usable blocks; A's store is held, B grows to 3 blocks and A is
    preempted. B has to wait until the store has run, and then overwrites what A gave
    up. Then A's keys are asked for."""
    bench = Bench(
        fate=of_stores(NEVER_ENDS), num_blocks=5, max_model_len=16, policy="priority"
    )
    prompt = tokens(8)
    first = bench.add(prompt, 6, priority=1)
    second = bench.add(tokens(3, 1), 9, priority=0)
    requests = bench.engine.scheduler.requests
    for _ in range(8):
        bench.engine.step()
    assert bench.transport.pending
    assert requests[first].request.num_preemptions == 1
    waits_with = requests[second].request.num_computed_tokens
    bench.engine.step()
    assert requests[second].request.num_computed_tokens == waits_with
    bench.transport.release()
    bench.finish()
    assert bench.preemptions
    bench.forget_local()
    assert bench.ask(prompt)


def test_an_ended_requests_blocks_wait_for_the_step_in_flight() -> None:
    """Scenario 2: depth 2, 3 usable blocks, R holds 2 and ends while a step of its is
    in flight; C wants 2."""
    bench = Bench(pipeline_depth=2, num_blocks=4, max_model_len=12)
    prompt = tokens(6)
    stop = dense_generate(bench.model, prompt, 1)
    ended = bench.add(prompt, params={"stop_token_ids": tuple(stop)})
    waiting = bench.add(tokens(7, 1))
    while bench.engine.answers[ended].finish_reason is None:
        bench.engine.step()
    assert bench.engine.scheduler.requests[waiting].request.num_computed_tokens == 0
    assert bench.pool.get_num_free_blocks() < 3
    bench.finish()


@pytest.mark.parametrize("right", [0.0, 0.5])
def test_windows_keep_what_rejected_drafts_do_not_settle(right: float) -> None:
    """Scenario 3: W=8, blocks of 4, three drafts a step that are rejected."""
    layers = (window(8), FULL)
    bench = Bench(layers, right=right, num_drafts=3, max_num_batched_tokens=16)
    bench.ask(tokens(12), 24)
    bench.ask(tokens(12), 24)


def test_a_preempted_request_comes_back_while_its_stores_are_under_way() -> None:
    """Scenario 41: stores that end late, in any order of preemption and return."""
    bench = Bench(fate=of_stores(LATE), num_blocks=17, scheduler_reserve_full_isl=False)
    for turn in range(4):
        for seed in range(5):
            bench.add(tokens(14, seed), 20 + turn)
        bench.finish()
    assert bench.preemptions
    assert len(bench.jobs(store=True)) > 5


def test_deferred_frees_and_preemption_under_two_steps_in_flight() -> None:
    """Scenario 50: what running requests give up comes back a step late."""
    bench = Bench(pipeline_depth=2, num_blocks=17, scheduler_reserve_full_isl=False)
    for seed in range(4):
        bench.add(tokens(12, seed), 40)
    bench.finish()
    assert bench.preemptions


# -- loads ----------------------------------------------------------------------------


def donated(
    layers: Sequence[LayerConfig], **changes: Any
) -> tuple[Donor, ReferenceEngine, Any]:
    """An engine that gets KV from another one of the same settings."""
    model, config = shaped(layers), settings(**changes)
    donor = Donor(model, config)
    return donor, donor.serve(config), model


@pytest.mark.parametrize(
    ("second", "claim"),
    [(FULL, 32), (FULL, 31), (FULL, 16), (WINDOW, 32), (WINDOW, 31), (RECURRENT, 16)],
    ids=lambda case: getattr(case, "kind", case),
)
def test_something_is_left_to_compute(second: LayerConfig, claim: int) -> None:
    """Scenario 5: a prompt of 32 in blocks of 16; the connector claims 32, 31, 16.
    Who has no state after 31 tokens must not claim them."""
    budget = 16 if second is RECURRENT else 64
    donor, engine, model = donated(
        (FULL, second), block_size=16, max_num_batched_tokens=budget
    )
    prompt, params = tokens(32), SamplingParams(max_tokens=4)
    req_id = donor.offer(prompt, claim, params)
    step_to_the_end(engine)
    assert engine.answers[req_id].num_cached_tokens == min(claim, 31)
    compare(model, prompt, engine.answers[req_id])
    assert_empty(engine)


def test_a_failed_load_of_windows_leaves_the_null_block_alone() -> None:
    """Scenario 16: blocks of 16, W=32, a prompt of 96, a load of 80 fails."""
    donor, engine, model = donated((FULL, window(32)), block_size=16, max_model_len=128)
    donor.fate = lambda job: FAILS
    (runner,) = engine.ranks.runners
    nulls = [c.tensors[0][0].fill_(7).clone() for c in runner.tensors.layers.values()]
    prompt, params = tokens(96), SamplingParams(max_tokens=4)
    req_id = donor.offer(prompt, 80, params)
    step_to_the_end(engine)
    compare(model, prompt, engine.answers[req_id])
    for cache, null in zip(runner.tensors.layers.values(), nulls, strict=True):
        assert torch.equal(cache.tensors[0][0], null)
    assert_empty(engine)


def test_an_invalid_block_is_taken_by_its_own_groups_geometry() -> None:
    """Scenario 18: of a load into two groups one block of the second is invalid."""
    donor, engine, model = donated((FULL, window(10)))
    prompt, params = tokens(33), SamplingParams(max_tokens=4)
    req_id = donor.offer(prompt, 32, params)

    def only_one(job: CopyJob) -> Fate:
        donor.workers[0].failed_blocks[req_id] = list(job.parts[1][1][-1:])
        return Fate(error="one block", moved_blocks=10**6)

    donor.fate = only_one
    step_to_the_end(engine)
    compare(model, prompt, engine.answers[req_id])
    assert_empty(engine)


def test_a_failed_load_wakes_its_request() -> None:
    """Scenario 19: one request, and the engine is driven while it says it has work."""
    bench = Bench(fate=of_loads(FAILS))
    bench.ask(tokens(20))
    bench.forget_local()
    bench.ask(tokens(20))
    assert bench.jobs(store=False)


def test_a_waiting_head_does_not_hold_up_a_loaded_request() -> None:
    """Scenario 20: B holds 12 of 20 blocks for its load, A needs 16."""
    donor, engine, model = donated((FULL, FULL), num_blocks=21, max_model_len=80)
    donor.fate = lambda job: NEVER_ENDS
    first, params = tokens(48), SamplingParams(max_tokens=4)
    loading = donor.offer(first, 48, params)
    engine.step()
    second = tokens(62, 1)
    waiting = engine.add_request(second, params)
    engine.step()
    assert engine.manager.block_pool.num_used_blocks == 12
    for transport in donor.transports:
        transport.release()
    step_to_the_end(engine)
    compare(model, first, engine.answers[loading])
    compare(model, second, engine.answers[waiting])
    assert list(engine.answers) == [loading, waiting]
    assert_empty(engine)


@pytest.mark.parametrize("order", ["abort", "completion", "together", "twice"])
def test_an_abort_meets_a_load(order: str) -> None:
    """Scenario 34: four orders of the abort and the end of the load."""
    bench = Bench(fate=of_loads(NEVER_ENDS))
    prompt = tokens(20)
    bench.ask(prompt)
    bench.forget_local()
    free = bench.pool.get_num_free_blocks()
    req_id = bench.add(prompt)
    bench.engine.step()
    (load,) = bench.transport.pending
    held = bench.pool.num_used_blocks
    if order == "abort":
        bench.engine.abort(req_id)
        for _ in range(3):
            bench.engine.step()
            assert bench.pool.num_used_blocks == held  # the copy may still write
        bench.transport.complete(load.id)
    elif order == "completion":
        bench.transport.complete(load.id)
        bench.engine.step()
        bench.engine.abort(req_id)
    else:
        bench.transport.complete(load.id)
        if order == "twice":
            bench.transport.repeat(load.id)
        bench.engine.abort(req_id)
    bench.finish()
    assert bench.pool.get_num_free_blocks() == free
    bench.transport.release()
    bench.ask(prompt)


# -- stores ---------------------------------------------------------------------------


def test_every_block_of_a_long_prompt_is_stored_and_found() -> None:
    """Scenario 38: a prompt of 10 blocks, 4 a step."""
    bench = Bench(fate=of_stores(LATE), max_num_batched_tokens=16)
    bench.ask(tokens(41), 2)
    bench.forget_local()
    assert bench.ask(tokens(41), 2) == 40


def test_a_block_on_its_way_is_not_stored_again() -> None:
    """Scenario 39: A's store is held while B hits the same blocks."""
    bench = Bench(fate=of_stores(NEVER_ENDS))
    bench.add(tokens(12), 1)
    for _ in range(3):
        bench.engine.step()
    bench.add(tokens(12), 1)
    for _ in range(3):
        bench.engine.step()
    stored = sources(bench.jobs(store=True))
    assert len(stored) == len(set(stored)) == 3
    bench.transport.release()
    bench.finish()
    bench.forget_local()
    assert bench.ask([*tokens(12), 1], 1) == 12


def test_host_blocks_that_are_being_loaded_are_not_evicted() -> None:
    """Scenario 47: a host of 4 blocks, two being loaded (held), three more to store."""
    bench = Bench(fate=of_loads(NEVER_ENDS), host_blocks=4)
    bench.ask(tokens(9), 1)
    bench.forget_local()
    bench.add(tokens(9), 1)
    bench.engine.step()
    (load,) = bench.transport.pending
    loading = set(load.parts[0][2])
    bench.add(tokens(13, 1), 1)
    for _ in range(4):
        bench.engine.step()
    later = [j for j in bench.jobs(store=True) if j.id > load.id]
    assert all(loading.isdisjoint(hosts) for job in later for _, _, hosts in job.parts)
    assert len(sources(later)) <= 2
    bench.transport.release()
    bench.finish()
    bench.forget_local()
    for seed, length in ((0, 9), (1, 13)):
        bench.ask(tokens(length, seed), 1)


def test_all_allocations_of_a_chunked_prompt_are_stored() -> None:
    """Scenario 52: a prompt of 48, 16 tokens a step, blocks of 16: three, in order."""
    bench = Bench(fate=of_stores(COMPLETES), block_size=16, max_num_batched_tokens=16)
    req_id = bench.add(tokens(48), 2)
    bench.engine.step()
    row: list[int] = []
    while bench.engine.answers[req_id].finish_reason is None:
        row = list(bench.engine.manager.get_block_ids(req_id)[0]) or row
        bench.engine.step()
    bench.finish()
    assert sources(bench.jobs(store=True)) == row[:3]
    bench.forget_local()
    assert bench.ask([*tokens(48), 1], 2) == 48


def test_a_hit_inside_a_host_chunk_loads_exactly_the_rest() -> None:
    """Scenario 53: 16 engine blocks are one on the host, of which 3 are here."""
    bench = Bench(
        fate=of_stores(COMPLETES), offload={"blocks_per_chunk": 16}, max_model_len=96
    )
    prompt = tokens(66)
    bench.ask(prompt, 2)
    bench.forget_local()
    bench.ask([*prompt[:12], 60, 60], 1)
    assert bench.ask(prompt, 2) == 64
    assert len(sources(bench.jobs(store=False))) == 13


# -- layouts --------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("theirs", ["NHD", "HND"])
@pytest.mark.parametrize("mine", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [2, 4])
def test_kv_from_an_engine_of_another_layout(
    mine: str, theirs: str, ranks: tuple[int, int], block_size: int
) -> None:
    """Scenario 26: heads before tokens or behind them, on one rank or two; with as
    many tokens in a block as heads the shapes are equal. Scenario 28: both groups."""
    model = tiny((FULL, window(10)))
    donor = Donor(
        model,
        settings(layout=theirs, tensor_parallel_size=ranks[0], block_size=block_size),
    )
    engine = donor.serve(
        settings(layout=mine, tensor_parallel_size=ranks[1], block_size=block_size)
    )
    prompt, params = tokens(25), SamplingParams(max_tokens=4)
    req_id = donor.offer(prompt, 24, params)
    step_to_the_end(engine)
    assert engine.answers[req_id].num_cached_tokens == 24
    compare(model, prompt, engine.answers[req_id])
    assert_empty(engine)
