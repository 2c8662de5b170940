"""Requests that fit into no pool leave no trace."""

import pytest

from kvplugin.replay import Replay, ReplaySettings, Trace
from kvplugin.replay.cache import ReplayCache
from kvplugin.replay.fits import FitsAlone
from kvplugin.replay.generate import generate
from kvplugin.replay.host import HostTier
from tests.replay.test_runs import cache_of
from tests.replay.traces import make_trace

MODELS = (None, "gpt-oss-20b", "gemma-3-27b", "llama-4-scout", "qwen3-next-80b")


def state(cache: ReplayCache) -> tuple[object, ...]:
    """What later requests could notice."""
    pools = [
        (
            [
                (pool.key_of(b), pool.ref_count(b))
                for b in range(1, pool.num_usable_blocks + 1)
            ],
            pool.get_num_free_blocks(),
        )
        for pool in cache.pools
    ]
    return (pools, [*cache.running], cache.evictions)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("running", [0, 3])
def test_the_cache_is_as_before(model: str | None, running: int) -> None:
    entries = tuple(generate("mix", 60, seed=2, block_size=512))
    trace = Trace("made", "kvplugin", 512, entries, True)
    made = Replay(trace, ReplaySettings(capacities=(1,), model=model))
    longest = max(made.requests, key=lambda request: len(request.block_hashes))
    capacity = max(
        blocks
        for blocks in range(10, 300, 20)
        if not FitsAlone(made.served, blocks, made.hooks)(longest)
    )
    cache = cache_of(made, capacity, running)
    skipped = 0
    for request in made.requests:
        before = state(cache)
        if cache.serve(request) is None:
            skipped += 1
            assert state(cache) == before
    assert 0 < skipped < len(made.requests)
    cache.check()


def test_hosts_hear_nothing_of_it() -> None:
    made = Replay(make_trace([[1, 2], [1, 2, 3, 4]]), ReplaySettings(capacities=(1,)))
    host = HostTier(9, "lru", 16, made.hooks)
    cache = ReplayCache(made.served, 3, "lru", {}, made.hooks, running=2, host=host)
    short, long = made.requests
    assert cache.serve(short)
    before = state(cache)
    assert cache.serve(long) is None
    assert state(cache) == before
    assert [*cache.running] == [short]
