"""QueueInformed protects what waiting requests want, the earliest first."""

from collections import Counter
from typing import Any

import pytest

from kvplugin import ConfigError
from kvplugin.policies.eviction import LRU
from kvplugin.policies.eviction.queue_informed import (
    QueueInformed,
    QueueInformedOptions,
)
from tests.policies.prompts import Prompts


def cache_of(num_blocks: int, **options: Any) -> Prompts:
    return Prompts(num_blocks, QueueInformed(LRU(), QueueInformedOptions(**options)))


def step(cache: Prompts, *begin: str, leave: tuple[str, ...] = ()) -> None:
    """A step before which these prompts began to wait, and those stopped waiting."""
    soon = [key for prompt in begin for key in cache.keys(prompt)]
    dropped = Counter(key for prompt in leave for key in cache.keys(prompt))
    cache.pool.step(0.0, iter(soon), dropped)
    cache.pool.check()


def protected(cache: Prompts) -> int:
    policy: Any = cache.policy
    return sum(policy._protection(block) is not None for block in policy.order())


def test_wanted_blocks_go_last_and_tail_before_head() -> None:
    cache = cache_of(12)
    cache.serve("abc", "x", "y")
    step(cache, "abz")
    assert cache.order() == ["abc", "x", "y", "ab", "a"]


def test_they_are_free_again_when_nobody_waits_for_them() -> None:
    cache = cache_of(12)
    cache.serve("ab", "x")
    step(cache, "ab", "a")
    step(cache, leave=("ab",))
    assert cache.order() == ["ab", "x", "a"]
    assert protected(cache) == 1
    step(cache, leave=("a",))
    assert protected(cache) == 0
    cache.serve("y")
    assert cache.order() == ["ab", "a", "x", "y"]


def test_several_requests_in_one_step_count_each() -> None:
    cache = cache_of(12)
    cache.serve("a", "x")
    step(cache, "a", "a", "a")
    step(cache, leave=("a", "a"))
    assert protected(cache) == 1
    step(cache, leave=("a",))
    assert protected(cache) == 0


def test_wanted_and_dropped_in_one_step_stays_protected() -> None:
    cache = cache_of(12)
    cache.serve("a", "x")
    step(cache, "a")
    step(cache, "a", leave=("a",))
    assert cache.order() == ["x", "a"]
    step(cache, "x", leave=("x", "a"))
    assert protected(cache) == 0


def test_a_key_can_be_wanted_before_its_block_exists() -> None:
    cache = cache_of(12)
    step(cache, "ab")
    cache.serve("ab", "x")
    assert cache.order() == ["x", "ab", "a"]


def test_a_block_in_use_is_protected_when_it_is_released() -> None:
    cache = cache_of(12)
    row = cache.begin("ab")
    step(cache, "a")
    assert protected(cache) == 0
    cache.end(row)
    cache.serve("x")
    assert cache.order() == ["ab", "x", "a"]


def test_over_the_budget_those_wanted_last_lose_protection_first() -> None:
    cache = cache_of(9, max_protected_share=0.3)
    cache.serve("ab", "cd", "ef")
    step(cache, "cd")
    step(cache, "ab")
    assert cache.order() == ["ab", "ef", "e", "a", "cd", "c"]
    step(cache, "ef")
    assert cache.order() == ["ab", "ef", "e", "a", "cd", "c"]


def test_those_wanted_earlier_displace_those_wanted_later() -> None:
    cache = cache_of(9, max_protected_share=0.3)
    row = cache.begin("ab")
    step(cache, "ab")
    cache.serve("cd", "ef")
    step(cache, "cdx")
    assert cache.order() == ["ef", "e", "cd", "c"]
    cache.end(row)
    assert cache.order() == ["ef", "e", "cd", "c", "ab", "a"]
    cache.serve("x")
    assert cache.order() == ["ef", "e", "cd", "x", "c", "ab", "a"]


def test_the_request_that_runs_takes_its_blocks() -> None:
    cache = cache_of(6)
    cache.serve("abc", "x")
    step(cache, "abd")
    row = cache.begin("abdefg")  # takes "x" and "abc", as they are not wanted
    step(cache, leave=("abd",))
    assert protected(cache) == 0
    assert cache.order() == []
    cache.end(row)
    assert cache.order() == ["abdefg", "abdef", "abde", "abd", "ab", "a"]


def test_wanted_blocks_are_victims_in_the_end_and_may_come_back() -> None:
    cache = cache_of(4)
    cache.serve("ab", "xy")
    step(cache, "ab")
    cache.serve("klmn")
    assert cache.order() == ["klmn", "klm", "kl", "k"]
    cache.serve("ab")
    assert cache.order()[-2:] == ["ab", "a"]
    assert protected(cache) == 2


def test_all_blocks_of_a_wanted_key_are_protected() -> None:
    cache = cache_of(8)
    first = cache.begin("a")
    second = cache.pool.get_new_blocks(1)
    cache.pool.insert(second, cache.keys("a"))
    cache.end(second)
    cache.end(first)
    step(cache, "a")
    cache.serve("x")
    assert list(cache.policy.order())[1:] == [*second, *first]


def test_saved_blocks_follow_what_is_wanted() -> None:
    cache = cache_of(3, max_protected_share=1)
    cache.serve("ab")
    step(cache, "ab")
    cache.serve("x", "y")  # evicts "x"
    assert cache.order() == ["y", "ab", "a"]
    step(cache, leave=("ab",))
    assert cache.order() == ["ab", "a", "y"]
    step(cache, "a")
    assert cache.order() == ["ab", "y", "a"]
    cache.serve("z")
    assert cache.order() == ["y", "z", "a"]


def test_what_is_saved_is_new_to_the_inner_policy_when_it_is_adopted() -> None:
    cache = cache_of(3)
    cache.serve("a", "x", "y")
    step(cache, "a")
    cache.serve("z")
    assert cache.order() == ["y", "z", "a"]
    cache.serve("a")
    step(cache, leave=("a",))
    assert cache.order() == ["y", "z", "a"]
    assert not cache.policy._saved_of


def test_dropping_what_nobody_wants_changes_nothing() -> None:
    cache = cache_of(8)
    cache.serve("a")
    step(cache, leave=("a", "z"))
    step(cache, "a")
    assert protected(cache) == 1


def test_keys_that_nobody_wants_any_more_are_not_kept() -> None:
    cache = cache_of(8)
    for i in range(20):
        step(cache, chr(200 + i), leave=(chr(199 + i),))
    assert len(cache.policy._wanted) == 1


@pytest.mark.parametrize("share", [-0.1, 1.5, "half"])
def test_wrong_options_are_refused(share: Any) -> None:
    with pytest.raises(ConfigError, match="max_protected_share"):
        QueueInformedOptions(max_protected_share=share)
