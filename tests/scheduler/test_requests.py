"""What may come in, what goes out, and what the counters say."""

from dataclasses import asdict
from itertools import count

import pytest

from kvplugin.groups.capacity import get_capacity
from kvplugin.request import RequestError
from kvplugin.spec import EngineLimits, KVCacheSpec
from kvplugin.testing import CounterWatch
from tests.core.manager_setups import mamba
from tests.scheduler.harness import Harness, full, loaded, next_token, window


def test_an_id_that_is_in_use_is_refused() -> None:
    engine = Harness()
    engine.add("a", range(4))
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add("a", range(4))


@pytest.mark.parametrize(("tokens", "max_tokens"), [(60, 5), (64, 1)])
def test_a_request_that_is_too_long_is_refused(tokens: int, max_tokens: int) -> None:
    with pytest.raises(RequestError, match="max_model_len=64"):
        Harness().add("a", range(tokens), max_tokens)


def fits_at_start(engine: Harness) -> bool:
    """What startup says of one request of `max_model_len` tokens."""
    limits = EngineLimits(
        max_model_len=engine.kv.max_model_len,
        max_num_batched_tokens=engine.config.max_num_batched_tokens,
    )
    return get_capacity(engine.kv.kv_cache_config, limits).max_concurrency >= 1


GROUPS = [
    [full()],
    [window(8)],
    [full(), window(8)],
    [full(), mamba("all")],
    [full(), mamba("align")],
]


@pytest.mark.parametrize("groups", GROUPS)
def test_startup_and_submit_agree_and_what_is_admitted_completes(
    groups: list[KVCacheSpec],
) -> None:
    """Scenario 22: a length fits at start <=> an empty pool admits and completes it;
    any other is refused at submit."""
    served = refused = 0
    for usable in range(2, 24):
        for length in range(4, 63, 3):
            engine = Harness(
                usable, groups, max_num_batched_tokens=8, max_model_len=length
            )
            if not fits_at_start(engine):
                with pytest.raises(RequestError, match="blocks"):
                    engine.add("a", range(length - 3), max_tokens=3)
                refused += 1
                continue
            engine.add("a", range(length - 3), max_tokens=3)
            engine.run()
            assert len(engine.outputs["a"]) == 3
            assert engine.is_idle()
            served += 1
    assert served > 20
    assert refused > 20


@pytest.mark.parametrize("usable", [14, 15])
def test_a_window_is_billed_at_its_peak(usable: int) -> None:
    """Scenario 22: 160 tokens in blocks of 16 are 10 blocks, and 5 for a window of 32
    with steps of 32; not 10 and 10."""
    engine = Harness(
        usable,
        [full(16), window(32, 16)],
        max_num_batched_tokens=32,
        max_model_len=160,
    )
    assert fits_at_start(engine) == (usable == 15)
    if usable < 15:
        with pytest.raises(RequestError, match="needs 15 blocks for 160 tokens"):
            engine.add("a", range(159))
        return
    request = engine.add("a", range(159))
    assert engine.kv.can_fit_full_sequence(request)
    engine.run()
    assert engine.outputs["a"] == [next_token(range(159))]
    assert engine.is_idle()


def test_stop_tokens_end_a_request() -> None:
    engine = Harness()
    first = next_token(range(8))
    second = next_token([*range(8), first])
    request = engine.add("unstopped", range(8), max_tokens=9)
    engine.scheduler.requests["unstopped"].stop_token_ids = frozenset([second])
    engine.run()
    assert engine.outputs["unstopped"] == [first, second]
    assert engine.reasons == {"unstopped": "stop"}
    assert request.num_output_tokens == 2


def test_priority_goes_first_and_loses_last() -> None:
    engine = Harness(6, policy="priority", max_num_batched_tokens=8)
    engine.add("late", range(8), 6, priority=1, arrival_time=1.0)
    engine.add("high", range(50, 58), 6, priority=0, arrival_time=2.0)
    assert next(iter(engine.step().num_scheduled_tokens)) == "high"
    order = []
    while engine.scheduler.has_work():
        order += engine.step().preempted_req_ids
    assert "high" not in order
    assert set(engine.reasons) == {"late", "high"}


def test_retries_count_once() -> None:
    """Scenario 65: a request that waits for room asks at each step, five times here,
    and then runs."""
    engine = Harness(5, connects=True, max_num_batched_tokens=32)
    engine.add("a", range(12), max_tokens=8)
    engine.add("b", range(50, 62), max_tokens=2)
    for _ in range(5):
        assert "b" not in engine.step().num_scheduled_tokens
    engine.run()
    assert engine.connector.lookups.count("b") >= 5
    assert counters(engine) == {
        "requests": 2,
        "queries": 24,
        "hits": 0,
        "external queries": 24,
        "external hits": 0,
        "preempted": 0,
    }


def test_local_and_external_hits_are_counted_apart() -> None:
    """Scenario 65: 1000 tokens, 600 in the cache, 200 more from elsewhere."""
    engine = Harness(
        600, connects=True, max_model_len=1200, max_num_batched_tokens=1200
    )
    engine.add("first", range(600))
    engine.run()
    counters(engine)
    engine.add("a", range(1000))
    engine.connector.offers["a"] = 800
    engine.step()
    engine.step(loaded("a"))
    engine.run()
    assert counters(engine) == {
        "requests": 1,
        "queries": 1000,
        "hits": 600,
        "external queries": 400,
        "external hits": 200,
        "preempted": 0,
    }


def test_preempted_requests_are_counted_apart() -> None:
    """Scenario 65: what a request that lost its blocks asks again adds nothing."""
    engine = Harness(6, connects=True, max_num_batched_tokens=32)
    for name, start in (("a", 0), ("b", 50)):
        engine.add(name, range(start, start + 7), max_tokens=12)
    engine.run()
    counted = counters(engine)
    assert counted.pop("preempted") > 0
    assert counted == {
        "requests": 2,
        "queries": 14,
        "hits": 0,
        "external queries": 14,
        "external hits": 0,
    }


def counters(engine: Harness) -> dict[str, int]:
    """Since the last call; none of them negative."""
    local = engine.kv.make_prefix_cache_stats()
    external = engine.scheduler.make_connector_prefix_cache_stats()
    assert local is not None
    watch = CounterWatch()
    for stats in (local, external):
        watch.add(asdict(stats))
    return {
        "requests": local.requests,
        "queries": local.queries,
        "hits": local.hits,
        "external queries": external.queries,
        "external hits": external.hits,
        "preempted": local.preempted_requests,
    }


def test_reset_with_running_requests_keeps_their_order() -> None:
    engine = Harness(30)
    names = (f"r{i}" for i in count())
    for _ in range(3):
        engine.add(next(names), range(5), max_tokens=4)
    engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running=True)
    assert engine.scheduler.state()["waiting"] == ["r0", "r1", "r2"]
    engine.run()
    assert all(len(output) == 4 for output in engine.outputs.values())
    assert engine.is_idle()
