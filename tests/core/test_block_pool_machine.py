"""Whatever is done to a pool, in whatever order, it does what a naive pool does."""

from collections.abc import Callable, Iterable
from functools import partial
from hashlib import sha256
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

from kvplugin.block_pool import BlockPool
from kvplugin.errors import CapacityError
from kvplugin.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from kvplugin.policies.eviction import LRU, EvictionPolicy
from tests.core.eviction_faults import FAULTY_POLICIES, NUM_BLOCKS, Faulty, RandomPolicy
from tests.core.naive_pool import Entry, NaivePool

CHAINS = 3
"""Prefixes that requests have in common, so that keys come again."""

KEYS = {
    (chain, depth): sha256(bytes([chain, depth])).digest() + bytes([0, 0, 0, chain])
    for chain in range(CHAINS)
    for depth in range(NUM_BLOCKS)
}


class PoolMachine(RuleBasedStateMachine):
    """A pool and its model, driven by the same calls.

    Args:
        policy: of the pool.
        is_lru: whether victims come in the order of their release, be it by the
            policy itself or by the LRU that takes over.
    """

    def __init__(self, policy: EvictionPolicy, *, is_lru: bool) -> None:
        super().__init__()
        self.policy = policy
        self.is_lru = is_lru
        self.pool = BlockPool(
            NUM_BLOCKS, policy=policy, enable_events=True, lineage=True
        )
        self.model = NaivePool(NUM_BLOCKS)
        self.listener: set[tuple[int, int | None]] = set()

    # -- what engines and tiers do -------------------------------------------------

    @rule(data=st.data())
    def get_new_blocks(self, data: Any) -> None:
        self._take(data.draw(st.integers(0, self.model.free)))

    @rule(data=st.data())
    def get_more_than_there_are(self, data: Any) -> None:
        n = data.draw(st.integers(self.model.free + 1, 2 * NUM_BLOCKS))
        with pytest.raises(CapacityError):
            self.pool.get_new_blocks(n)

    @precondition(lambda self: self.without_key_in_use)
    @rule(data=st.data())
    def insert(self, data: Any) -> None:
        some = st.lists(
            st.sampled_from(self.without_key_in_use), min_size=1, unique=True
        )
        self._insert(data.draw(some), data)

    @precondition(lambda self: self.model.free)
    @rule(data=st.data())
    def serve_a_request(self, data: Any) -> None:
        """From its first block to its end: what fills a pool with keys."""
        blocks = self._take(data.draw(st.integers(1, self.model.free)))
        self._insert(blocks, data)
        self._free(blocks[::-1])

    @rule(data=st.data())
    def touch(self, data: Any) -> None:
        blocks = data.draw(some_of({0, *self.model.used, *self.model.keyed}))
        self.pool.touch(iter(blocks))
        self.model.touch(filter(None, blocks))

    @rule(data=st.data())
    def adopt(self, data: Any) -> None:
        blocks = data.draw(some_of({0, *self.model.keyed}))
        self.pool.adopt(blocks)
        self.model.touch(filter(None, blocks))

    @precondition(lambda self: self.model.used)
    @rule(data=st.data())
    def free_blocks(self, data: Any) -> None:
        references = [0, *sorted(self.model.used.elements())]
        order = data.draw(st.permutations(references))
        self._free(order[: data.draw(st.integers(1, len(order)))])

    @precondition(lambda self: self.model.used)
    @rule()
    def free_all_blocks(self) -> None:
        self._free(sorted(self.model.used.elements()))

    @rule(data=st.data())
    def evict_blocks(self, data: Any) -> None:
        blocks = data.draw(some_of(range(NUM_BLOCKS)))
        self.pool.evict_blocks(iter(blocks))
        self.model.evict(blocks)

    @precondition(lambda self: self.is_full_of_keys)
    @rule()
    def drop_all_keys(self) -> None:
        self.pool.drop_all_keys()
        self.model.drop_all_keys()

    @precondition(lambda self: self.model.used or self.is_full_of_keys)
    @rule()
    def reset_prefix_cache(self) -> None:
        idle = not self.model.used
        assert self.pool.reset_prefix_cache() is idle
        if idle:
            self.model.drop_all_keys()

    def _take(self, n: int) -> list[int]:
        model = self.model
        taken = self.pool.get_new_blocks(n)
        without_key = model.stack[::-1][:n]
        victims = taken[len(without_key) :]
        assert taken[: len(without_key)] == without_key
        assert len(taken) == n == len(set(taken))
        assert set(victims) <= set(model.recency)
        if self.is_lru:
            assert victims == model.recency[: len(victims)]
        model.take(taken)
        return taken

    def _insert(self, blocks: list[int], data: Any) -> None:
        chain = data.draw(st.integers(0, CHAINS - 1))
        depth = data.draw(st.integers(0, NUM_BLOCKS - 1 - len(blocks)))
        entries = [
            Entry(block, KEYS[chain, at], KEYS.get((chain, at - 1)), at)
            for at, block in enumerate(blocks, depth)
        ]
        self.pool.insert(
            blocks,
            [entry.key for entry in entries],
            parent=KEYS.get((chain, depth - 1)),
            depth=depth,
        )
        self.model.insert(entries)

    def _free(self, blocks: list[int]) -> None:
        self.pool.free_blocks(iter(blocks))
        self.model.release(filter(None, blocks))

    # -- what holds after each of it -----------------------------------------------

    @invariant()
    def pool_is_sound(self) -> None:
        self.pool.check()

    @invariant()
    def pool_answers_as_the_model(self) -> None:
        pool, model = self.pool, self.model
        assert pool.get_num_free_blocks() == model.free
        assert pool.num_used_blocks == len(model.used)
        assert pool.usage == len(model.used) / (NUM_BLOCKS - 1)
        assert pool.num_keyed_blocks == len(model.entries)
        for block in range(1, NUM_BLOCKS):
            assert pool.ref_count(block) == model.used[block]
        for key in KEYS.values():
            assert pool.get(key) == model.get(key)
        for entry in model.entries:
            info = pool.info(entry.block)
            assert info == (entry.key, entry.parent, entry.key[-1], entry.depth)

    @invariant()
    def listener_knows_the_index(self) -> None:
        for event in self.pool.take_events():
            replay(event, self.listener)
        assert self.listener == {
            (int.from_bytes(entry.key[24:32], "big"), entry.key[-1])
            for entry in self.model.entries
        }

    @invariant()
    def faulty_policy_is_asked_once(self) -> None:
        faults = self.policy.faults if isinstance(self.policy, Faulty) else 0
        assert self.pool.policy_failures == faults <= 1

    @property
    def is_full_of_keys(self) -> bool:
        return len(self.model.entries) > 0.8 * NUM_BLOCKS

    @property
    def without_key_in_use(self) -> list[int]:
        return sorted(self.model.used.keys() - self.model.keyed)


def some_of(blocks: Iterable[int]) -> st.SearchStrategy[list[int]]:
    return st.lists(st.sampled_from(sorted(blocks)), min_size=1, max_size=3)


def replay(event: KVCacheEvent, known: set[tuple[int, int | None]]) -> None:
    """What a router makes of an event."""
    match event:
        case BlockStored():
            known.update((h, event.group_idx) for h in event.block_hashes)
        case BlockRemoved():
            known.difference_update((h, event.group_idx) for h in event.block_hashes)
        case AllBlocksCleared():
            known.clear()


def run(make_policy: Callable[[], EvictionPolicy], is_lru: bool, examples: int) -> None:
    run_state_machine_as_test(
        lambda: PoolMachine(make_policy(), is_lru=is_lru),
        settings=settings(max_examples=examples, stateful_step_count=40, deadline=None),
    )


def test_pool_with_lru_does_what_the_model_does() -> None:
    run(LRU, is_lru=True, examples=60)


@pytest.mark.parametrize("seed", [0, 1])
def test_pool_with_random_victims_does_what_the_model_does(seed: int) -> None:
    run(partial(RandomPolicy, seed), is_lru=False, examples=30)


@pytest.mark.parametrize("name", FAULTY_POLICIES)
def test_pool_with_faulty_policy_goes_on_as_lru(name: str) -> None:
    run(FAULTY_POLICIES[name], is_lru=True, examples=10)
