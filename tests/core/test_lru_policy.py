"""Every eviction policy keeps the protocol; LRU keeps the order of releases."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvplugin.hooks import EvictionPolicyContext, Hooks
from kvplugin.policies.eviction import (
    LRU,
    NO_CONTEXT,
    BlockContext,
    BlockInfo,
    EvictionPolicy,
)

NUM_BLOCKS = 12
HOOKS = Hooks.of()
POLICIES = sorted(HOOKS.register_eviction_policies())


def make(name: str) -> EvictionPolicy:
    return HOOKS.make_eviction_policy(
        EvictionPolicyContext(name=name, num_blocks=NUM_BLOCKS)
    )


def info(block: int) -> BlockInfo:
    """Three chains of four blocks, in two groups."""
    chain, depth = divmod(block, 4)
    parent = bytes([block - 1]) if depth else None
    return BlockInfo(bytes([block]), parent, chain % 2, depth)


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> Iterator[EvictionPolicy]:
    """Bound, with blocks 1 to 6 evictable and block 7 keyed but in use."""
    policy = make(request.param)
    policy.bind(NUM_BLOCKS, info)
    policy.insert([1, 2, 3, 4], NO_CONTEXT)
    policy.insert([5, 6, 7], BlockContext(priority=1, session="s", turn=2))
    policy.release([4, 3, 2, 1])
    policy.release([6, 5])
    yield policy
    policy.check()


# -- every policy ------------------------------------------------------------------


@pytest.mark.parametrize("n", range(7))
def test_victims_are_as_many_as_wanted_distinct_and_gone(
    policy: EvictionPolicy, n: int
) -> None:
    victims = policy.victims(n)
    assert len(victims) == n == len(set(victims))
    assert {*victims, *policy.order()} == {1, 2, 3, 4, 5, 6}
    assert len(policy) == 6 - n


@pytest.mark.parametrize("n", range(7))
def test_order_says_who_will_be_a_victim(policy: EvictionPolicy, n: int) -> None:
    expected = list(islice(policy.order(), n))
    assert policy.victims(n) == expected


def test_more_victims_than_there_are_is_an_error_and_changes_nothing(
    policy: EvictionPolicy,
) -> None:
    before = list(policy.order())
    with pytest.raises(ValueError, match=r"7\b.*\b6"):
        policy.victims(7)
    assert list(policy.order()) == before
    assert len(policy) == 6


def test_order_changes_nothing(policy: EvictionPolicy) -> None:
    assert list(policy.order()) == list(policy.order())
    assert len(policy) == 6


def test_pinned_blocks_are_no_victims_until_released(policy: EvictionPolicy) -> None:
    policy.pin([4, 1])
    policy.hit([4, 1, 7], NO_CONTEXT)
    assert set(policy.order()) == {2, 3, 5, 6}
    policy.release([4])
    assert sorted(policy.victims(5)) == [2, 3, 4, 5, 6]


def test_forgotten_blocks_are_no_victims(policy: EvictionPolicy) -> None:
    policy.forget([2, 7])
    assert sorted(policy.victims(5)) == [1, 3, 4, 5, 6]


def test_inserted_block_is_no_victim_before_its_release(
    policy: EvictionPolicy,
) -> None:
    policy.insert([8], NO_CONTEXT)
    assert len(policy) == 6
    policy.release([8])
    assert 8 in set(policy.victims(7))


def test_victim_can_come_back_under_a_new_key(policy: EvictionPolicy) -> None:
    (block,) = policy.victims(1)
    policy.insert([block], NO_CONTEXT)
    policy.release([block])
    assert sorted(policy.order()) == [1, 2, 3, 4, 5, 6]


def test_time_and_wishes_change_no_membership(policy: EvictionPolicy) -> None:
    policy.step(1e9, soon=[info(2).key, b"unknown"], dropped={})
    policy.step(2e9, soon=[], dropped={info(2).key: 2, b"unknown": 1})
    assert sorted(policy.order()) == [1, 2, 3, 4, 5, 6]


class ProtocolMachine(RuleBasedStateMachine):
    """A policy and the three sets of blocks that the protocol speaks of."""

    def __init__(self, policy: EvictionPolicy) -> None:
        super().__init__()
        self.policy = policy
        self.policy.bind(NUM_BLOCKS, info)
        self.without_key = set(range(1, NUM_BLOCKS))
        self.in_use: set[int] = set()
        self.evictable: set[int] = set()
        self.now = 0.0

    @precondition(lambda self: self.without_key)
    @rule(data=st.data(), priority=st.integers(0, 2))
    def insert(self, data: Any, priority: int) -> None:
        ids = data.draw(some_of(self.without_key))
        self.policy.insert(ids, BlockContext(priority=priority, expires_at=self.now))
        self.without_key -= set(ids)
        self.in_use |= set(ids)

    @precondition(lambda self: self.in_use)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        ids = data.draw(some_of(self.in_use))
        self.policy.release(ids)
        self.in_use -= set(ids)
        self.evictable |= set(ids)

    @precondition(lambda self: self.evictable)
    @rule(data=st.data(), is_hit=st.booleans())
    def pin(self, data: Any, is_hit: bool) -> None:
        ids = data.draw(some_of(self.evictable))
        self.policy.pin(ids)
        if is_hit:
            self.policy.hit(ids, NO_CONTEXT)
        self.evictable -= set(ids)
        self.in_use |= set(ids)

    @precondition(lambda self: self.in_use | self.evictable)
    @rule(data=st.data())
    def forget(self, data: Any) -> None:
        ids = data.draw(some_of(self.in_use | self.evictable))
        self.policy.forget(ids)
        # Blocks that lose their key in use may be given another one.
        self.evictable -= set(ids)
        self.in_use -= set(ids)
        self.without_key |= set(ids)

    @precondition(lambda self: self.evictable)
    @rule(data=st.data())
    def victims(self, data: Any) -> None:
        n = data.draw(st.integers(1, len(self.evictable)))
        expected = list(islice(self.policy.order(), n))
        assert self.policy.victims(n) == expected
        self.evictable -= set(expected)
        self.without_key |= set(expected)

    @rule(seconds=st.floats(0, 100), wish=st.integers(1, NUM_BLOCKS - 1))
    def step(self, seconds: float, wish: int) -> None:
        self.now += seconds
        key = info(wish).key
        self.policy.step(self.now, soon=[key], dropped={})
        self.policy.step(self.now, soon=[], dropped={key: 1})

    @invariant()
    def evictable_blocks_are_in_order_once(self) -> None:
        order = list(self.policy.order())
        assert len(order) == len(self.policy) == len(self.evictable)
        assert set(order) == self.evictable
        self.policy.check()


def some_of(ids: set[int]) -> st.SearchStrategy[list[int]]:
    return st.lists(st.sampled_from(sorted(ids)), min_size=1, max_size=4, unique=True)


@pytest.mark.parametrize("name", POLICIES)
def test_policy_keeps_the_protocol_whatever_happens(name: str) -> None:
    run_state_machine_as_test(
        lambda: ProtocolMachine(make(name)),
        settings=settings(max_examples=40, stateful_step_count=40, deadline=None),
    )


@pytest.mark.parametrize("name", POLICIES)
def test_policy_is_made_anew_each_time(name: str) -> None:
    assert make(name) is not make(name)


# -- LRU ---------------------------------------------------------------------------


@pytest.fixture
def lru() -> LRU:
    policy = LRU()
    policy.bind(NUM_BLOCKS, info)
    policy.insert([1, 2, 3], NO_CONTEXT)
    policy.release([3, 2, 1])
    return policy


def test_lru_evicts_in_order_of_release(lru: LRU) -> None:
    assert lru.victims(3) == [3, 2, 1]


def test_lru_takes_recency_from_the_last_release(lru: LRU) -> None:
    lru.pin([3])
    lru.release([3])
    assert list(lru.order()) == [2, 1, 3]


def test_lru_takes_no_recency_from_a_hit(lru: LRU) -> None:
    lru.hit([3], NO_CONTEXT)
    assert list(lru.order()) == [3, 2, 1]


def test_few_lru_victims_pass_many_stale_entries_in_few_calls() -> None:
    calls = 0

    class Counting(LRU):
        def _next_victims(self, n: int) -> list[int]:
            nonlocal calls
            calls += 1
            return super()._next_victims(n)

    lru = Counting()
    lru.bind(10_001, info)
    ids = [*range(1, 10_001)]
    lru.release(ids)
    lru.pin(ids[1:])
    lru.release(ids[1:])
    assert lru.victims(1) + lru.victims(1) == [1, 2]
    assert calls < 60
    lru.check()


def test_lru_takes_few_of_a_torn_release_and_keeps_the_rest(lru: LRU) -> None:
    lru.pin([2])
    assert lru.victims(1) == [3]
    lru.check()
    lru.release([2])
    assert lru.victims(2) == [1, 2]
