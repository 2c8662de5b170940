"""Policies that protect before one that ranks: names, options, and the protocol."""

from collections import Counter
from itertools import islice
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin import BlockPool, ConfigError
from kvplugin.hooks import EvictionPolicyContext, Hooks
from kvplugin.policies.eviction import (
    LRU,
    NO_CONTEXT,
    BlockContext,
    EvictionPolicy,
    protecting,
)
from kvplugin.policies.eviction.cost import CostAware
from kvplugin.policies.eviction.protecting import Protecting
from kvplugin.policies.eviction.queue_informed import (
    QueueInformed,
    QueueInformedOptions,
)
from kvplugin.policies.eviction.retention import Retention, RetentionOptions
from tests.core.pool_helpers import key
from tests.policies.prompts import Prompts
from tests.policies.strict_inner import StrictInner

HOOKS = Hooks.of()


def make(name: str, **options: object) -> EvictionPolicy:
    return HOOKS.make_eviction_policy(
        EvictionPolicyContext(name=name, options=options, num_blocks=10)
    )


# -- names and options -------------------------------------------------------------


def test_each_part_wraps_the_next() -> None:
    policy: Any = make("retention+queue+cost")
    assert type(policy) is Retention
    assert type(policy._inner) is QueueInformed
    assert type(policy._inner._inner) is CostAware


@pytest.mark.parametrize("name", ["retention", "queue"])
def test_a_protecting_policy_alone_stands_before_lru(name: str) -> None:
    policy: Any = make(name)
    assert type(policy._inner) is LRU


def test_options_are_by_part() -> None:
    policy: Any = make(
        "retention+cost",
        retention={"protect_sessions": True},
        cost={"block_size": 512, "attention_share_at": 1024},
    )
    assert policy._options == RetentionOptions(protect_sessions=True)
    assert policy._inner._attention == 0.5


def test_options_of_a_single_name_are_its_own() -> None:
    policy: Any = make("retention", session_ttl=5)
    assert policy._options.session_ttl == 5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("retention+nonsense", {}, "nonsense"),
        ("cost+lru", {}, "'cost' ranks all blocks.*only stand last"),
        ("lru+retention", {}, "'lru' ranks all blocks.*only stand last"),
        ("retention+retention+lru", {}, "each policy once"),
        ("retention+", {}, "each policy once"),
        ("+lru", {}, "each policy once"),
        ("retention+lru", {"session_ttl": 5}, "unknown policy 'session_ttl'"),
        ("retention+lru", {"retention": 5}, "retention must be a table"),
        ("retention+lru", {"retention": {"session_tl": 5}}, "'session_ttl'"),
        ("retention+lru", {"lru": {"size": 5}}, "'lru' takes no options, got size"),
        ("queue", {"max_protected_share": 2}, "max_protected_share=2"),
        ("queue", {"max_protected_share": "all"}, "max_protected_share"),
        ("cost", {"attention": 2}, "unknown key 'attention'"),
    ],
)
def test_what_makes_no_sense_is_refused(
    name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(name, **options)


@pytest.mark.parametrize(
    ("name", "info", "hits", "steps"),
    [
        ("retention+random", False, True, True),
        ("queue+random", True, False, True),
        ("retention+queue+random", True, True, True),
        ("queue+cost", True, True, True),
    ],
)
def test_it_needs_what_its_parts_need(
    name: str, info: bool, hits: bool, steps: bool
) -> None:
    policy: Any = make(name)
    assert (policy.needs_info, policy.needs_hits, policy.needs_steps) == (
        info,
        hits,
        steps,
    )


# -- the protocol ------------------------------------------------------------------


def retention(inner: EvictionPolicy, share: float = 0.4) -> Retention:
    return Retention(
        inner,
        RetentionOptions(
            max_protected_share=share,
            max_session_share=0.3,
            protect_sessions=True,
            session_ttl=5,
        ),
    )


def queue(inner: EvictionPolicy, share: float = 0.4) -> QueueInformed:
    return QueueInformed(inner, QueueInformedOptions(max_protected_share=share))


WRAPPED = {
    "retention": retention,
    "queue": queue,
    "retention+queue": lambda inner: retention(queue(inner)),
    "queue+retention": lambda inner: queue(retention(inner)),
    "all of the pool": lambda inner: retention(queue(inner, 1), 1),
    "nothing": lambda inner: retention(queue(inner, 0), 0),
}
PROMPTS = st.text("ab", min_size=1, max_size=5)
CONTEXTS = st.builds(
    BlockContext,
    priority=st.sampled_from([-1, 0, 0, 1, 2]),
    expires_at=st.sampled_from([None, None, 3.0, 9.0]),
    session=st.sampled_from([None, "s", "t", "u"]),
    ends_session=st.sampled_from([False, False, False, True]),
)
ACTIONS = st.one_of(
    st.tuples(st.just("begin"), PROMPTS, CONTEXTS),
    st.tuples(st.just("copy"), PROMPTS, CONTEXTS),
    st.tuples(st.just("end"), st.integers(0, 9)),
    st.tuples(st.just("evict"), st.sets(st.integers(1, 20), max_size=3)),
    st.tuples(st.just("step"), st.lists(PROMPTS, max_size=2), st.integers(0, 2)),
)


class Run:
    """Requests over a pool whose policy is watched from both sides."""

    def __init__(self, wrap: Any) -> None:
        self.inner = StrictInner()
        self.policy: Protecting = wrap(self.inner)
        self.cache = Prompts(20, self.policy)
        self.rows: list[list[int]] = []
        self.waiting: list[str] = []
        self.now = 0.0

    def begin(self, prompt: str, ctx: BlockContext) -> None:
        if self.cache.pool.get_num_free_blocks() >= len(prompt):
            self.rows.append(self.cache.begin(prompt, ctx))

    def copy(self, prompt: str, ctx: BlockContext) -> None:
        """A request computes what is there already."""
        pool = self.cache.pool
        if pool.get_num_free_blocks() >= len(prompt):
            row = pool.get_new_blocks(len(prompt))
            pool.insert(row, self.cache.keys(prompt), ctx=ctx)
            self.rows.append(row)

    def end(self, which: int) -> None:
        if self.rows:
            self.cache.end(self.rows.pop(which % len(self.rows)))

    def evict(self, ids: set[int]) -> None:
        self.cache.pool.evict_blocks(ids)

    def step(self, begin: list[str], leave: int) -> None:
        left, self.waiting = self.waiting[:leave], self.waiting[leave:] + begin
        soon = [key for prompt in begin for key in self.cache.keys(prompt)]
        dropped = Counter(key for prompt in left for key in self.cache.keys(prompt))
        self.now += 1.5
        self.cache.pool.step(self.now, iter(soon), dropped)
        assert self.inner.soon == soon

    def check(self) -> None:
        self.cache.pool.check()
        policy: Any = self.policy
        while isinstance(policy, Protecting):
            assert len(policy._saved) + len(policy._due) <= policy._budget
            policy = policy._inner


@pytest.mark.parametrize("per_ahead", [1, 8])
@pytest.mark.parametrize("name", WRAPPED)
@settings(max_examples=40, deadline=None)
@given(actions=st.lists(ACTIONS, min_size=5, max_size=50), n=st.integers(0, 20))
def test_inner_policy_sees_its_protocol_and_no_block_is_lost(
    name: str, per_ahead: int, actions: list[tuple[Any, ...]], n: int
) -> None:
    with patch.object(protecting, "_PER_AHEAD", per_ahead):
        keep_the_protocol(Run(WRAPPED[name]), actions, n)


def keep_the_protocol(run: Run, actions: list[tuple[Any, ...]], n: int) -> None:
    for action, *args in actions:
        getattr(run, action)(*args)
        run.check()
    n = min(n, len(run.policy))
    expected = list(islice(run.policy.order(), n))
    assert run.policy.victims(n) == expected
    for row in run.rows:
        run.cache.pool.free_blocks(row[::-1])
    assert run.cache.pool.get_num_free_blocks() == 20


@pytest.mark.parametrize("name", WRAPPED)
@settings(max_examples=40, deadline=None)
@given(actions=st.lists(ACTIONS, min_size=5, max_size=50))
def test_no_parent_goes_before_its_child(
    name: str, actions: list[tuple[Any, ...]]
) -> None:
    run = Run(WRAPPED[name])
    for action, *args in actions:
        if action not in ("copy", "evict"):  # which leave children without a parent
            getattr(run, action)(*args)
        order = run.cache.order()
        places = {prefix: place for place, prefix in enumerate(order)}
        for place, prefix in enumerate(order):
            assert places.get(prefix[:-1], len(order)) > place


def test_what_the_outer_policy_lets_go_the_inner_one_may_protect() -> None:
    cache = Prompts(12, retention(queue(LRU())))
    cache.pool.step(0.0, cache.keys("ab"), {})
    cache.serve("ab", ctx=BlockContext(expires_at=5))
    cache.serve("x")
    assert cache.order() == ["x", "ab", "a"]
    cache.pool.step(6.0, [], {})
    cache.serve("y")
    assert cache.order() == ["x", "y", "ab", "a"]
    cache.pool.step(7.0, [], dict.fromkeys(cache.keys("ab"), 1))
    cache.serve("z")
    assert cache.order() == ["ab", "a", "x", "y", "z"]


def test_with_a_broken_inner_policy_the_pool_goes_on_with_lru() -> None:
    class Broken(LRU):
        def victims(self, n: int) -> list[int]:
            raise RuntimeError

    cache = Prompts(6, retention(Broken()), strict=False)
    cache.serve("ab", ctx=BlockContext(priority=1))
    cache.serve("xyz")
    cache.pool.get_new_blocks(4)
    cache.pool.check()
    assert cache.pool.policy_failures == 1
    held = [name for name in ("a", "ab", "x", "xy", "xyz") if cache.has(name)]
    assert held == ["x", "xy"]


def test_saving_many_blocks_asks_the_inner_policy_few_times() -> None:
    class Counting(LRU):
        calls = 0

        def victims(self, n: int) -> list[int]:
            self.calls += 1
            return super().victims(n)

    inner = Counting()
    policy = retention(inner, 0.5)
    cache = Prompts(10_400, policy)
    blocks = cache.pool.get_new_blocks(10_400)
    keys = [key(str(number)) for number in range(10_400)]
    for first in range(0, 5200, 100):
        ctx = BlockContext(priority=1, session=str(first))
        cache.pool.insert(
            blocks[first : first + 100], keys[first : first + 100], ctx=ctx
        )
    cache.pool.insert(blocks[5200:], keys[5200:], ctx=NO_CONTEXT)
    cache.pool.free_blocks(blocks)
    expected = [*islice(policy.order(), 300)]
    assert policy.victims(1) + policy.victims(299) == expected == blocks[5200:5500]
    assert inner.calls < 120
    assert 0 <= len(policy._due) <= len(policy._saved) // 8
    policy.check()


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("lru", False),
        ("reuse", False),
        ("retention", False),
        ("retention+reuse", False),
        ("queue", True),
        ("retention+queue+lru", True),
    ],
)
def test_demand_is_followed_only_for_who_reads_it(name: str, wanted: bool) -> None:
    pool = BlockPool(4, policy=make(name))
    assert pool.wants_demand is wanted
    assert pool.wants_steps is (wanted or "retention" in name)
