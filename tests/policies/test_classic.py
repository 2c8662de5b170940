"""What the papers say of LFU, S3-FIFO, SIEVE and ARC, worked by hand on few blocks."""

import random
from collections import Counter
from itertools import count

import pytest

from kvplugin.errors import ConfigError
from kvplugin.policies.eviction import NO_CONTEXT, BlockInfo
from kvplugin.policies.eviction.arc import ARC
from kvplugin.policies.eviction.lfu import LFU, LFUOptions
from kvplugin.policies.eviction.random_order import RandomOrder, RandomOrderOptions
from kvplugin.policies.eviction.registry import make_policy
from kvplugin.policies.eviction.s3fifo import S3FIFO, S3FIFOOptions
from kvplugin.policies.eviction.sieve import Sieve
from tests.policies.policy_helpers import make
from tests.policies.prompts import Prompts

CLASSIC = ["lfu", "s3fifo", "sieve", "arc"]


# -- all of them -------------------------------------------------------------------


@pytest.mark.parametrize("name", CLASSIC)
def test_tail_of_a_prefix_goes_before_its_head(name: str) -> None:
    cache = Prompts(3, make(name))
    cache.serve("abc")
    assert cache.order() == ["abc", "ab", "a"]


@pytest.mark.parametrize("name", CLASSIC)
def test_request_computed_in_parts_gives_its_blocks_back_tail_first(name: str) -> None:
    cache = Prompts(4, make(name))
    first = cache.begin("ab")
    second = cache.begin("abcd")
    cache.end(first)
    cache.end(second)
    assert cache.order().index("abcd") < cache.order().index("abc")


@pytest.mark.parametrize("name", [*CLASSIC, "random"])
def test_order_is_what_victims_will_be(name: str) -> None:
    """Longer than any order looks ahead."""
    for seed in range(5):
        chance = random.Random(seed)
        policy = make(name)
        policy.bind(401, lambda b: BlockInfo(b.to_bytes(2), None, 0, 0))
        policy.insert(range(1, 401), NO_CONTEXT)
        policy.release(range(400, 0, -1))
        for _ in range(40):
            hits = chance.sample(list(policy.order()), 30)
            policy.pin(hits)
            policy.hit(hits, NO_CONTEXT)
            new = policy.victims(chance.randint(1, 30))
            policy.insert(new, NO_CONTEXT)
            policy.release([*new, *hits[: chance.randint(20, 30)]])
        expected = list(policy.order())
        taken = [policy.victims(1)[0], *policy.victims(99)]
        taken += policy.victims(len(policy))
        assert taken == expected
        policy.check()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lfu", {"agin": True}, "Did you mean 'aging'"),
        ("lfu", {"aging": 1}, "aging"),
        ("s3fifo", {"small_share": 1.5}, "small_share=1.5 must be from 0"),
        ("s3fifo", {"move_threshold": 4}, "move_threshold=4 must be from 1 to 3"),
        ("random", {"seed": "x"}, "seed"),
        ("sieve", {"chances": 2}, "takes no options"),
        ("arc", {"p": 2}, "takes no options"),
    ],
)
def test_wrong_options_are_refused(
    name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_policy(name, options)


# -- LFU ---------------------------------------------------------------------------


def test_lfu_evicts_the_lowest_count_then_the_least_recently_released() -> None:
    cache = Prompts(4, LFU())
    cache.serve("a", "b", "c", "d", "a", "c", "c", "b")
    assert cache.order() == ["d", "a", "b", "c"]


def test_lfu_counts_end_with_the_key() -> None:
    cache = Prompts(2, LFU(LFUOptions(aging=False)))
    cache.serve("a", "a", "a", "b")
    cache.pool.evict_blocks([cache.pool.get(key) or 0 for key in cache.keys("a")])
    cache.serve("a")
    assert cache.order() == ["b", "a"]


def held_through(policy: LFU, prompts: str) -> str:
    """Of a stream after four uses of "a", in a cache of two, what "a" survives."""
    cache = Prompts(2, policy)
    cache.serve(*"aaaa")
    survived = ""
    for prompt in prompts:
        cache.serve(prompt)
        if not cache.has("a"):
            break
        survived += prompt
    return survived


def test_lfu_with_aging_lets_old_favourites_go() -> None:
    # Ranks: a 4, b 1, then c 2, d 3, e 4 as the age is that of the last victim.
    assert held_through(LFU(), "bcdefgh") == "bcde"


def test_lfu_without_aging_never_lets_them_go() -> None:
    stream = "bcdefghijklmnop"
    assert held_through(LFU(LFUOptions(aging=False)), stream) == stream


def test_lfu_keeps_no_list_for_each_rank_that_ever_was() -> None:
    policy = LFU()
    policy.bind(3, lambda block: BlockInfo(b"", None, 0, 0))
    policy.insert([1, 2], NO_CONTEXT)
    policy.release([1, 2])
    for _ in range(2000):
        policy.pin([1])
        policy.hit([1], NO_CONTEXT)
        policy.release([1])
    policy.check()
    assert len(policy._ends) < 100
    assert policy.victims(2) == [2, 1]


# -- SIEVE -------------------------------------------------------------------------


def test_sieve_hand_moves_on_from_where_it_evicted() -> None:
    cache = Prompts(4, Sieve())
    cache.serve(*"abcda")
    assert cache.order() == [*"bcda"]  # "a" loses its mark as the hand passes
    cache.serve("e")
    assert cache.order() == [*"cdea"]  # the hand does not look at "a" again
    cache.serve("c", "f")
    assert cache.order() == [*"efac"]  # passed "c", evicted "d"
    cache.serve("g")
    assert cache.order() == [*"fgac"]  # new ones go by the hand, one by one


def test_sieve_hand_begins_again_at_the_oldest() -> None:
    cache = Prompts(3, Sieve())
    cache.serve("a", "b", "c", "a", "b", "c", "d")
    assert not cache.has("a")
    assert cache.order() == ["b", "c", "d"]


def test_sieve_passes_over_a_block_in_use_which_then_stands_behind_the_hand() -> None:
    cache = Prompts(4, Sieve())
    cache.serve("a", "b", "c", "d")
    row = cache.begin("a")
    assert cache.lose(1) == ["b"]
    cache.end(row)
    assert cache.order() == ["c", "d", "a"]


def test_sieve_block_keeps_its_place_while_it_is_in_use() -> None:
    cache = Prompts(3, Sieve())
    cache.serve("a", "b", "c")
    cache.pool.touch([block := cache.pool.get(cache.keys("b")[0]) or 0])
    assert cache.order() == ["a", "c"]
    cache.end([block])
    assert cache.order() == ["a", "b", "c"]


# -- S3-FIFO -----------------------------------------------------------------------


def scan(cache: Prompts, length: int) -> None:
    """Prompts of one block that nobody repeats."""
    names = (chr(number) for number in count(1000))
    cache.serve(*[next(names) for _ in range(length)])


def test_s3fifo_demotes_what_is_used_once_and_keeps_what_was_hit_twice() -> None:
    cache = Prompts(10, S3FIFO())
    cache.serve(*"abcdeabcdeabcdefghij")
    assert cache.order()[:5] == [*"fghij"]
    scan(cache, 100)
    assert all(cache.has(name) for name in "abcde")
    assert not any(cache.has(name) for name in "fghij")


@pytest.mark.parametrize(("threshold", "is_kept"), [(1, True), (2, False)])
def test_s3fifo_one_hit_is_as_good_as_the_threshold(
    threshold: int, is_kept: bool
) -> None:
    cache = Prompts(10, S3FIFO(S3FIFOOptions(move_threshold=threshold)))
    cache.serve(*"abca")
    scan(cache, 30)
    assert cache.has("a") is is_kept
    assert not cache.has("b")


def test_s3fifo_promotes_a_ghost() -> None:
    cache = Prompts(10, S3FIFO())
    cache.serve(*"abcdefghij")
    cache.serve("k")  # "a" goes and leaves a ghost
    assert not cache.has("a")
    cache.serve("a")  # to the main queue
    scan(cache, 30)
    assert cache.has("a")
    assert not cache.has("k")


def test_s3fifo_forgets_the_oldest_ghosts() -> None:
    cache = Prompts(10, S3FIFO(S3FIFOOptions(ghost_share=0.2)))
    cache.serve(*"abcdefghij")
    cache.serve(*"klm")  # of "a", "b" and "c" the ghosts of two are kept
    cache.serve("a")
    scan(cache, 30)
    assert not cache.has("a")


def test_s3fifo_main_queue_gives_one_more_round_for_each_hit() -> None:
    cache = Prompts(4, S3FIFO())
    cache.serve(*"abcdaabb")  # "a" and "b" move to the main queue with no hits left
    assert cache.lose(2) == ["c", "d"]
    assert cache.order() == ["a", "b"]
    cache.serve(*"aab")
    assert cache.order() == ["b", "a"]


@pytest.mark.parametrize(
    ("fill_main", "order"), [(False, "bcdefghijk"), (True, "bkcdefghij")]
)
def test_s3fifo_fills_one_queue_or_both(fill_main: bool, order: str) -> None:
    options = S3FIFOOptions(small_share=0.2, fill_main=fill_main)
    cache = Prompts(10, S3FIFO(options))
    cache.serve(*"abcdefghijk")
    assert "".join(cache.order()) == order


def test_s3fifo_block_in_use_is_passed_over_and_comes_back_to_the_front() -> None:
    cache = Prompts(4, S3FIFO())
    cache.serve(*"abcd")
    row = cache.begin("a")
    assert cache.lose(2) == ["b", "c"]
    cache.end(row)
    assert cache.order() == ["a", "d"]


# -- ARC ---------------------------------------------------------------------------


def test_arc_moves_its_aim_by_the_ghosts_that_are_wanted() -> None:
    cache = Prompts(4, ARC())
    cache.serve(*"abcdab")
    assert cache.order() == [*"cdab"]  # T1 aims at 0 blocks: c, d; T2: a, b
    cache.serve("e")
    assert cache.order() == [*"deab"]  # B1: c
    cache.serve("c")  # takes "d", was in B1: the aim is 1, T2: a, b, c
    assert cache.order() == [*"abce"]
    cache.serve("f")  # takes "a", B2: a
    assert cache.order() == [*"ebcf"]
    cache.serve("a")  # takes "e", was in B2, B1: d, e: the aim goes down by 2, to 0
    assert cache.order() == [*"fbca"]


def test_arc_keeps_what_was_used_again_from_a_scan() -> None:
    cache = Prompts(6, ARC())
    cache.serve(*"abcabc")
    scan(cache, 50)
    assert all(cache.has(name) for name in "abc")


def test_arc_takes_from_the_other_list_while_one_is_in_use() -> None:
    cache = Prompts(3, ARC())
    cache.serve(*"aba")
    row = cache.begin("c")
    assert cache.order() == ["b", "a"]
    assert cache.lose(1) == ["b"]
    assert cache.order() == ["a"]  # T1 has "c", above its aim, but that is in use
    cache.end(row)
    assert cache.order() == ["c", "a"]


# -- random ------------------------------------------------------------------------


def random_order(seed: int) -> list[str]:
    cache = Prompts(4, RandomOrder(RandomOrderOptions(seed=seed)))
    cache.serve(*"abcdb")
    return cache.order()


def test_random_order_is_its_seeds() -> None:
    assert random_order(1) == random_order(1)
    assert len({tuple(random_order(seed)) for seed in range(300)}) == 24


def test_random_order_prefers_nobody() -> None:
    victims = Counter(random_order(seed)[0] for seed in range(400))
    assert all(75 < victims[name] < 125 for name in "abcd")
