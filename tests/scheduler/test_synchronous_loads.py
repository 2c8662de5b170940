"""Synchronous loads: taken for granted, and undone everywhere if they fail."""

import pytest

from kvplugin.block import NULL_BLOCK
from kvplugin.scheduler import Status
from tests.scheduler.harness import Harness, full, next_token, window
from tests.scheduler.test_random_runs import run as random_run
from tests.testing.lab import Lab


def started(*groups: object, offered: int = 80, **settings: object) -> Harness:
    engine = Harness(
        60,
        list(groups) or [full(16)],
        connects=True,
        synchronously=True,
        max_model_len=256,
        max_num_batched_tokens=64,
        **settings,
    )
    engine.add("a", range(96), max_tokens=3)
    engine.connector.offers["a"] = offered
    return engine


def test_a_hit_counts_at_once() -> None:
    engine = started()
    output = engine.step()
    assert output.scheduled_new_reqs[0].num_computed_tokens == 80
    assert output.num_scheduled_tokens == {"a": 16}
    engine.run()
    assert engine.outputs["a"][0] == next_token(range(96))


def test_a_failed_load_preempts_and_does_not_rewind() -> None:
    """Scenario 16: with window blocks given back meanwhile; depth 2."""
    engine = started(full(16), window(32, 16), pipeline_depth=2)
    engine.schedule()
    bad = engine.rows("a")[0][1]
    engine.schedule()
    engine.land(invalid=[bad])
    entry = engine.scheduler.requests["a"]
    assert (entry.status, entry.request.num_computed_tokens) == (Status.WAITING, 0)
    assert engine.outputs["a"] == [], "the token came of wrong bytes"
    engine.run()
    assert engine.outputs["a"][0] == next_token(range(96))
    assert len(engine.outputs["a"]) == 3
    assert engine.is_idle()


def test_a_failed_load_writes_nothing_into_the_null_block() -> None:
    """Scenario 16, on memory that notices: the lab looks at the null block after each
    step, and a write through an entry that was given back is an error."""
    lab = Lab((full(16), window(32, 16)), 20, depth=2, synchronous=True)
    lab.worker.fails.add("r0")
    lab.add(list(range(96)), 3, remote_tokens=80)
    lab.step()
    assert lab.kv.get_block_ids("r0")[1][:3] == [NULL_BLOCK] * 3
    lab.step()
    assert lab.outputs["r0"] == [], "the token came of wrong bytes"
    assert lab.scheduler.state()["waiting"] == ["r0"]
    lab.drain()
    assert lab.requests["r0"].num_preemptions == 1
    assert len(lab.outputs["r0"]) == 3


def test_everything_computed_on_top_leaves_the_cache() -> None:
    engine = started()
    engine.schedule()
    rows = engine.rows("a")[0]
    engine.land(invalid=[rows[1]])
    cached = [b for b in rows if engine.kv.block_pool.key_of(b) is not None]
    assert cached == [rows[0]]
    assert engine.connector.distrusted == set(rows[1:])


def test_sharers_are_preempted_too() -> None:
    engine = started()
    engine.schedule()
    engine.add("b", [*range(80), *range(200, 210)], max_tokens=2)
    engine.land()
    engine.schedule()
    assert engine.rows("b")[0][:5] == engine.rows("a")[0][:5]
    engine.land(invalid=[engine.rows("a")[0][3]])
    status = {n: e.status for n, e in engine.scheduler.requests.items()}
    assert status == {"a": Status.WAITING, "b": Status.WAITING}
    engine.run()
    assert engine.outputs["b"][0] == next_token([*range(80), *range(200, 210)])
    assert engine.is_idle()


def test_policy_fail_ends_who_loaded_and_spares_who_shared() -> None:
    engine = started(kv_load_failure_policy="fail")
    engine.schedule()
    engine.add("b", [*range(80), *range(200, 210)], max_tokens=2)
    engine.land()
    engine.schedule()
    engine.land(invalid=[engine.rows("a")[0][3]])
    assert engine.reasons == {"a": "error"}
    engine.run()
    assert engine.outputs["b"][0] == next_token([*range(80), *range(200, 210)])


def test_blocks_of_a_request_that_was_aborted_meanwhile_leave_the_cache() -> None:
    engine = started()
    engine.schedule()
    rows = engine.rows("a")[0]
    engine.scheduler.abort_request("a")
    engine.land(invalid=[rows[1]])
    cached = [b for b in rows if engine.kv.block_pool.key_of(b) is not None]
    assert cached == [rows[0]]
    engine.run()
    assert engine.is_idle()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("late", [False, True])
def test_who_lost_its_blocks_before_the_load_failed_does_not_load_again(
    policy: str, late: bool
) -> None:
    """It waits when the failure is told, or has the blocks of another load by then."""
    engine = started(pipeline_depth=2, kv_load_failure_policy=policy)
    engine.schedule()
    bad = engine.rows("a")[0][1]
    engine.scheduler.reset_prefix_cache(reset_running=True)
    if late:
        engine.schedule()
    engine.land(invalid=[bad])
    if policy == "fail":
        assert engine.reasons == {"a": "error"}
    else:
        assert engine.scheduler.requests["a"].skips_external
    engine.run()
    assert engine.connector.lookups == ["a"] * (1 + late)
    if policy == "recompute":
        assert engine.outputs["a"][0] == next_token(range(96))
    assert engine.is_idle()


@pytest.mark.parametrize("times", [1, 2])
def test_every_row_that_was_lost_with_a_step_in_flight_is_followed(times: int) -> None:
    """The blocks of a failed load lose their keys, however often its request has lost
    others since."""
    engine = started(pipeline_depth=2)
    engine.schedule()
    rows = engine.rows("a")[0]
    engine.scheduler.reset_prefix_cache(reset_running=True)
    if times == 2:
        engine.connector.offers.clear()
        engine.schedule()
        rows = [*rows, *engine.rows("a")[0]]
        engine.scheduler.reset_prefix_cache(reset_running=True)
    assert len(set(rows)) == 5 + times
    engine.land(invalid=[rows[0]])
    assert not any(engine.kv.block_pool.key_of(block) is not None for block in rows)
    engine.run()
    assert engine.outputs["a"][0] == next_token(range(96))


def test_rows_are_forgotten_when_their_step_has_landed() -> None:
    """Their blocks are somebody else's then: a failed load of that one is no business
    of who had them before, nor of others that share nothing."""
    engine = Harness(
        40,
        connects=True,
        synchronously=True,
        pipeline_depth=2,
        max_num_batched_tokens=64,
    )
    engine.add("x", range(20), 30)
    engine.schedule()
    old = engine.rows("x")[0]
    engine.scheduler.reset_prefix_cache(reset_running=True)
    engine.land()
    assert engine.scheduler.requests["x"].lost == []
    engine.kv.reset_prefix_cache()
    engine.schedule()
    engine.add("other", range(300, 307), 20)
    engine.add("l", range(600, 612), 5)
    engine.connector.offers["l"] = 8
    engine.schedule()
    engine.land()
    bad = engine.rows("l")[0][0]
    assert bad in old or bad not in engine.rows("x")[0]
    engine.land(invalid=[bad])
    preempted = {
        n: e.request.num_preemptions for n, e in engine.scheduler.requests.items()
    }
    assert preempted == {"x": 1, "other": 0, "l": 1}
    engine.run()
    assert engine.outputs["x"][0] == next_token(range(20))


@pytest.mark.parametrize(
    ("name", "seed"),
    [("chunk+full", 20043), ("full+coarse window", 20055), ("window", 20093)],
)
def test_failed_loads_of_preempted_requests_end_some_day(name: str, seed: int) -> None:
    """Runs in which three requests once took turns for ever."""
    random_run(name, seed, depth=2, synchronous=True)
