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
