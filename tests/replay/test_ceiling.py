"""The cache that never evicts, and pools of more blocks than a trace can use."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.replay import Replay, ReplaySettings, Trace, TraceEntry, replay
from kvplugin.replay.ceiling import room_for_all, room_for_keys
from kvplugin.replay.generate import generate
from kvplugin.replay.run import run_requests
from kvplugin.replay.summary import summarize
from tests.replay.test_runs import cache_of

ATTENTION = ("llama-3.1-8b", "mistral-7b-v0.1", "gpt-oss-20b", "llama-4-scout")


def with_answers(requests: list[tuple[list[int], int]]) -> Trace:
    """Requests of full blocks, so many of which are the prompt's."""
    entries = tuple(
        TraceEntry(float(i), 16 * prompt, 16 * (len(ids) - prompt), tuple(ids))
        for i, (ids, prompt) in enumerate(requests)
    )
    return Trace("made", "kvplugin", 16, entries, full_blocks_only=True)


requests_with_answers = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=6).flatmap(
        lambda ids: st.tuples(st.just(ids), st.integers(0, len(ids)))
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=100, deadline=None)
@given(requests_with_answers, st.integers(0, 2))
def test_it_never_evicts_where_answers_repeat(
    requests: list[tuple[list[int], int]], running: int
) -> None:
    trace = with_answers(requests)
    made = Replay(trace, ReplaySettings(capacities=(1,)))
    cache = cache_of(made, room_for_keys(made.served, made.requests), running)
    counts = run_requests(cache, made.requests, block_size=16)
    assert (counts.evictions, counts.skipped) == (0, 0)
    assert counts == made.ceiling()
    assert counts.block_rate == summarize(trace).ceiling


def test_an_answer_that_comes_again() -> None:
    answer = ([1, 2, 3, 4], 1)
    trace = with_answers([([8], 1), answer, answer, ([8], 1)])
    found = replay(trace, ReplaySettings(capacities=(9,)))
    assert found.ceiling is not None
    assert [run.counts for run in found.runs] == [found.ceiling] * 2
    assert found.ceiling.block_rate == 0.5


@pytest.fixture(scope="module")
def chats() -> Trace:
    entries = tuple(generate("chat", 100, seed=5, block_size=256))
    return Trace("made", "kvplugin", 256, entries, True)


@pytest.mark.parametrize("model", ATTENTION)
@pytest.mark.parametrize("warmup", [0.0, 0.5])
def test_counting_is_what_an_ample_pool_finds(
    chats: Trace, model: str, warmup: float
) -> None:
    rules = ReplaySettings(capacities=(1,), model=model, warmup=warmup)
    made = Replay(chats, rules)
    assert made.served.is_attention
    counts = made.run("lru", 10**9).counts
    assert not counts.evictions
    assert made.ceiling() == counts


def test_states_find_room_for_all(chats: Trace) -> None:
    made = Replay(chats, ReplaySettings(capacities=(1,), model="qwen3-next-80b"))
    assert not made.served.is_attention
    assert made.ceiling() == made.run("lru", 10**9).counts


@pytest.mark.parametrize("policy", ["lru", "arc", "random", "s3fifo", "belady"])
def test_more_blocks_than_a_trace_can_use_change_nothing(
    chats: Trace, policy: str
) -> None:
    rules = ReplaySettings(
        policies=(policy,), capacities=(1,), host_capacity=10**12, references="none"
    )
    made = Replay(chats, rules)
    enough = made.run(policy, room_for_all(made.served, made.requests))
    endless = made.run(policy, 10**12)
    assert (endless.capacity, endless.counts) == (10**12, enough.counts)


def test_flat_pools_are_no_larger_than_the_trace(chats: Trace) -> None:
    rules = ReplaySettings(capacities=(10**12,), semantics="flat")
    found = replay(chats, rules)
    assert [run.counts for run in found.runs] == [found.ceiling] * 2
