"""What a pool tells its policy, and what becomes of it when the policy fails."""

import logging
from collections.abc import Callable, Sequence

import pytest

from kvplugin.block import NULL_BLOCK
from kvplugin.block_pool import BlockPool
from kvplugin.errors import IntegrityError
from kvplugin.policies.eviction import LRU, NO_CONTEXT, BlockContext, BlockInfo
from tests.core.eviction_faults import (
    FAULTY_POLICIES,
    NUM_BLOCKS,
    Faulty,
    FaultyChoice,
    Recorder,
)
from tests.core.pool_helpers import cached, key, keys

WHO = BlockContext(priority=3, session="s")


@pytest.fixture
def policy() -> Recorder:
    return Recorder()


@pytest.fixture
def pool(policy: Recorder) -> BlockPool:
    """Blocks 1, 2 and 3 are cached and free, 4 is in use without a key; 3 is the
    first victim. The policy's notes begin after that."""
    pool = BlockPool(5, policy=policy)
    cached(pool, "abc")
    pool.get_new_blocks(1)
    policy.calls.clear()
    return pool


# -- what it hears -----------------------------------------------------------------


def test_policy_hears_who_inserts_a_run_in_one_call() -> None:
    policy = Recorder()
    pool = BlockPool(4, policy=policy)
    pool.insert(pool.get_new_blocks(3), keys("abc"), ctx=WHO)
    assert policy.calls == [("insert", [1, 2, 3], WHO)]


def test_context_is_optional(pool: BlockPool, policy: Recorder) -> None:
    pool.insert([4], [key("d")])
    pool.adopt([4])
    assert [call[-1] for call in policy.calls] == [NO_CONTEXT, NO_CONTEXT]


def test_policy_hears_of_a_release_once_and_in_order(
    pool: BlockPool, policy: Recorder
) -> None:
    pool.touch([1, 2, 3, 2])
    policy.calls.clear()
    pool.free_blocks([2, 4, 3, 1, 2])
    assert policy.calls == [("release", [3, 1, 2])]


def test_policy_hears_pins_and_releases_of_the_first_and_last_reference_only(
    pool: BlockPool, policy: Recorder
) -> None:
    pool.touch([1])
    pool.touch([2, 1, 1])
    pool.free_blocks([1, 1])
    pool.free_blocks([1])
    assert policy.calls == [("pin", [1]), ("pin", [2]), ("release", [1])]


def test_hit_on_a_free_block_is_a_pin_then_a_hit(
    pool: BlockPool, policy: Recorder
) -> None:
    pool.touch([2])
    policy.calls.clear()
    pool.adopt([1, 2], WHO)
    assert policy.calls == [("pin", [1]), ("hit", [1, 2], WHO)]


def test_touch_is_no_hit(pool: BlockPool, policy: Recorder) -> None:
    pool.touch([1])
    assert policy.calls == [("pin", [1])]


def test_policy_is_not_asked_while_blocks_without_key_last(
    pool: BlockPool, policy: Recorder
) -> None:
    pool.free_blocks([4])
    pool.get_new_blocks(1)
    assert policy.calls == []


def test_victims_are_not_forgotten_as_well(pool: BlockPool, policy: Recorder) -> None:
    pool.get_new_blocks(2)
    assert policy.calls == [("victims", [3, 2])]


def test_policy_hears_of_lost_keys_in_use_or_not(
    pool: BlockPool, policy: Recorder
) -> None:
    pool.touch([1])
    policy.calls.clear()
    pool.evict_blocks([4, 2, 1, 2])
    pool.drop_all_keys()
    assert policy.calls == [("forget", [2, 1]), ("forget", [3])]


def test_policy_is_never_shown_a_block_without_key(
    pool: BlockPool, policy: Recorder
) -> None:
    pool.adopt([4])
    pool.touch([4])
    pool.free_blocks([4, 4, 4])
    pool.evict_blocks([4])
    assert policy.calls == []


def test_policy_can_look_up_every_block_that_it_is_told_of() -> None:
    class Curious(LRU):
        needs_info = True

        def bind(self, num_blocks: int, info: Callable[[int], BlockInfo]) -> None:
            assert num_blocks == 4
            super().bind(num_blocks, info)
            self.info = info
            self.seen: list[bytes] = []

        def insert(self, ids: Sequence[int], ctx: BlockContext) -> None:
            self.look(ids)

        def hit(self, ids: Sequence[int], ctx: BlockContext) -> None:
            self.look(ids)

        def pin(self, ids: Sequence[int]) -> None:
            super().pin(ids)
            self.look(ids)

        def release(self, ids: Sequence[int]) -> None:
            super().release(ids)
            self.look(ids)

        def forget(self, ids: Sequence[int]) -> None:
            super().forget(ids)
            self.look(ids)

        def victims(self, n: int) -> list[int]:
            self.look(super().order())
            return super().victims(n)

        def look(self, ids: Sequence[int]) -> None:
            self.seen += [self.info(block).key for block in ids]

    policy = Curious()
    pool = BlockPool(4, policy=policy)
    blocks = cached(pool, "abc")  # insert, release
    pool.adopt(blocks[:1])  # pin, hit
    pool.get_new_blocks(1)  # victims
    pool.evict_blocks(blocks[:1])  # forget
    pool.drop_all_keys()  # forget
    assert pool.policy_failures == 0
    assert policy.seen == keys("abc" + "cba" + "aa" + "cb" + "a" + "b")


# -- when it fails -----------------------------------------------------------------


def provoke(pool: BlockPool) -> list[int]:
    """Call the pool so that it uses each method of its policy.

    Returns:
        The victims of the last call, which empties the pool.
    """
    a, b, _, d, *_ = cached(pool, "abcdef")
    pool.adopt([b, a])
    pool.evict_blocks([d])
    pool.free_blocks([a])
    victims = pool.get_new_blocks(pool.get_num_free_blocks())
    assert len(victims) == NUM_BLOCKS - 2
    return victims


@pytest.mark.parametrize("name", FAULTY_POLICIES)
def test_lru_takes_over_from_a_policy_that_fails(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy: Faulty = FAULTY_POLICIES[name]()
    pool = BlockPool(NUM_BLOCKS, policy=policy)
    assert provoke(pool) == provoke(BlockPool(NUM_BLOCKS, policy=LRU()))
    assert pool.policy_failures == policy.faults == 1
    (record,) = (r for r in caplog.records if r.levelno >= logging.ERROR)
    assert record.name == "vllm.kvplugin.block_pool"
    assert type(policy).__name__ in record.getMessage()
    assert record.exc_info
    pool.check()


def test_policy_that_chooses_a_block_without_key_is_replaced() -> None:
    # Block 3 is the second of the three blocks that are wanted.
    policy = FaultyChoice(lambda ids: [3])
    pool = BlockPool(4, policy=policy)
    (cached_block,) = cached(pool, "a")
    assert pool.get_new_blocks(3) == [2, 3, cached_block]
    assert pool.policy_failures == 1
    pool.check()


@pytest.mark.parametrize("length", [0, 1, 99])
def test_policy_that_miscounts_costs_no_block(length: int) -> None:
    class Miscounts(LRU):
        def __len__(self) -> int:
            return length

    pool = BlockPool(4, policy=Miscounts())
    a, b, c = cached(pool, "abc")
    assert pool.get_num_free_blocks() == 3
    assert pool.get_new_blocks(3) == [c, b, a]


def test_policy_that_loses_a_block_is_found_out_and_costs_none() -> None:
    class Loses(LRU):
        def release(self, ids: Sequence[int]) -> None:
            super().release(ids[1:])

    pool = BlockPool(4, policy=Loses())
    a, b, c = cached(pool, "abc")
    with pytest.raises(IntegrityError, match="the policy's evictable set"):
        pool.check()
    assert pool.get_new_blocks(3) == [c, b, a]
    assert pool.policy_failures == 1
    pool.check()


def test_order_of_release_outlives_the_policy() -> None:
    policy = FaultyChoice(lambda ids: [])
    pool = BlockPool(6, policy=policy)
    a, b, c, d, e = cached(pool, "abcde")
    pool.touch([a, c, e])
    pool.free_blocks([e, a])
    pool.free_blocks([c])
    assert pool.get_new_blocks(5) == [d, b, e, a, c]


def test_a_policy_hears_of_all_blocks_of_a_call_at_once() -> None:
    policy = Recorder()
    pool = BlockPool(8, policy=policy)
    ids = pool.get_new_blocks(4)
    row = [ids[0], NULL_BLOCK, ids[1], ids[2]]
    assert pool.cache_run(row, [b"a", b"b", b"c", b"d"], None, 0, 0) == [0, 2, 3]
    pool.cache_run(ids, [b"a", b"c", b"d", b"e"], None, 0, 0, fresh=False)
    inserted = [call[1] for call in policy.calls if call[0] == "insert"]
    assert inserted == [ids[:3], ids[3:]]
