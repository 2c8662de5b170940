"""Two steps in flight: nothing is handed out, freed or credited too early."""

from itertools import pairwise

import pytest

from kvplugin.errors import IntegrityError
from kvplugin.scheduler import ModelOutput, Status
from tests.scheduler.harness import Harness, full, loaded, next_token, window


def expected(prompt: list[int], n: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def test_outputs_are_those_of_one_step_at_a_time() -> None:
    prompts = {f"r{i}": [*range(i, i + 10 + i)] for i in range(4)}
    for depth in (1, 2):
        engine = Harness(12, pipeline_depth=depth)
        for name, prompt in prompts.items():
            engine.add(name, prompt, max_tokens=6)
        engine.run()
        assert engine.outputs == {n: expected(p, 6) for n, p in prompts.items()}
        assert engine.is_idle()


def test_a_request_is_scheduled_before_its_last_token_is_known() -> None:
    engine = Harness(pipeline_depth=2)
    engine.add("a", range(8), max_tokens=3)
    assert engine.schedule().num_scheduled_tokens == {"a": 8}
    assert engine.schedule().num_scheduled_tokens == {"a": 1}
    engine.land()
    assert engine.schedule().num_scheduled_tokens == {"a": 1}
    engine.land()
    assert engine.schedule().num_scheduled_tokens == {}, "its last token is under way"
    engine.run()
    assert engine.outputs["a"] == expected([*range(8)], 3)


def test_more_steps_than_the_depth_are_refused() -> None:
    engine = Harness(pipeline_depth=2)
    engine.add("a", range(8), max_tokens=9)
    engine.schedule()
    engine.schedule()
    with pytest.raises(IntegrityError, match="2 steps are in flight"):
        engine.scheduler.schedule()


def test_outputs_come_in_order() -> None:
    engine = Harness(pipeline_depth=2)
    engine.add("a", range(8), max_tokens=9)
    engine.schedule()
    engine.schedule()
    engine.in_flight.reverse()
    with pytest.raises(IntegrityError, match="output of step 2 comes, in flight"):
        engine.land()


def test_blocks_of_a_step_in_flight_are_not_handed_out() -> None:
    """Scenario 2: R ends by the output of step N while N+1 writes its blocks, and C
    wants them for a load."""
    engine = Harness(3, pipeline_depth=2, connects=True)
    engine.add("r", range(7), max_tokens=4)
    last = next_token(range(7))
    engine.scheduler.requests["r"].stop_token_ids = frozenset([last])
    engine.schedule()
    engine.schedule()  # writes token 7 into block 2 of r
    engine.add("c", range(50, 58))
    engine.connector.offers["c"] = 7
    engine.land()
    assert engine.outputs["r"] == [last]
    assert engine.kv.block_pool.get_num_free_blocks() == 1, "step 2 may still write"
    engine.schedule()
    assert engine.scheduler.requests["c"].status is Status.WAITING
    engine.land()
    engine.schedule()
    assert engine.scheduler.requests["c"].status is Status.LOADING
    assert len(engine.rows("c")[0]) == 2
    engine.land()
    engine.step(loaded("c"))
    engine.run()
    assert engine.outputs["c"] == expected([*range(50, 58)], 1)
    assert engine.is_idle()
    assert engine.kv.block_pool.get_num_free_blocks() == 3


def test_fenced_victims_are_not_preempted_in_vain() -> None:
    """Scenario 50: three run, a step in flight holds the blocks of each, and one needs
    more: at most one victim until blocks come back, then progress."""
    engine = Harness(6, pipeline_depth=2, max_num_batched_tokens=32)
    requests = [
        engine.add(f"r{i}", range(10 * i, 10 * i + 7), max_tokens=8) for i in range(3)
    ]
    engine.schedule()
    engine.schedule()
    engine.land()
    assert len(engine.schedule().num_scheduled_tokens) < 3, "there is room for all"
    assert sum(request.num_preemptions for request in requests) == 1
    assert engine.scheduler.state()["held"], "the victim's blocks are fenced"
    engine.land()
    for _ in range(2):
        before = sum(request.num_preemptions for request in requests)
        engine.schedule()
        assert sum(request.num_preemptions for request in requests) <= before + 1
        engine.land()
    engine.run()
    for i in range(3):
        assert engine.outputs[f"r{i}"] == expected([*range(10 * i, 10 * i + 7)], 8)
    assert engine.is_idle()


def test_a_result_that_its_request_did_not_survive_is_discarded() -> None:
    engine = Harness(pipeline_depth=2)
    engine.add("a", range(8), max_tokens=5)
    engine.schedule()
    engine.land()
    engine.schedule()
    assert not engine.scheduler.reset_prefix_cache(reset_running=True)
    engine.land()
    assert engine.outputs["a"] == expected([*range(8)], 1), "not what came of step 2"
    engine.run()
    assert engine.outputs["a"] == expected([*range(8)], 5)


def test_window_blocks_are_freed_on_settled_tokens() -> None:
    """Scenario 3: W=8, 12 settled tokens, then 1 token and 3 drafts, all rejected."""
    engine = Harness(20, [window(8)], drafts=3)
    request = engine.add("a", range(11), max_tokens=8)
    engine.step()
    engine.step(accepted=0)
    assert request.num_computed_tokens == 12
    output = engine.schedule()
    assert output.scheduled_spec_decode_tokens == {"a": [1, 1, 1]}
    assert request.num_computed_tokens == 16
    # An engine that schedules the next step now must not free for these 16.
    assert engine.kv.allocate_slots(request, 1) is not None
    assert [bool(block) for block in engine.rows("a")[0]] == [False, *[True] * 4]
    engine.land(accepted=0)
    assert request.num_computed_tokens == 13
    engine.schedule()
    assert all(engine.rows("a")[0][1:]), "positions 6.. are still read"
    engine.land()
    engine.run()
    assert engine.is_idle()


def fill_and_land(engine: Harness, accepted: int | None = None) -> dict[str, int]:
    """Schedule as many steps as may be in flight, and let one land; what the last one
    computes."""
    while len(engine.in_flight) < engine.config.pipeline_depth:
        output = engine.schedule()
    engine.land(accepted=accepted)
    return dict(output.num_scheduled_tokens)


def test_drafts_are_verified_every_second_step_and_others_fill_the_pipeline() -> None:
    engine = Harness(30, drafts=2, pipeline_depth=2, max_num_batched_tokens=64)
    engine.add("a", range(9), 30)
    batches = [fill_and_land(engine) for _ in range(3)]
    engine.add("b", range(50, 59), 30)
    batches += [fill_and_land(engine) for _ in range(8)]
    # The first drafts come when a step is under way: they are stale.
    assert batches[:3] == [{"a": 1}, {}, {"a": 3}]
    by_name = {n: [batch.get(n, 0) for batch in batches[5:]] for n in "ab"}
    for name, tokens in by_name.items():
        assert set(pairwise(tokens)) == {(0, 3), (3, 0)}, name
    engine.run()
    assert engine.is_idle()


@pytest.mark.parametrize("fresh", [[12, 12], [12], []])
@pytest.mark.parametrize("stale", [[11, 11], []])
def test_drafts_of_an_output_that_was_overtaken_are_not_used(
    stale: list[int], fresh: list[int]
) -> None:
    engine = Harness(30, pipeline_depth=2)
    engine.add("a", range(9), 20)
    scheduler = engine.scheduler
    assert scheduler.schedule().num_scheduled_tokens == {"a": 9}
    assert scheduler.schedule().num_scheduled_tokens == {"a": 1}, "overtakes step 1"
    scheduler.update_from_output(ModelOutput(1, {"a": [7]}, {"a": stale}))
    third = scheduler.schedule()
    assert not third.scheduled_spec_decode_tokens
    assert bool(third.num_scheduled_tokens) != bool(stale), "waits for fresh ones"
    scheduler.update_from_output(ModelOutput(2, {"a": [8]}, {"a": fresh}))
    if stale:
        fourth = scheduler.schedule()
        assert fourth.scheduled_spec_decode_tokens == ({"a": fresh} if fresh else {})
        assert fourth.num_scheduled_tokens == {"a": 1 + len(fresh)}


def test_a_state_without_progress_is_the_same_one() -> None:
    """No number in it goes on by itself, whatever is in flight."""
    for depth in (1, 2):
        engine = Harness(pipeline_depth=depth, connects=True, load_timeout_s=9)
        engine.add("a", range(20))
        engine.connector.offers["a"] = 16
        engine.add("b", range(50, 58))
        engine.connector.later.add("b")
        for _ in range(3):
            fill_and_land(engine)
        before = engine.scheduler.state()
        for _ in range(3):
            assert fill_and_land(engine) == {}
            assert engine.scheduler.state() == before
        if depth == 1:
            engine.schedule()
        engine.land(loaded("a"))
        assert engine.scheduler.state() != before


@pytest.mark.parametrize("depth", [1, 2])
def test_rejected_drafts_are_computed_again(depth: int) -> None:
    for accepted in (0, 1, 2):
        engine = Harness(20, [full(), window(6)], drafts=2, pipeline_depth=depth)
        engine.add("a", range(9), max_tokens=9)
        while engine.scheduler.requests:
            fill_and_land(engine, accepted)
        engine.run()
        assert len(engine.outputs["a"]) == 9
        assert engine.is_idle()
