"""What may come in, what goes out, and what the counters say."""

from itertools import count

import msgspec
import pytest

from kvplugin.errors import ConfigError
from kvplugin.request import RequestError
from kvplugin.scheduler import SchedulerConfig
from tests.scheduler.harness import Harness, full, loaded, next_token, window


def test_an_id_that_is_in_use_is_refused() -> None:
    engine = Harness()
    engine.add("a", range(4))
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add("a", range(4))


@pytest.mark.parametrize(("tokens", "max_tokens"), [(60, 5), (64, 1), (4, 0)])
def test_a_request_that_is_too_long_is_refused(tokens: int, max_tokens: int) -> None:
    with pytest.raises(RequestError, match="max_model_len=64"):
        Harness().add("a", range(tokens), max_tokens)


@pytest.mark.parametrize("groups", [[full()], [window(8)], [full(), window(8)]])
def test_admitted_at_submit_means_it_completes_alone(groups: list[object]) -> None:
    """Scenario 22: the bound at submit and the pool never disagree."""
    served = refused = 0
    for usable in range(2, 24):
        for length in range(1, 60, 3):
            engine = Harness(usable, groups, max_num_batched_tokens=8)
            try:
                engine.add("a", range(length), max_tokens=3)
            except RequestError:
                refused += 1
                continue
            engine.run()
            assert len(engine.outputs["a"]) == 3
            assert engine.is_idle()
            served += 1
    assert served > 20
    assert refused > 20


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_num_batched_tokens": 0},
        {"pipeline_depth": 3},
        {"load_timeout_s": 0},
        {"max_overdue_fraction": 1.5},
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SchedulerConfig(**wrong)


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="max_seqs"):
        msgspec.convert({"max_seqs": 3}, SchedulerConfig)


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
    """Scenario 65: a request that waits for room asks at each step."""
    engine = Harness(5, connects=True, max_num_batched_tokens=32)
    engine.add("a", range(12), max_tokens=8)
    engine.add("b", range(50, 62), max_tokens=2)
    for _ in range(5):
        assert "b" not in engine.step().num_scheduled_tokens
    engine.run()
    stats = engine.kv.make_prefix_cache_stats()
    assert stats is not None
    assert (stats.requests, stats.queries, stats.hits) == (2, 24, 0)


def test_local_and_external_hits_are_counted_apart() -> None:
    engine = Harness(60, connects=True, max_model_len=200, max_num_batched_tokens=200)
    engine.add("first", range(60))
    engine.run()
    engine.kv.make_prefix_cache_stats()
    engine.scheduler.make_connector_prefix_cache_stats()
    engine.add("a", range(100))
    engine.connector.offers["a"] = 80
    engine.step()
    engine.step(loaded("a"))
    engine.run()
    local = engine.kv.make_prefix_cache_stats()
    external = engine.scheduler.make_connector_prefix_cache_stats()
    assert local is not None
    assert (local.queries, local.hits) == (100, 60)
    assert (external.queries, external.hits) == (40, 20)


def test_preempted_requests_are_counted_apart() -> None:
    engine = Harness(6, max_num_batched_tokens=32)
    for name, start in (("a", 0), ("b", 50)):
        engine.add(name, range(start, start + 7), max_tokens=12)
    engine.run()
    stats = engine.kv.make_prefix_cache_stats()
    assert stats is not None
    assert (stats.requests, stats.queries) == (2, 14)
    assert stats.preempted_requests > 0


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
