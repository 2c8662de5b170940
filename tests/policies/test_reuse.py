"""What the reuse-predicting policy learns, and that it keeps its books."""

from collections.abc import Iterable, Sequence
from itertools import count, islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplugin.block_pool import BlockPool
from kvplugin.policies.eviction import (
    LRU,
    NO_CONTEXT,
    BlockContext,
    BlockInfo,
    EvictionPolicy,
    hazard,
)
from kvplugin.policies.eviction.hazard import Learner
from kvplugin.policies.eviction.reuse import Reuse
from tests.core.pool_helpers import keys


class Cache:
    """A prefix cache that serves one request after another, as a pool would.

    A prompt is a tuple of ints; a block's key is the prompt up to its end. Groups keep
    their blocks apart, and a hit in one is not asked to be a hit in the others.
    """

    def __init__(self, policy: EvictionPolicy, num_blocks: int) -> None:
        self.policy = policy
        self.keyed: dict[int, BlockInfo] = {}
        self.index: dict[bytes, int] = {}
        self.free = list(range(num_blocks))
        policy.bind(num_blocks, self.keyed.__getitem__)

    def serve(
        self, prompt: Sequence[int], ctx: BlockContext = NO_CONTEXT, group: int = 0
    ) -> int:
        """Blocks that hit."""
        blocks = self.start(prompt, ctx, group)
        self.policy.release(blocks[::-1])
        return self.hits

    def start(
        self, prompt: Sequence[int], ctx: BlockContext = NO_CONTEXT, group: int = 0
    ) -> list[int]:
        keys = [repr((group, *prompt[: i + 1])).encode() for i in range(len(prompt))]
        blocks = []
        for key in keys:
            if key not in self.index:
                break
            blocks.append(self.index[key])
        self.hits = len(blocks)
        if blocks:
            self.policy.pin(blocks)
            self.policy.hit(blocks, ctx)
        new = self.take(len(keys) - len(blocks))
        for depth, block in enumerate(new, len(blocks)):
            parent = keys[depth - 1] if depth else None
            self.lose(self.index.get(keys[depth]))
            self.index[keys[depth]] = block
            self.keyed[block] = BlockInfo(keys[depth], parent, group, depth)
        if new:
            self.policy.insert(new, ctx)
        return blocks + new

    def take(self, n: int) -> list[int]:
        new = [self.free.pop() for _ in range(min(n, len(self.free)))]
        if len(new) < n:
            first = list(islice(self.policy.order(), n - len(new)))
            victims = self.policy.victims(n - len(new))
            assert victims == first
            for block in victims:
                del self.index[self.keyed.pop(block).key]
            new += victims
        return new

    def lose(self, block: int | None) -> None:
        """Forget an evictable block that a later one of the same key replaces."""
        if block is not None:
            self.policy.forget([block])
            del self.index[self.keyed.pop(block).key]
            self.free.append(block)

    def holds(self, prompt: Sequence[int], group: int = 0) -> int:
        """Leading blocks of a prompt that would hit."""
        prefixes = (prompt[: i + 1] for i in range(len(prompt)))
        missing = (
            i
            for i, prefix in enumerate(prefixes)
            if repr((group, *prefix)).encode() not in self.index
        )
        return next(missing, len(prompt))


def prompts_of(numbers: Iterable[int], length: int) -> Iterable[tuple[int, ...]]:
    """One-off prompts."""
    while True:
        yield tuple(islice(numbers, length))


def hits_of(policy: EvictionPolicy, prompts: Sequence[tuple[int, ...]], n: int) -> int:
    """Blocks that hit in the second half of the prompts."""
    cache = Cache(policy, n)
    hits = [cache.serve(prompt) for prompt in prompts]
    policy.check()
    return sum(hits[len(hits) // 2 :])


def test_scans_do_not_flush_a_hot_prefix() -> None:
    fresh = count(1000)
    scans = iter(prompts_of(fresh, 20))
    hot = tuple(range(10))
    prompts: list[tuple[int, ...]] = []
    for _ in range(60):
        prompts += [(*hot, next(fresh)), *islice(scans, 6)]
    # Between two uses of the prefix, 120 blocks go by.
    assert hits_of(LRU(), prompts, 100) == 0
    assert hits_of(Reuse(), prompts, 100) > 200


def test_a_loop_larger_than_the_cache_hits() -> None:
    loop = [tuple(range(i, i + 10)) for i in range(0, 200, 10)] * 20
    assert hits_of(LRU(), loop, 100) == 0
    assert hits_of(Reuse(), loop, 100) > 600


def test_conversations_that_grow_outlive_one_off_prompts() -> None:
    fresh = count(1000)
    scans = iter(prompts_of(fresh, 12))
    cache = Cache(Reuse(), 400)
    talks = [tuple(islice(fresh, 8)) for _ in range(4)]
    for turn in range(60):
        at = turn % len(talks)
        talks[at] = (*talks[at][:24], next(fresh), next(fresh))
        for prompt in (talks[at], *islice(scans, 7)):
            cache.serve(prompt)
    # The oldest of the talks was released 32 requests ago, as were most blocks.
    last = [next(scans) for _ in range(20)]
    for prompt in last:
        cache.serve(prompt)
    assert sum(cache.holds(talk) for talk in talks) >= 0.8 * sum(map(len, talks))
    assert sum(cache.holds(prompt) for prompt in last) < sum(map(len, last))


def test_an_evicted_conversation_is_known_when_it_returns() -> None:
    cache = Cache(Reuse(), 30)
    talk = tuple(range(10))
    cache.serve(talk)
    for prompt in islice(prompts_of(count(1000), 20), 3):
        cache.serve(prompt)
    assert cache.holds(talk) == 0
    policy = cache.policy
    assert isinstance(policy, Reuse)
    blocks = cache.start((*talk, 10, 11))
    (line,) = policy._lines.values()
    assert (line.turn, line.hit) == (1, 9)
    policy.release(blocks[::-1])
    assert not policy._lines


def test_without_anything_learned_the_oldest_release_goes_first() -> None:
    cache = Cache(Reuse(), 30)
    for start in (0, 10, 20):
        cache.serve(range(start, start + 10))
    # The last blocks of prompts may go before the others.
    order = [b for b in cache.policy.order() if cache.keyed[b].depth < 9]
    lru = [
        cache.index[repr((0, *range(s, e + 1))).encode()] for s, e in _oldest_first()
    ]
    assert order == lru


def _oldest_first() -> list[tuple[int, int]]:
    return [(s, s + depth) for s in (0, 10, 20) for depth in range(8, -1, -1)]


def test_within_a_request_children_go_before_parents() -> None:
    cache = Cache(Reuse(), 100)
    for length in (7, 12, 20, 25):
        cache.serve(range(length))
    depths = [cache.keyed[block].depth for block in cache.policy.order()]
    assert depths == sorted(depths, reverse=True)


def test_a_prefix_that_many_share_is_told_from_a_conversation() -> None:
    cache = Cache(Reuse(), 200)
    shared = tuple(range(4))
    for i in range(100, 108):
        blocks = cache.start((*shared, *range(i * 10, i * 10 + 8)))
        lines = cache.policy._lines  # type: ignore[attr-defined]
        turns = [(line.turn, line.shared) for line in lines.values()]
        assert turns == ([] if i == 100 else [(0, 4)])
        cache.policy.release(blocks[::-1])


def test_turns_are_taken_from_the_context_where_it_has_them() -> None:
    cache = Cache(Reuse(), 50)
    cache.start(range(8), BlockContext(turn=5))
    cache.start(range(100, 104), BlockContext())
    lines = cache.policy._lines  # type: ignore[attr-defined]
    assert [line.turn for line in lines.values()] == [5]


def test_an_ended_session_goes_before_others() -> None:
    cache = Cache(Reuse(), 40)
    for start in (0, 20):
        cache.serve(range(start, start + 10))
    cache.serve(range(40, 50), BlockContext(ends_session=True))
    first = list(islice(cache.policy.order(), 9))
    assert all(cache.keyed[block].key.startswith(b"(0, 40") for block in first)


def test_groups_learn_apart() -> None:
    fresh = count(1000)
    policy = Reuse()
    cache = Cache(policy, 400)
    loop = [tuple(range(i, i + 10)) for i in range(0, 100, 10)]
    for i in range(400):
        cache.serve(loop[i % 10], group=3)
        cache.serve(tuple(islice(fresh, 10)), group=7)
    policy.check()
    assert [learner.offset for learner in policy._learners] == [0, hazard.NUM_CLASSES]
    hits = [sum(map(sum, learner._hits)) for learner in policy._learners]
    assert hits[0] > 50
    assert hits[1] == 0
    assert all(cache.holds(prompt, group=3) == 10 for prompt in loop)


def test_it_learns_from_hits_and_from_no_other_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares = []

    def count(self: Any, cls: int, slot: int, share: float, traits: Any) -> None:
        shares.append(share)

    monkeypatch.setattr(hazard.Learner, "hit", count)
    policy = Reuse()
    pool = BlockPool(21, policy=policy)
    row = pool.get_new_blocks(8)
    pool.insert(row, keys("abcdefgh"))
    pool.free_blocks(row[::-1])
    for _ in range(10):
        pool.touch(row)
        pool.free_blocks(row[::-1])
    pool.touch(row)
    pool.adopt(pool.get_new_blocks(1))  # not of these blocks
    assert not shares
    at_risk = [sum(cohort.at_risk.values()) for cohort in policy._cohorts]
    assert sum(at_risk) <= 2  # runs of the last release, and no others
    pool.free_blocks(row[::-1])
    pool.adopt(row)
    assert set(shares) == {1}
    pool.check()


def test_memory_of_keys_is_bounded() -> None:
    policy = Reuse()
    cache = Cache(policy, 64)
    for prompt in islice(prompts_of(count(), 8), 1500):
        cache.serve(prompt)
    assert len(policy._known) == 4096
    assert sum(len(r) for c in policy._cohorts for r in c.runs.values()) < 1200
    assert sum(policy._num_live) <= 64


def test_blocks_that_are_used_again_and_again_leave_nothing_behind() -> None:
    policy = Reuse()
    cache = Cache(policy, 64)
    for _ in range(4000):
        cache.serve(range(16))
    policy.check()
    assert sum(len(r) for c in policy._cohorts for r in c.runs.values()) < 1200


def test_the_same_requests_get_the_same_order() -> None:
    fresh = count(1000)
    prompts = [tuple(islice(fresh, 1 + i * 7 % 13)) for i in range(50)]
    orders = []
    for _ in range(2):
        cache = Cache(Reuse(), 150)
        for i in range(400):
            cache.serve(prompts[i * i % 50])
        orders.append(list(cache.policy.order()))
    assert orders[0] == orders[1]


def test_too_many_victims_change_nothing() -> None:
    cache = Cache(Reuse(), 10)
    cache.serve(range(6))
    before = list(cache.policy.order())
    with pytest.raises(ValueError, match="7 victims wanted, 6 evictable"):
        cache.policy.victims(7)
    assert list(cache.policy.order()) == before
    assert cache.policy.victims(0) == []


def test_slots_follow_the_cohorts_as_they_merge() -> None:
    policy = Reuse()
    policy.bind(2, {0: BlockInfo(b"a", None, 0, 0)}.__getitem__)
    policy.release([0])
    for _ in range(3000):
        (slot,) = (
            slot for slot, c in enumerate(policy._cohorts) if any(c.runs.values())
        )
        assert hazard.slot_of(0, policy._epoch) == slot
        policy._epoch += 1
        policy._age()


@pytest.mark.parametrize("age", [0, 30, 300, 3000])
def test_worth_is_highest_where_a_pause_is_about_to_end(age: int) -> None:
    learner = Learner(0)
    slot = hazard.slot_of(0, age // hazard.EPOCH)
    cls = learner.class_of[0]
    for _ in range(2000):
        learner.released(0)
        for earlier in range(slot):
            learner.survived(cls, earlier, 1.0)
        learner.hit(cls, slot, 1.0, 0)
    learner.learn()
    worth = {-minus_slot: worth for worth, minus_slot, _ in learner.ranks[cls]}
    top = max(worth, key=worth.__getitem__)
    assert abs(top - slot) <= 1
    assert all(worth[i] <= worth[i + 1] for i in range(top))


def test_counts_fade() -> None:
    learner = Learner(0)
    learner.released(0)
    for _ in range(4096 // hazard.EPOCH // hazard.LEARN_EVERY):
        learner.fade()
    assert learner._released[0] == pytest.approx(0.5)


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=6)
CALLS = st.lists(
    st.tuples(PROMPTS, st.integers(0, 1), st.booleans(), st.integers(0, 3)),
    max_size=60,
)


@given(num_blocks=st.integers(6, 20), calls=CALLS)
def test_books_are_kept_whatever_is_asked(
    num_blocks: int, calls: list[tuple[list[int], int, bool, int]]
) -> None:
    cache = Cache(Reuse(), num_blocks)
    for prompt, group, ended, forgotten in calls:
        ctx = BlockContext(turn=len(prompt) // 3, ends_session=ended)
        cache.serve(prompt, ctx, group)
        for block in list(cache.keyed)[:forgotten]:
            cache.lose(block)
        cache.policy.check()
        assert sorted(cache.policy.order()) == sorted(cache.keyed)
