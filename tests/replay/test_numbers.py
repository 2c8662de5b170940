"""Hit rates on the bundled traces against those known from elsewhere."""

from functools import cache
from pathlib import Path

import pytest

from kvplugin.replay import Replay, ReplaySettings, Trace, read_trace
from tests.replay.traces import CONVERSATION, SYNTHETIC, published_lru


@cache
def trace_of(path: Path) -> Trace:
    return read_trace(path)


@cache
def replay_of(path: Path, warmup: float = 0.0) -> Replay:
    settings = ReplaySettings(capacities=(1,), warmup=warmup)
    return Replay(trace_of(path), settings)


@pytest.mark.parametrize(
    ("path", "blocks", "unique", "ceiling"),
    [(CONVERSATION, 288_500, 182_790, 0.3664), (SYNTHETIC, 121_877, 43_924, 0.6396)],
)
def test_counts_and_ceiling(
    path: Path, blocks: int, unique: int, ceiling: float
) -> None:
    counts = replay_of(path).ceiling()
    assert counts.blocks == blocks
    assert counts.blocks - counts.hit_blocks == unique
    assert round(counts.block_rate, 4) == ceiling
    assert not counts.evictions
    assert not counts.skipped


@pytest.mark.parametrize(
    ("path", "capacity", "published", "ours"),
    [
        pytest.param(CONVERSATION, 1_000, 0.0445, 0.0445, marks=pytest.mark.full),
        (CONVERSATION, 10_000, 0.2112, 0.2116),
        pytest.param(CONVERSATION, 30_000, 0.3257, 0.3257, marks=pytest.mark.full),
        pytest.param(CONVERSATION, 50_000, 0.3546, 0.3546, marks=pytest.mark.full),
        (SYNTHETIC, 1_000, 0.0825, 0.0841),
        (SYNTHETIC, 10_000, 0.4235, 0.4239),
        pytest.param(SYNTHETIC, 30_000, 0.6242, 0.6242, marks=pytest.mark.full),
        (SYNTHETIC, 50_000, 0.6396, 0.6396),
    ],
)
def test_lru(path: Path, capacity: int, published: float, ours: float) -> None:
    # The published rules touch the head of a request first, so it is evicted first;
    # the core frees the tail first, which is worth up to 0.16 points.
    requests = [entry.ids for entry in trace_of(path).entries]
    assert round(published_lru(requests, capacity), 4) == published
    assert round(replay_of(path).run("lru", capacity).counts.block_rate, 4) == ours


@pytest.mark.parametrize(
    ("path", "capacity", "lru", "belady"),
    [
        (SYNTHETIC, 2_000, 14.6, 37.4),
        (SYNTHETIC, 10_000, 42.4, 61.7),
        pytest.param(CONVERSATION, 2_000, 5.4, 24.9, marks=pytest.mark.full),
        pytest.param(CONVERSATION, 10_000, 21.2, 36.6, marks=pytest.mark.full),
        pytest.param(CONVERSATION, 20_000, 28.8, 36.6, marks=pytest.mark.full),
    ],
)
def test_belady(path: Path, capacity: int, lru: float, belady: float) -> None:
    # A request holds all of its blocks at once. Belady over single blocks, which may
    # give up a block of the very request, has up to 0.6 points more.
    replay = replay_of(path)
    for policy, percent in (("lru", lru), ("belady", belady)):
        rate = replay.run(policy, capacity).counts.block_rate
        assert round(100 * rate, 1) == percent, policy


def test_second_half() -> None:
    replay = replay_of(SYNTHETIC, warmup=0.5)
    counts = replay.run("lru", 2_000).counts
    assert counts.requests == 3_993 - 1_996
    assert round(counts.block_rate, 4) == 0.2193
    assert round(replay.ceiling().block_rate, 4) == 0.8511
