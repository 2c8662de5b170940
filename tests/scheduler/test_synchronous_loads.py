"""Synchronous loads: taken for granted, and undone everywhere if they fail."""

from kvplugin.block import NULL_BLOCK
from kvplugin.scheduler import Status
from tests.scheduler.harness import Harness, full, next_token, window
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
    assert engine.connector.distrusted == {rows[1]}


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
