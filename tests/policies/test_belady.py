"""Belady evicts what is wanted again last, and agrees with another implementation."""

import random
from math import inf

import pytest

from kvplugin.policies.eviction.belady import Belady, Future
from kvplugin.replay.flat import flat_keys, run_flat
from tests.policies.prompts import Prompts


def future_of(*prompts: str) -> Future:
    """Accesses that want every prefix of their prompt."""
    keys = Prompts(1, Belady(Future([]))).keys
    return Future([keys(prompt) for prompt in prompts])


def test_next_use_is_strictly_after_the_clock() -> None:
    future = Future([[b"a", b"b"], [b"b"], [b"a"]])
    uses = []
    for now in range(3):
        future.advance(now)
        uses.append([future.next_use(key) for key in (b"a", b"b", b"c")])
    assert uses == [[2, 1, inf], [2, inf, inf], [inf, inf, inf]]


def test_before_the_first_access_all_are_ahead() -> None:
    assert Future([[b"a"], [b"a"]]).next_use(b"a") == 0


def test_the_clock_may_jump_but_not_go_back() -> None:
    future = Future([[b"a"]] * 5)
    future.advance(3)
    assert future.next_use(b"a") == 4
    with pytest.raises(ValueError, match="at access 3, after 2"):
        future.advance(2)


def test_the_farthest_next_use_goes_first() -> None:
    future = future_of("a", "b", "c", "b", "a")
    cache = Prompts(3, Belady(future))
    for now, prompt in enumerate("abc"):
        future.advance(now)
        cache.serve(prompt)
    assert cache.order() == ["c", "a", "b"]


def test_among_equals_a_child_goes_before_its_parent_then_the_first_released() -> None:
    future = future_of("ab", "cd", "e")
    cache = Prompts(5, Belady(future))
    for now, prompt in enumerate(("ab", "cd", "e")):
        future.advance(now)
        cache.serve(prompt)
    assert cache.order() == ["ab", "cd", "a", "c", "e"]


def test_a_block_that_was_wanted_and_not_adopted_is_ranked_again() -> None:
    future = future_of("a", "ab", "x", "ab", "a", "ab")
    cache = Prompts(4, Belady(future))
    future.advance(1)
    cache.serve("ab", "x")
    assert cache.order() == ["ab", "a", "x"]
    future.advance(3)  # nobody adopted the blocks of "ab"
    assert cache.order() == ["x", "ab", "a"]
    future.advance(5)
    assert cache.order() == ["ab", "a", "x"]  # all equal: by depth, then release


def test_a_second_block_of_a_key_counts_as_never_wanted_until_the_first_is_gone() -> (
    None
):
    future = future_of("a", "b", "b", "a")
    future.advance(1)
    cache = Prompts(4, Belady(future))
    cache.serve("b")
    first = cache.begin("a")
    second = cache.pool.get_new_blocks(1)
    cache.pool.insert(second, cache.keys("a"))
    cache.end(first)
    cache.end(second)
    assert list(cache.policy.order()) == [
        *second,
        *first,
        cache.pool.get(cache.keys("b")[0]),
    ]
    cache.pool.evict_blocks(first)
    cache.pool.check()
    assert cache.order() == ["a", "b"]
    future.advance(2)
    assert cache.order() == ["b", "a"]


def test_hits_are_those_of_libcachesim() -> None:
    referee = pytest.importorskip("libcachesim", reason="the referee is not installed")
    for seed in range(40):
        chance = random.Random(seed)
        keys = chance.randint(2, 40)
        trace = [
            min(chance.randrange(keys), chance.randrange(keys)) for _ in range(400)
        ]
        capacity = chance.randint(1, keys)
        cache = referee.Belady(capacity, hashpower=10)
        later: dict[int, int] = {}
        requests = []
        for now in range(len(trace) - 1, -1, -1):
            requests.append((trace[now], later.get(trace[now], 2**63 - 1)))
            later[trace[now]] = now
        theirs = sum(
            cache.get(
                referee.Request(
                    op=referee.ReqOp.OP_GET, obj_id=key + 1, next_access_vtime=after
                )
            )
            for key, after in reversed(requests)
        )
        future = Future([[key] for key in flat_keys(trace)])
        ours = run_flat(Belady(future), trace, capacity, future.advance)
        assert ours.hits == theirs
