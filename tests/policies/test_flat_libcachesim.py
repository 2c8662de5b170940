"""With independent keys the policies hit what those of libCacheSim hit.

LRU, LFU without aging, SIEVE and Belady are the same algorithms to the last tie.
libCacheSim's ARC moves its aim before it chooses the victim, and its S3-FIFO lets the
main queue grow over its share until the small queue has given a victim.
"""

import gzip
import json
import random
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path

import libcachesim
import pytest

from kvplugin.errors import ConfigError
from kvplugin.policies.eviction import LRU, EvictionPolicy
from kvplugin.policies.eviction.arc import ARC
from kvplugin.policies.eviction.belady import Belady, Future
from kvplugin.policies.eviction.lfu import LFU, LFUOptions
from kvplugin.policies.eviction.s3fifo import S3FIFO, S3FIFOOptions
from kvplugin.policies.eviction.sieve import Sieve
from kvplugin.replay.flat import FlatResult, flat_keys, run_flat

TRACES = Path(__file__).parents[1] / "data" / "traces"
NEVER = 2**62


@dataclass(frozen=True)
class Pair:
    """A policy and its referee."""

    ours: Callable[[], EvictionPolicy]
    theirs: Callable[..., libcachesim.Cache]
    tolerance: float = 0.0
    """Of the hit rate, in percentage points."""


PAIRS = {
    "lru": Pair(LRU, libcachesim.LRU),
    "lfu": Pair(lambda: LFU(LFUOptions(aging=False)), libcachesim.LFU),
    "sieve": Pair(Sieve, libcachesim.Sieve),
    "arc": Pair(ARC, libcachesim.ARC, 0.5),
    "s3fifo": Pair(
        lambda: S3FIFO(S3FIFOOptions(fill_main=True)), libcachesim.S3FIFO, 0.5
    ),
}
BELADY = "belady"
SHORT = 50_000
"""Accesses, where a whole trace would take too long."""


@cache
def trace(name: str) -> list[int]:
    """Block ids of a Mooncake trace in the file's order."""
    with gzip.open(TRACES / f"{name}_trace.jsonl.gz") as lines:
        return [block for line in lines for block in json.loads(line)["hash_ids"]]


def skewed(seed: int, keys: int, length: int) -> list[int]:
    """Accesses by Zipf's law, with a scan of keys that nobody repeats now and then."""
    chance = random.Random(seed)
    weights = list(accumulate(1 / (rank + 1) for rank in range(keys)))
    accesses: list[int] = []
    while len(accesses) < length:
        accesses += [
            bisect(weights, chance.random() * weights[-1]) for _ in range(keys)
        ]
        fresh = keys + len(accesses)
        accesses += range(fresh, fresh + keys // 10)
    return accesses[:length]


def next_uses(accesses: Sequence[int]) -> list[int]:
    """Index of the next access to the same key, or `NEVER`."""
    seen: dict[int, int] = {}
    uses = []
    for now in range(len(accesses) - 1, -1, -1):
        uses.append(seen.get(accesses[now], NEVER))
        seen[accesses[now]] = now
    return uses[::-1]


def ours(name: str, accesses: Sequence[int], capacity: int) -> FlatResult:
    if name != BELADY:
        return run_flat(PAIRS[name].ours(), accesses, capacity)
    future = Future([[key] for key in flat_keys(accesses)])
    return run_flat(Belady(future), accesses, capacity, future.advance)


def hits_of_theirs(name: str, accesses: Sequence[int], capacity: int) -> int:
    make = libcachesim.Belady if name == BELADY else PAIRS[name].theirs
    referee = make(cache_size=capacity, hashpower=16)
    request = libcachesim.Request()
    request.obj_size = 1
    hits = 0
    for now, (key, after) in enumerate(zip(accesses, next_uses(accesses), strict=True)):
        request.obj_id, request.clock_time = key, now
        request.next_access_vtime = after
        hits += referee.get(request)
    assert referee.get_n_obj() <= capacity
    return hits


def assert_agreement(name: str, accesses: Sequence[int], capacity: int) -> None:
    result = ours(name, accesses, capacity)
    assert result.accesses == len(accesses)
    points = 100 * (
        result.hit_rate - hits_of_theirs(name, accesses, capacity) / len(accesses)
    )
    assert abs(points) <= (0 if name == BELADY else PAIRS[name].tolerance)


@pytest.mark.parametrize("name", [*PAIRS, BELADY])
def test_hits_on_skewed_accesses_with_scans(name: str) -> None:
    for seed, capacity in enumerate((20, 50, 200, 450)):
        assert_agreement(name, skewed(seed, keys=500, length=10_000), capacity)


@pytest.mark.parametrize("capacity", [1000, 5000])
@pytest.mark.parametrize("name", [*PAIRS, BELADY])
def test_hits_on_the_beginning_of_a_trace(name: str, capacity: int) -> None:
    assert_agreement(name, trace("synthetic")[:SHORT], capacity)
    assert_agreement(name, trace("conversation")[:SHORT], capacity)


@pytest.mark.full
@pytest.mark.parametrize("capacity", [1000, 5000, 20_000])
@pytest.mark.parametrize("trace_name", ["synthetic", "conversation"])
@pytest.mark.parametrize("name", [*PAIRS, BELADY])
def test_hits_on_a_trace(name: str, trace_name: str, capacity: int) -> None:
    assert_agreement(name, trace(trace_name), capacity)


def test_lru_by_hand() -> None:
    result = run_flat(LRU(), ["a", "b", "a", "c", "b", "a"], capacity=2)
    assert result == FlatResult(accesses=6, hits=1)
    assert result.hit_rate == pytest.approx(1 / 6)


def test_nothing_hits_nothing() -> None:
    assert run_flat(LRU(), [], capacity=1).hit_rate == 0


def test_equal_accesses_have_equal_keys() -> None:
    first, second, again = flat_keys([7, "7", 7])
    assert first == again != second


def test_a_cache_has_a_block() -> None:
    with pytest.raises(ConfigError, match="capacity=0"):
        run_flat(LRU(), [1], capacity=0)
