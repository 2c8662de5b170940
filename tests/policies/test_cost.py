"""CostAware keeps what is dear, ages, and never values a parent below its child."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin import ConfigError
from kvplugin.policies.eviction import BlockContext
from kvplugin.policies.eviction.cost import CostAware, CostAwareOptions
from tests.core.pool_helpers import key
from tests.policies.prompts import Prompts

STEEP = CostAwareOptions(attention_share_at=1, block_size=1)
"""A block at depth d costs 1.5 + d."""


def cache_of(num_blocks: int, options: CostAwareOptions = STEEP) -> Prompts:
    return Prompts(num_blocks, CostAware(options))


def costing(cost: float) -> BlockContext:
    return BlockContext(cost_per_block=cost)


def test_the_dearest_chain_outlives_a_newer_cheap_one_tail_before_head() -> None:
    cache = cache_of(6)
    cache.serve("abcd", "x", "y")
    assert cache.order() == ["x", "y", "abcd", "abc", "ab", "a"]


def test_without_attention_all_cost_the_same_and_it_is_lru() -> None:
    cache = cache_of(5, CostAwareOptions(attention_share_at=0))
    cache.serve("abc", "x", "y")
    assert cache.order() == ["abc", "ab", "a", "x", "y"]


def test_default_attention_counts_tokens_of_context() -> None:
    cache = cache_of(1, CostAwareOptions(attention_share_at=100, block_size=50))
    cache.serve("a")
    assert cache.policy._values[cache.pool.get(cache.keys("a")[0])] == 1.25


def test_what_a_request_says_takes_the_place_of_the_model() -> None:
    cache = cache_of(4)
    cache.serve("a", ctx=costing(10))
    cache.serve("bc")
    cache.serve("d", ctx=costing(2))
    assert cache.order() == ["d", "bc", "b", "a"]


def test_a_hit_may_bring_another_cost() -> None:
    cache = cache_of(2, CostAwareOptions(frequency=False))
    cache.serve("a", "b")
    cache.serve("a", ctx=costing(5))
    cache.serve("b")
    assert cache.order() == ["b", "a"]


@pytest.mark.parametrize(("frequency", "first"), [(True, "b"), (False, "a")])
def test_hits_count_if_asked_for(frequency: bool, first: str) -> None:
    cache = cache_of(2, CostAwareOptions(frequency=frequency))
    cache.serve("a", "a", "b")
    assert cache.order()[0] == first


def test_age_lets_new_blocks_win_over_dear_ones_that_nobody_uses() -> None:
    cache = cache_of(2)
    cache.serve("a", ctx=costing(3.5))
    cache.serve("b", "c", "d")  # worth 1.5, 3 and 4.5: 1.5 and the age before
    assert cache.order() == ["a", "d"]
    cache.serve("e")
    assert cache.order() == ["d", "e"]


def test_head_of_a_dear_chain_keeps_its_value_when_a_short_one_uses_it() -> None:
    cache = cache_of(5)
    cache.serve("abc")
    cache.serve("x", ctx=costing(3))
    cache.serve("a")
    assert cache.order() == ["x", "abc", "ab", "a"]


def test_head_in_use_inherits_the_value_of_the_tail() -> None:
    cache = cache_of(
        6, CostAwareOptions(attention_share_at=1, block_size=1, frequency=False)
    )
    long, short = cache.begin("abcd"), cache.begin("ab")
    cache.end(long)
    cache.serve("x", ctx=costing(4))
    cache.end(short)
    assert cache.order() == ["x", "abcd", "abc", "ab", "a"]


def test_a_lost_key_takes_value_and_uses_along() -> None:
    cache = cache_of(2)
    cache.serve("a", "a", "a")
    cache.pool.evict_blocks([cache.pool.get(cache.keys("a")[0])])
    cache.serve("b", "a")
    assert cache.order() == ["b", "a"]


def test_stale_entries_and_inheritances_stay_few() -> None:
    cache = cache_of(4)
    shared = cache.begin("a")
    for i in range(3000):
        cache.serve("a" + chr(200 + i))
    policy = cache.policy
    assert policy._queued < 1100
    assert len(policy._inherited) < 20
    cache.end(shared)


def serve_head_first(cache: Prompts, prompt: str) -> None:
    """As a window slides: each block is released by itself, after its parent."""
    for block in cache.begin(prompt):
        cache.pool.free_blocks([block])


def test_inheritances_of_parents_that_lose_their_keys_are_dropped() -> None:
    cache = cache_of(50)
    for i in range(20):
        serve_head_first(cache, chr(200 + i) + "abcdefgh")
        cache.pool.reset_prefix_cache()
    assert not cache.policy._inherited


def test_inheritances_are_looked_through_seldom_and_bounded() -> None:
    calls = 0

    class Counting(CostAware):
        def _drop_inherited(self) -> None:
            nonlocal calls
            calls += 1
            super()._drop_inherited()

    cache = Prompts(30, Counting(STEEP))
    blocks = cache.pool.get_new_blocks(30)
    for number in range(2000):
        block, parent = blocks[number % 30], key(f"nowhere {number}")
        cache.pool.insert([block], [key(str(number))], parent=parent, depth=1)
        cache.pool.free_blocks([block])
        assert len(cache.policy._inherited) <= 62
        if number % 30 == 29:
            cache.pool.reset_prefix_cache()
            blocks = cache.pool.get_new_blocks(30)
    assert 0 < calls <= 2000 // 31


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_evictable_parent_goes_before_its_child(data: Any) -> None:
    cache = cache_of(24)
    running: list[list[int]] = []
    prompts = st.text("ab", min_size=1, max_size=5)
    for _ in range(data.draw(st.integers(1, 40))):
        if len(running) == 4 or (running and data.draw(st.booleans())):
            cache.end(running.pop(data.draw(st.integers(0, len(running) - 1))))
        else:
            cost = data.draw(st.sampled_from([0.0, 0.0, 7.0]))
            running.append(cache.begin(data.draw(prompts), costing(cost)))
    order = cache.order()
    if len(set(order)) == len(order):
        for place, name in enumerate(order):
            assert name[:-1] not in order[:place]


@pytest.mark.parametrize(
    "options", [{"attention_share_at": -1}, {"block_size": 0}, {"frequency": 1}]
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        CostAwareOptions(**options)
