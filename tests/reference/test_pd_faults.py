"""Requests that end, lose their blocks or read in vain, in whatever state they are."""

from functools import partial
from typing import Any

import pytest

from tests.reference.bench import tokens, window
from tests.reference.models import FULL, RECURRENT, compare, step_to_the_end
from tests.reference.pd import HANDS_OVER, Held, Pair, Time, patiently

MIXES: list[Any] = [(FULL, FULL), (FULL, window(9)), (RECURRENT, FULL)]

# -- aborts ----------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["waiting", "running", "handed over"])
def test_aborts_on_the_producer(when: str) -> None:
    with Pair(block_size=8, max_num_batched_tokens=16) as pair:
        id_ = pair.p.add(tokens(40), 1, HANDS_OVER)
        if when == "running":
            pair.p.engine.step()
        if when == "handed over":
            patiently(lambda: pair.p.is_done(id_), "the prefill", pair.p.engine)
        pair.p.engine.abort(id_)
        pair.p.engine.step()
        answer = pair.p.answer(id_)
        if when == "handed over":  # it has ended: the lease is the consumer's
            assert answer.kv_transfer_params is not None
            pair.decode(tokens(40), answer.kv_transfer_params)
        else:
            assert (answer.finish_reason, answer.kv_transfer_params) == ("abort", None)
            pair.until(lambda: not pair.p.engine.has_work(), "nothing")
            assert pair.p.count("handovers") == 0


STATES = ["arrived", "asked", "granted", "ordered", "read", "loaded", "running"]


@pytest.mark.parametrize("layers", MIXES)
@pytest.mark.parametrize("state", STATES)
def test_scenario_58_aborts_on_the_consumer(state: str, layers: Any) -> None:
    """The producer's blocks come back, not at the lease's end but at once; and a read
    under way ends before anybody gets its blocks."""
    with Pair(layers, block_size=8) as pair:
        params = pair.prefill(tokens(40))
        held = Held(pair.d)
        half: Any = pair.d.engine.scheduler_half
        questions = half._pulls._openings._questions
        hear = questions.hear
        if state == "asked":
            questions.hear = lambda wait=0.0: False  # no answer has come yet
        id_ = pair.d.add(tokens(40), 8, params)
        if state == "asked":
            pair.d.engine.step()
            questions.hear = hear
        elif state == "granted":
            pull = half._pulls._pulls[id_]

            def granted() -> bool:
                half._pulls.hear()
                return pull.grant is not None

            patiently(granted, "the grant", pair.p.engine)
        elif state != "arrived":
            pair.until(lambda: bool(held.orders), "the order")
        if state in ("loaded", "running"):
            held.let_go()
            entry = pair.d.engine.scheduler.requests[id_]
            pair.until(lambda: entry.status == state, state)
        pair.d.engine.abort(id_)
        if state in ("ordered", "read"):
            busy = pair.d.num_used_blocks
            for _ in range(10):
                pair.step()
            assert pair.d.num_used_blocks == busy > 0, "the read may still write them"
            assert pair.p.num_used_blocks > 0, "and still reads these"
            held.let_go()
        pair.drain()
        assert pair.d.answer(id_).finish_reason == "abort"
        assert pair.p.count("closed_leases") == 1
        assert pair.d.count("reads") == (
            state in ("ordered", "read", "loaded", "running")
        )


def test_scenario_25_a_request_cancelled_before_the_consumer_knows_of_it() -> None:
    """The client went away between the two: freed at the lease's end, not later."""
    clock = Time()
    with Pair(
        block_size=8,
        producer={"clock": clock, "connector": {"kv_lease_duration": 30.0}},
    ) as pair:
        pair.prefill(tokens(40))
        clock.now = 29.9
        for _ in range(5):
            pair.p.engine.step()
        assert pair.p.num_used_blocks == 5
        clock.now = 30.0
        patiently(lambda: not pair.p.engine.has_work(), "the end", pair.p.engine)
        assert pair.p.num_used_blocks == 0


# -- preemptions -----------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("layers", MIXES)
def test_preemptions_on_the_producer(layers: Any, depth: int) -> None:
    """What is handed over is what was computed last."""
    tight = {
        "num_blocks": 42,
        "max_model_len": 72,
        "scheduler_reserve_full_isl": False,
        "pipeline_depth": depth,
        "max_num_batched_tokens": 40,
    }
    with Pair(layers, block_size=4, producer=tight) as pair:
        prompts = [tokens(30 + i, seed=i) for i in range(6)]
        ids = [pair.p.add(prompt, 12, HANDS_OVER) for prompt in prompts]
        requests = [pair.p.engine.scheduler.requests[id_].request for id_ in ids]
        done: dict[str, str] = {}

        def passed_on() -> bool:
            for id_, prompt in zip(ids, prompts, strict=True):
                if id_ not in done and pair.p.is_done(id_):
                    answer = pair.p.answer(id_)
                    assert answer.kv_transfer_params is not None
                    ours = [*prompt, *answer.token_ids]
                    done[id_] = pair.d.add(ours, 3, answer.kv_transfer_params)
            return len(done) == 6 and pair.d.is_done(*done.values())

        pair.until(passed_on, "all")
        assert sum(request.num_preemptions for request in requests)
        for id_, mine in done.items():
            pair.p.compare(id_)
            pair.d.compare(mine)
        assert pair.d.count("failed_reads") == 0


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("layers", MIXES)
def test_scenario_42_a_prefill_preempted_in_its_last_step(
    layers: Any, reset: bool
) -> None:
    """Two steps in flight, one token to generate; between the step's dispatch and its
    output the request loses its blocks. It is computed again and handed over: what is
    read is right. Or nothing is handed over, and its client is told so."""
    with Pair(layers, block_size=8, producer={"pipeline_depth": 2}) as pair:
        prompt = tokens(40)
        id_ = pair.p.add(prompt, 1, HANDS_OVER)
        scheduler = pair.p.engine.scheduler
        request = scheduler.requests[id_].request
        pair.p.engine.step()  # dispatched, not heard
        assert id_ in scheduler.requests
        if reset:
            pair.p.engine.scheduler.reset_prefix_cache(reset_running=True)
        else:
            scheduler._roster.preempt(scheduler.requests[id_])
        assert request.num_preemptions == 1
        patiently(lambda: pair.p.is_done(id_), "the prefill", pair.p.engine)
        pair.p.compare(id_)
        params = pair.p.answer(id_).kv_transfer_params
        assert params is not None
        assert params["do_remote_prefill"]
        assert all(any(row) for row in params["remote_block_ids"])
        assert pair.decode(prompt, params).num_cached_tokens == 39


@pytest.mark.parametrize("layers", MIXES)
def test_preemptions_on_the_consumer(layers: Any) -> None:
    """After its read a request that loses its blocks computes: there is one read."""
    tight = {
        "num_blocks": 46,
        "max_model_len": 96,
        "scheduler_reserve_full_isl": False,
    }
    with Pair(layers, block_size=4, consumer=tight) as pair:
        prompts = [tokens(30 + i, seed=i) for i in range(6)]
        handed = [pair.prefill(prompt) for prompt in prompts]
        ids = [
            pair.d.add(prompt, 20, params)
            for prompt, params in zip(prompts, handed, strict=True)
        ]
        requests = [pair.d.engine.scheduler.requests[id_].request for id_ in ids]
        pair.until(lambda: pair.d.is_done(*ids), "all")
        assert sum(request.num_preemptions for request in requests)
        for id_ in ids:
            pair.d.compare(id_)
        assert pair.d.count("reads") <= 6
        assert pair.d.count("failed_reads") == 0


# -- reads that fail or do not end -----------------------------------------------------


def test_a_failed_read_is_computed_or_fails_as_the_engine_is_told() -> None:
    for policy, reason in (("recompute", "length"), ("fail", "error")):
        consumer = {"kv_load_failure_policy": policy}
        with Pair(block_size=8, consumer=consumer) as pair:
            params = pair.prefill(tokens(40))
            worker: Any = pair.d.engine.worker_halves[0]
            worker._refusal_of = lambda order: "broken by the test"
            ids = [pair.d.add(tokens(40), 4, params)]
            pair.until(partial(pair.d.is_done, *ids), "the end")
            assert pair.d.answer(ids[0]).finish_reason == reason
            if reason == "length":
                pair.d.compare(ids[0])


@pytest.mark.parametrize("layers", MIXES)
def test_a_read_that_does_not_end_is_not_waited_for(layers: Any) -> None:
    """Its request computes; its blocks are nobody else's until it ends."""
    clock = Time()
    with Pair(
        layers,
        block_size=8,
        consumer={"clock": clock, "connector": {"transfer_timeout_s": 30.0}},
    ) as pair:
        params = pair.prefill(tokens(40))
        held = Held(pair.d)
        id_ = pair.d.add(tokens(40), 4, params)
        pair.until(lambda: bool(held.orders), "the order")
        clock.now += 31
        pair.until(lambda: pair.d.is_done(id_), "the answer")
        pair.d.compare(id_)
        for _ in range(10):
            pair.step()
        assert pair.d.num_used_blocks, "the read may still write"
        assert pair.d.count("given_up_reads") == 1
        pair.decode(tokens(50, seed=2), None)
        held.let_go()
        pair.drain()
        # The peer of a read that hangs is dead for a while, then asked again.
        clock.now += 1000
        assert pair.serve(tokens(41, seed=3)).num_cached_tokens == 40


def test_hostile_parameters_are_computed() -> None:
    """Whatever is wrong with them: one line in the log, no block more than without."""
    with Pair(block_size=8) as pair:
        params = pair.prefill(tokens(20))
        wrong: dict[str, Any] = {
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": 70_000,
            "remote_engine_id": 5,
            "remote_request_id": "x" * 10_000,
            "remote_num_tokens": -1,
            "do_remote_prefill": "yes",
            "transfer_mode": "push",
        }
        for i, (field, value) in enumerate(wrong.items(), 20):
            answer = pair.decode(tokens(20, seed=i), params | {field: value})
            assert answer.num_cached_tokens == 0
        assert pair.d.count("invalid_params") == len(wrong)
        guesses = {
            "remote_request_id": params["remote_request_id"][:-1] + "0",
            "remote_engine_id": "another",
        }
        for i, (field, value) in enumerate(guesses.items()):
            if params[field] != value:
                ours = tokens(20, seed=50 + i)
                assert not pair.decode(ours, params | {field: value}).num_cached_tokens
        # Who knows a lease's name may end it; the next one is nobody's business.
        assert pair.serve(tokens(22, seed=90)).num_cached_tokens == 21


def test_roles_are_kept() -> None:
    """A consumer hands nothing over; a producer reads nothing."""
    with Pair(block_size=8) as pair:
        id_ = pair.d.add(tokens(20), 1, HANDS_OVER)
        pair.until(lambda: pair.d.is_done(id_), "the answer")
        assert pair.d.answer(id_).kv_transfer_params is None
        params = pair.prefill(tokens(30))
        mine = pair.p.add(tokens(30), 2, params)
        pair.until(lambda: pair.p.is_done(mine), "the answer")
        compare(pair.model, tokens(30), pair.p.answer(mine))
        assert pair.p.count("reads") == 0
        pair.decode(tokens(30), params)
        step_to_the_end(pair.p.engine)
