"""Runs of policies over made traces, against a plain simulation and each other."""

from collections.abc import Iterator, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.errors import ConfigError
from kvplugin.policies.eviction.registry import POLICIES
from kvplugin.replay import Replay, ReplaySettings, replay
from kvplugin.replay.cache import ReplayCache
from kvplugin.replay.generate import generate
from kvplugin.replay.run import Queue
from kvplugin.replay.trace import Trace, TraceEntry
from tests.replay.traces import NaiveLRU, make_trace

RANKING = [name for name, listed in POLICIES.items() if not listed.protects]
PROTECTING = [name for name, listed in POLICIES.items() if listed.protects]

requests_of_ids = st.lists(
    st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=40
)


def cache_of(replay: Replay, capacity: int, running: int = 0) -> ReplayCache:
    return ReplayCache(
        replay.served, capacity, "lru", {}, replay.hooks, running=running
    )


@settings(max_examples=150, deadline=None)
@given(requests_of_ids, st.integers(1, 12), st.integers(0, 3))
def test_lru_is_what_a_plain_simulation_says(
    requests: list[list[int]], capacity: int, running: int
) -> None:
    made = Replay(make_trace(requests), ReplaySettings(capacities=(capacity,)))
    cache = cache_of(made, capacity, running)
    naive = NaiveLRU(capacity, running)
    for request, ids in zip(made.requests, requests, strict=True):
        served = cache.serve(request)
        assert (served and served.device) == naive.serve(ids)
        assert cache.pool.num_used_blocks == len(naive.used)
        cache.check()


@settings(max_examples=100, deadline=None)
@given(requests_of_ids)
def test_ceiling_is_the_share_of_prefixes_seen_before(
    requests: list[list[int]],
) -> None:
    seen: set[tuple[int, ...]] = set()
    hits = 0
    for ids in requests:
        prefixes = [tuple(ids[: i + 1]) for i in range(len(ids))]
        hits += sum(prefix in seen for prefix in prefixes)
        seen.update(prefixes)
    made = Replay(make_trace(requests), ReplaySettings(capacities=(1,)))
    assert made.ceiling().hit_blocks == hits


@pytest.fixture(scope="module")
def chats() -> Trace:
    entries = tuple(generate("mix", 250, seed=3, block_size=256))
    return Trace("made", "kvplugin", 256, entries, True)


@pytest.mark.parametrize(
    "name", [*RANKING, *(f"{name}+lru" for name in PROTECTING), "retention+queue+arc"]
)
def test_every_policy_stays_below_the_ceiling(chats: Trace, name: str) -> None:
    rules = ReplaySettings(
        policies=(name,), capacities=(700,), lookahead=8, references="none"
    )
    made = Replay(chats, rules)
    counts = made.run(name, 700).counts
    assert 0 < counts.hit_blocks <= made.ceiling().hit_blocks
    assert counts.evictions > 0
    assert (counts.skipped, counts.host_blocks) == (0, 0)
    assert made.run(name, 700).counts == counts  # again the same


@pytest.mark.parametrize("capacity", [400, 700])
def test_belady_is_better_than_lru(chats: Trace, capacity: int) -> None:
    found = replay(chats, ReplaySettings(capacities=(capacity,), warmup=0.25))
    lru, belady = found.runs
    assert (lru.policy, belady.policy) == ("lru", "belady")
    assert (lru.is_reference, belady.is_reference) == (False, True)
    assert (lru.closed, belady.closed) == (0.0, 1.0)
    assert found.ceiling is not None
    assert lru.counts.block_rate < belady.counts.block_rate
    assert belady.counts.block_rate <= found.ceiling.block_rate
    assert lru.counts.requests == len(chats.entries) - len(chats.entries) // 4


def test_what_does_not_fit_is_skipped_and_missed() -> None:
    trace = make_trace([[1, 2], [1, 2, 3, 4], [1, 2]])
    counts = Replay(trace, ReplaySettings(capacities=(3,))).run("lru", 3).counts
    assert (counts.requests, counts.skipped) == (3, 1)
    assert (counts.blocks, counts.hit_blocks) == (8, 2)
    assert (counts.tokens, counts.device_tokens) == (128, 32)


@pytest.mark.parametrize("model", [None, "gpt-oss-20b"])
def test_prompts_without_a_block_run_and_hit_nothing(model: str | None) -> None:
    entries = tuple(TraceEntry(0.0, tokens, 0, (1,)) for tokens in (16, 5, 16))
    trace = Trace("t", "mooncake", 16, entries)
    rules = ReplaySettings(capacities=(9,), partial="drop", model=model)
    counts = Replay(trace, rules).run("lru", 9).counts
    assert (counts.requests, counts.skipped, counts.tokens) == (3, 0, 37)
    assert (counts.blocks, counts.hit_blocks, counts.device_tokens) == (2, 1, 16)


def test_running_requests_keep_their_blocks() -> None:
    trace = make_trace([[1], [2], [3], [4, 5, 6]])
    made = Replay(trace, ReplaySettings(capacities=(1,)))
    cache = cache_of(made, 4, running=2)
    for request in made.requests[:3]:
        cache.serve(request)
    assert cache.pool.num_used_blocks == 2
    assert [request.request_id for request in cache.running] == ["1", "2"]
    # Three blocks are not free beside two in use: the oldest ends early.
    assert cache.serve(made.requests[3])
    assert [request.request_id for request in cache.running] == ["2", "3"]


def test_warm_up_runs_and_does_not_count() -> None:
    trace = make_trace([[1, 2], [1, 2], [3], [1, 2]])
    rules = ReplaySettings(capacities=(9,), warmup=0.5)
    counts = Replay(trace, rules).run("lru", 9).counts
    assert (counts.requests, counts.blocks, counts.hit_blocks) == (2, 3, 2)
    assert counts.evictions == 0


def test_evictions_are_counted_after_the_warm_up() -> None:
    trace = make_trace([[i] for i in range(10)])
    for warmup, evictions in ((0.0, 7), (0.5, 5), (0.8, 2)):
        rules = ReplaySettings(capacities=(3,), warmup=warmup)
        counts = Replay(trace, rules).run("lru", 3).counts
        assert counts.evictions == evictions


def test_the_queue_tells_each_wish_once() -> None:
    trace = make_trace([[1], [2, 3], [1], [2], [1]])
    made = Replay(trace, ReplaySettings(capacities=(9,)))
    keys = [made.served.pool_keys(request.block_hashes) for request in made.requests]
    queue = Queue(made.served, made.requests, 2)
    assert queue.advance(0) == (0.0, keys[1] + keys[2], {})
    assert queue.advance(1) == (1.0, keys[3][:0], {keys[1][1]: 1})
    assert queue.advance(2) == (2.0, [], {})  # one more wants it, one no longer
    assert queue.advance(3) == (3.0, [], dict.fromkeys(keys[3], 1))
    assert queue.advance(4) == (4.0, [], dict.fromkeys(keys[4], 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policies": ()}, "policy names no"),
        ({"capacities": ()}, "capacity names no"),
        ({"capacities": (0,)}, "capacity=0"),
        ({"warmup": 1.0}, "warmup=1.0"),
        ({"running": -1}, "running=-1"),
        ({"partial": "maybe"}, "unknown value 'maybe' in partial"),
        ({"semantics": "flt"}, "Did you mean 'flat'"),
        ({"policy_options": {"acr": {}}}, "unknown policy 'acr'"),
        ({"semantics": "flat", "running": 2, "warmup": 0.5}, "warmup, running"),
        ({"policies": "lru"}, "policy='lru' must be a tuple"),
        ({"policies": (5,)}, "policy=5 must be a name"),
        ({"policies": ("lru", "")}, "policy='' must be a name"),
        ({"capacities": 5}, "capacity=5 must be a tuple"),
        ({"capacities": (5.0,)}, "capacity=5.0"),
        ({"warmup": float("nan")}, "warmup=nan"),
        ({"warmup": "half"}, "warmup='half'"),
        ({"model": 5}, "model=5 must be a name"),
        ({"policy_options": [1]}, "policy_options=.1. must have"),
        ({"policy_options": {"lru": 1}}, "policy_options=.* must have"),
        ({"partial": ["count"]}, "unknown value .* in partial"),
        ({"references": True}, "unknown value 'True' in references"),
        ({"host_policy": "arc"}, "host_policy='arc' needs a host_capacity"),
        ({"semantics": "flat", "partial": "drop"}, "leave out partial"),
        (
            {"semantics": "flat", "host_capacity": 4, "host_policy": "lru"},
            "leave out host_capacity, host_policy",
        ),
        ({"semantics": "flat", "lookahead": 4, "model": "m"}, "lookahead, model"),
        ({"policies": ("lur",)}, "Did you mean 'lru'"),
        ({"policies": ("lru",), "policy_options": {"lru": {"a": 1}}}, "no options"),
        ({"policies": ("belady",), "policy_options": {"belady": {"a": 1}}}, "takes no"),
        ({"host_capacity": 5, "host_policy": "lur"}, "Did you mean 'lru'"),
        ({"block_size": 5}, "block_size=5 must divide"),
        ({"model": "gpt-oss-21b"}, "Did you mean 'gpt-oss-20b'"),
        ({"model": "gpt-oss-20b", "host_capacity": 5}, "leave out host_capacity"),
    ],
)
def test_refusals(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replay(make_trace([[1]]), ReplaySettings(**{"capacities": (3,), **change}))


def test_references() -> None:
    trace = make_trace([[1], [2], [1]])
    for semantics in ("chained", "flat"):
        for references, names in (("all", "ab"), ("lru", "a"), ("none", "")):
            rules = ReplaySettings(
                policies=("arc",),
                capacities=(2,),
                semantics=semantics,
                references=references,
            )
            found = replay(trace, rules)
            ran = ["lru", "belady"][: len(names)]
            assert [run.policy for run in found.runs] == ["arc", *ran]
            assert (found.ceiling is None) == (references == "none")
            assert ("references" in found.rules) == (references != "none")
            if references == "lru":
                assert "Belady" not in found.rules["references"]


def test_what_is_asked_for_twice_runs_once() -> None:
    rules = ReplaySettings(policies=("arc", "arc"), capacities=(2, 3, 2))
    found = replay(make_trace([[1]]), rules)
    assert len(found.runs) == 6


def test_flat_keys_hit_whatever_is_before_them() -> None:
    trace = make_trace([[1, 2], [3, 2], [3, 2]])
    rules = ReplaySettings(capacities=(2,), semantics="flat")
    found = replay(trace, rules)
    assert [run.counts.hit_blocks for run in found.runs] == [3, 3]
    assert [run.counts.evictions for run in found.runs] == [1, 1]
    assert found.ceiling is not None
    assert found.ceiling.hit_blocks == 3
    assert found.rules["hits"].startswith("flat")


def random_requests(seed: int) -> Iterator[Sequence[int]]:
    random = Random(seed)
    for _ in range(3_000):
        root = random.randrange(40)
        yield [root * 100 + i for i in range(random.randrange(1, 30))]


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("running", [0, 5])
def test_long_runs_of_lru(seed: int, running: int) -> None:
    requests = [*random_requests(seed)]
    made = Replay(make_trace(requests), ReplaySettings(capacities=(300,)))
    cache, naive = cache_of(made, 300, running), NaiveLRU(300, running)
    for request, ids in zip(made.requests, requests, strict=True):
        served = cache.serve(request)
        assert (served and served.device) == naive.serve(ids)
    cache.check()
