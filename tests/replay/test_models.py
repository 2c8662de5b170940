"""Groups of real models, served from one pool."""

import pytest

from kvplugin.replay import Replay, ReplaySettings, Trace
from kvplugin.replay.generate import generate


@pytest.fixture(scope="module")
def trace() -> Trace:
    entries = tuple(generate("chat", 120, seed=5, block_size=512))
    return Trace("made", "kvplugin", 512, entries, True)


@pytest.mark.parametrize(
    ("model", "groups", "block"),
    [
        ("llama-3.1-8b", 1, 512),
        ("deepseek-v3.2", 1, 512),
        ("mistral-7b-v0.1", 1, 512),
        ("gpt-oss-20b", 2, 512),
        ("gemma-3-27b", 7, 512),
        ("llama-4-scout", 4, 512),
        ("qwen3-next-80b", 4, 32),
    ],
)
def test_models(trace: Trace, model: str, groups: int, block: int) -> None:
    rules = ReplaySettings(capacities=(1,), model=model)
    made = Replay(trace, rules)
    assert len(made.served.groups) == groups
    assert made.served.hash_block_size == block
    ceiling = made.ceiling()
    assert not ceiling.evictions
    assert 0 < ceiling.hit_blocks < ceiling.blocks
    small = made.run("lru", 60 * groups).counts
    large = made.run("lru", 600 * groups).counts
    assert small.evictions > large.evictions
    assert small.hit_blocks <= large.hit_blocks <= ceiling.hit_blocks
    assert not large.skipped


def test_one_full_group_is_the_default(trace: Trace) -> None:
    plain = Replay(trace, ReplaySettings(capacities=(1,)))
    dense = Replay(trace, ReplaySettings(capacities=(1,), model="llama-3.1-8b"))
    assert plain.run("lru", 400).counts == dense.run("lru", 400).counts
    assert dense.served.is_dense
    assert dense.served.step_ends(0, 99_999) == (99_999,)


def test_prefill_in_steps_ends_at_common_boundaries(trace: Trace) -> None:
    rules = ReplaySettings(capacities=(1,), model="gpt-oss-20b")
    ends = Replay(trace, rules).served.step_ends
    assert [*ends(512, 20_000)] == [8_192, 16_384, 19_968, 20_000]
    assert [*ends(0, 512)] == [512]
    assert [*ends(8_192, 8_192)] == [8_192]


def test_windows_need_fewer_blocks_than_full_attention(trace: Trace) -> None:
    """A window group's blocks serve again while a prompt is computed."""
    longest = max(len(entry.ids) for entry in trace.entries)
    rules = ReplaySettings(capacities=(1,), model="gpt-oss-20b")
    counts = Replay(trace, rules).run("lru", longest + 20).counts
    assert counts.skipped == 0


def test_what_does_not_fit_leaves_nothing_behind(trace: Trace) -> None:
    rules = ReplaySettings(capacities=(1,), model="gemma-3-27b", running=2)
    made = Replay(trace, rules)
    counts = made.run("lru", 60).counts  # checks the core's invariants at its end
    assert 0 < counts.skipped < counts.requests
