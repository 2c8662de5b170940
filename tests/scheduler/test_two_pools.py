"""Blocks are neither lost nor let go of twice, in two pools, in any order of events."""

import pytest
from hypothesis import Phase

from tests.scheduler.two_pools import run_two_pools


@pytest.mark.parametrize(
    "max_examples", [50, pytest.param(2000, marks=pytest.mark.full)]
)
def test_no_block_leaks_in_either_pool(max_examples: int) -> None:
    """Scenario 46: insert, evict, overlap and abort at random, drafts on and off; after
    each event free + evictable + locked + uncached == total, and locks >= 0."""
    happened = run_two_pools(max_examples, Phase.shrink)
    for what in ("length", "abort", "loads", "preemptions"):
        assert happened[what], f"the runs are too tame: {happened}"
