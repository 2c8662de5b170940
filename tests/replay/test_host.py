"""The host tier behind the device."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.errors import ConfigError
from kvplugin.hooks import get_hooks
from kvplugin.replay import Counts, Replay, ReplaySettings, Trace
from kvplugin.replay.generate import generate
from kvplugin.replay.host import HostTier
from kvplugin.replay.requests import make_requests
from kvplugin.replay.trace import TraceEntry
from tests.replay.test_runs import requests_of_ids
from tests.replay.traces import make_trace


def run(
    trace: Trace, device: int, host: int, policy: str = "lru", running: int = 0
) -> Counts:
    rules = ReplaySettings(capacities=(1,), host_capacity=host, running=running)
    return Replay(trace, rules).run(policy, device).counts


def test_a_hit_goes_on_in_the_host_tier() -> None:
    trace = make_trace([[1, 2, 3], [4, 5, 6], [1, 2, 3, 7]])
    counts = run(trace, device=4, host=9)
    # One block of the first request is left on the device, its head.
    assert (counts.device_blocks, counts.host_blocks) == (1, 2)
    assert (counts.device_tokens, counts.host_tokens) == (16, 32)
    assert counts.hit_blocks == 3


def test_all_of_a_prompt_may_come_from_the_host() -> None:
    trace = make_trace([[1, 2], [3, 4], [1, 2]])
    counts = run(trace, device=2, host=9)
    assert (counts.device_blocks, counts.host_blocks) == (0, 2)


@settings(max_examples=100, deadline=None)
@given(requests_of_ids, st.integers(1, 12), st.integers(1, 12), st.integers(0, 2))
def test_hits_stay_below_the_ceiling(
    requests: list[list[int]], device: int, host: int, running: int
) -> None:
    trace = make_trace(requests)
    counts = run(trace, device, host, running=running)
    ceiling = Replay(trace, ReplaySettings(capacities=(1,))).ceiling()
    assert counts.hit_blocks <= ceiling.hit_blocks
    # With room for all on the host, whatever ran can be hit again.
    ample = run(trace, device, 10_000, running=running)
    if not ample.skipped:
        assert ample.hit_blocks == ceiling.hit_blocks


def test_the_host_does_not_hear_who_waits_as_in_an_engine() -> None:
    entries = tuple(generate("chat", 20, seed=3, block_size=256))
    trace = Trace("made", "kvplugin", 256, entries, True)
    rules = ReplaySettings(
        capacities=(1,), host_capacity=200, host_policy="queue+lru", lookahead=20
    )
    with pytest.raises(ConfigError, match="'queue' protects what waiting requests"):
        Replay(trace, rules)


def test_the_hosts_policy_hears_the_clock() -> None:
    """A prefix stays as long as its time to live, and no longer."""
    wanted = TraceEntry(0.0, 256, 1, (1,), priority=9, ttl_s=50.0)
    others = [TraceEntry(float(t), 512, 1, (10 * t, 10 * t + 1)) for t in range(1, 99)]
    for wanted_again, hit in ((40, 1), (90, 0)):
        again = replace(wanted, timestamp=wanted_again + 0.5)
        entries = tuple(sorted([wanted, *others, again], key=lambda e: e.timestamp))
        trace = Trace("made", "kvplugin", 256, entries, True)
        rules = ReplaySettings(
            capacities=(1,), host_capacity=6, host_policy="retention"
        )
        assert Replay(trace, rules).run("lru", 2).counts.host_blocks == hit


@pytest.mark.parametrize("policy", ["lru", "arc", "random"])
def test_more_host_is_more_hits(policy: str) -> None:
    entries = tuple(generate("mix", 250, seed=3, block_size=256))
    trace = Trace("made", "kvplugin", 256, entries, True)
    alone, some, much = (run(trace, 500, host, policy) for host in (0, 500, 5_000))
    assert alone.host_blocks == 0
    assert alone.hit_blocks < some.hit_blocks < much.hit_blocks
    assert alone.device_blocks <= some.device_blocks + some.host_blocks


@settings(max_examples=100, deadline=None)
@given(requests_of_ids, st.integers(1, 12), st.sampled_from(["lru", "random", "lfu"]))
def test_the_tier_keeps_its_invariants(
    requests: list[list[int]], capacity: int, policy: str
) -> None:
    made = make_requests(make_trace(requests), 16, "count")
    tier = HostTier(capacity, policy, 16, get_hooks())
    for request in made:
        loaded = tier.load(request, 0)
        keys = [tier.pool.key_of(block) for block in loaded]
        assert len(set(keys)) == len(loaded) == tier.pool.num_used_blocks
        if len(loaded) % 2:
            tier.give_back(loaded)
        else:
            tier.store(request, len(loaded), loaded)
        assert tier.pool.num_used_blocks == 0
        tier.pool.check()
