"""What is said of the recommended policy, on the second halves of public traces.

Its constants were chosen on the first halves and on generated traces.
"""

from pathlib import Path
from statistics import mean

import pytest

from kvplugin.replay import ReplaySettings, read_trace, replay

TRACES = Path(__file__).parents[1] / "data" / "traces"
POINTS = {
    "conversation_trace.jsonl.gz": (2_000, 5_000, 10_000, 20_000),
    "synthetic_trace.jsonl.gz": (2_000, 10_000),
}
OTHERS = ("arc", "s3fifo", "sieve", "lfu")


def scores(name: str, policies: tuple[str, ...], capacities: tuple[int, ...]):
    """(policy, capacity) -> block hit rate, share of the distance closed."""
    settings = ReplaySettings(policies=policies, capacities=capacities, warmup=0.5)
    result = replay(read_trace(TRACES / name), settings)
    return {
        (run.policy, run.capacity): (run.counts.block_rate, run.closed)
        for run in result.runs
    }


def test_it_is_above_lru_where_prompts_repeat() -> None:
    found = scores("synthetic_trace.jsonl.gz", ("reuse",), (10_000,))
    assert found["reuse", 10_000][1] > 0.05


@pytest.mark.full
def test_it_keeps_what_is_said_of_it() -> None:
    found = {}
    for name, capacities in POINTS.items():
        for key, score in scores(name, ("reuse", *OTHERS), capacities).items():
            found[name, *key] = score
    points = [(name, c) for name, capacities in POINTS.items() for c in capacities]
    closed = {
        policy: mean(found[name, policy, c][1] for name, c in points)
        for policy in ("reuse", *OTHERS)
    }
    assert closed["reuse"] > 0.15
    assert closed["reuse"] > max(closed[policy] for policy in OTHERS)
    for name, c in points:
        assert found[name, "reuse", c][0] > found[name, "lru", c][0] - 0.01
