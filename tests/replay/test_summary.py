"""Figures of a trace."""

from dataclasses import replace

import pytest

from kvplugin.replay import Replay, ReplaySettings, read_trace
from kvplugin.replay.summary import Reuse, summarize
from tests.replay.traces import SYNTHETIC, make_trace


def test_figures_by_hand() -> None:
    trace = make_trace([[1, 2], [3], [1, 2, 4], [1]])
    summary = summarize(trace)
    assert (summary.requests, summary.seconds) == (4, 3.0)
    assert (summary.blocks, summary.unique_blocks) == (7, 4)
    assert summary.ceiling == 3 / 7
    # 1 and 2 after three blocks each, 1 again after three; after 2, 2 and 1 seconds.
    assert summary.reuse[0] == Reuse(50, 3, 2.0)
    assert summary.sessions == 0


@pytest.mark.parametrize("hits", [1, 2, 99, 100, 101, 200])
def test_percentiles_are_the_least_that_so_many_do_not_exceed(hits: int) -> None:
    # Block 0 comes again after 1, 2, 3 ... blocks, each time alone in a prompt.
    requests, fresh = [[0]], 1
    for gap in range(hits):
        requests += [[fresh + i] for i in range(gap)] + [[0]]
        fresh += gap
    for reuse in summarize(make_trace(requests)).reuse:
        share = [
            distance for distance in range(1, hits + 1) if distance <= reuse.blocks
        ]
        assert 100 * len(share) >= reuse.percentile * hits
        assert 100 * (len(share) - 1) < reuse.percentile * hits


def test_observed_hits() -> None:
    trace = make_trace([[1, 2], [1, 2], [1]])
    one, two, three = trace.entries
    noted = (replace(one, cached_tokens=0), replace(two, cached_tokens=32), three)
    summary = summarize(replace(trace, entries=noted))
    assert summary.observed == 0.5


@pytest.mark.parametrize("block_size", [512, 256])
def test_ceiling_is_that_of_the_core(block_size: int) -> None:
    trace = read_trace(SYNTHETIC, limit=1_000)
    rules = ReplaySettings(capacities=(1,), block_size=block_size)
    summary = summarize(trace, block_size=block_size)
    ceiling = Replay(trace, rules).ceiling()
    assert summary.ceiling == ceiling.block_rate
    assert summary.blocks == ceiling.blocks
