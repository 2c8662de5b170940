"""The rules of a pool one by one: who gets which block, who may do what to it."""

from itertools import takewhile
from random import Random

import pytest

from kvplugin.block_pool import NULL_BLOCK, BlockPool
from kvplugin.errors import CapacityError, IntegrityError
from kvplugin.events import AllBlocksCleared
from tests.core.eviction_faults import Recorder
from tests.core.pool_helpers import cached, key, keys, visible

# -- taking ------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [-1, 0])
def test_a_pool_needs_its_null_block(num_blocks: int) -> None:
    with pytest.raises(CapacityError, match=f"at least 1 block.*got {num_blocks}"):
        BlockPool(num_blocks)


def test_new_pool_hands_out_low_ids_first_and_the_null_block_never() -> None:
    pool = BlockPool(5)
    assert pool.get_new_blocks(2) + pool.get_new_blocks(2) == [1, 2, 3, 4]
    assert pool.get_num_free_blocks() == 0


def test_new_block_has_one_reference_and_no_key() -> None:
    pool = BlockPool(3)
    cached(pool, "ab")
    for block in pool.get_new_blocks(2):
        assert pool.ref_count(block) == 1
        with pytest.raises(IntegrityError, match="no key"):
            pool.info(block)
    assert pool.get(key("a")) is pool.get(key("b")) is None


def test_too_many_blocks_are_refused_and_none_is_taken() -> None:
    pool = BlockPool(5, enable_events=True)
    cached(pool, "ab")
    pool.get_new_blocks(1)
    pool.take_events()
    before = visible(pool)
    with pytest.raises(CapacityError, match="4 blocks wanted, 3 of 4 free"):
        pool.get_new_blocks(4)
    assert visible(pool) == before
    assert pool.get_new_blocks(3) == [4, 2, 1]


def test_no_blocks_are_a_list_without_blocks() -> None:
    assert BlockPool(2).get_new_blocks(0) == []


def test_blocks_without_key_go_before_cached_ones() -> None:
    pool = BlockPool(6)
    a, b = cached(pool, "ab")
    pool.free_blocks(pool.get_new_blocks(1))
    assert pool.get_new_blocks(5) == [3, 4, 5, b, a]


def test_order_of_vllm_0_32() -> None:
    # Of 11 blocks 1 and 2 are hashed, 3 and 4 are not, 5 to 11 were never used; a
    # request frees its blocks from its tail to its head.
    pool = BlockPool(12)
    blocks = pool.get_new_blocks(4)
    pool.insert(blocks[:2], keys("ab"))
    pool.free_blocks(reversed(blocks))
    assert pool.get_new_blocks(11) == [4, 3, *range(5, 12), 2, 1]


def test_blocks_without_key_freed_last_go_first() -> None:
    pool = BlockPool(4)
    pool.get_new_blocks(3)
    pool.free_blocks([2])
    pool.free_blocks([3, 1])
    assert pool.get_new_blocks(3) == [3, 1, 2]


def test_partial_block_goes_before_cached_ones() -> None:
    # Of a request of 20 tokens, at 16 a block, the second block is never hashed.
    pool = BlockPool(8)
    cached(pool, "cdefg")
    full, partial = pool.get_new_blocks(2)
    pool.insert([full], [key("a")])
    pool.free_blocks([partial, full])
    assert pool.get_new_blocks(1) == [partial]
    assert pool.get(key("a")) == full


# -- keys --------------------------------------------------------------------------


def test_info_says_where_a_block_stands() -> None:
    pool = BlockPool(4, lineage=True)
    first, second = pool.get_new_blocks(2)
    chain = [key("a", 7), key("b", 7)]
    pool.insert([first, second], chain, parent=key("z", 7), depth=3)
    assert pool.info(first) == (chain[0], key("z", 7), 7, 3)
    assert pool.info(second) == (chain[1], chain[0], 7, 4)


def test_first_block_has_no_parent() -> None:
    pool = BlockPool(2, lineage=True)
    pool.insert(pool.get_new_blocks(1), [key("a")])
    assert pool.info(1).parent_key is None


@pytest.mark.parametrize(
    ("ids", "names"),
    [
        pytest.param([1, NULL_BLOCK], "xy", id="null block"),
        pytest.param([1, 4], "xy", id="free block"),
        pytest.param([1, 3], "xy", id="free block with a key"),
        pytest.param([1, 2], "xy", id="block in use with a key"),
        pytest.param([1, 1], "xy", id="block twice"),
        pytest.param([1], "xy", id="a block too few"),
        pytest.param([1, 4], "x", id="a key too few"),
    ],
)
def test_refused_keys_change_nothing(ids: list[int], names: str) -> None:
    pool = BlockPool(5, enable_events=True)
    pool.get_new_blocks(3)
    pool.insert([2, 3], keys("ab"))
    pool.free_blocks([3])
    pool.take_events()
    before = visible(pool)
    with pytest.raises(IntegrityError, match="cannot be given"):
        pool.insert(ids, keys(names))
    assert visible(pool) == before
    pool.check()


def test_no_keys_are_no_news() -> None:
    policy = Recorder()
    pool = BlockPool(2, policy=policy, enable_events=True)
    pool.insert([], [])
    assert pool.take_events() == policy.calls == []


def test_of_blocks_under_one_key_the_oldest_is_hit() -> None:
    pool = BlockPool(5)
    blocks = pool.get_new_blocks(3)
    for block in blocks:
        pool.insert([block], [key("a")])
    for block in blocks:
        assert pool.get(key("a")) == block
        pool.evict_blocks([block])
    assert pool.get(key("a")) is None


def test_same_tokens_in_another_group_are_another_key() -> None:
    pool = BlockPool(3)
    pool.insert(pool.get_new_blocks(1), [key("a", 0)])
    assert pool.get(key("a", 1)) is None


# -- references --------------------------------------------------------------------


def test_cached_block_in_use_is_never_a_victim() -> None:
    pool = BlockPool(3)
    a, b = cached(pool, "ab")
    pool.touch([b])
    assert pool.get_new_blocks(1) == [a]
    assert pool.get(key("b")) == b
    assert pool.get_num_free_blocks() == 0


def test_block_is_free_when_all_have_freed_it() -> None:
    pool = BlockPool(2)
    (block,) = cached(pool, "a")
    pool.touch([block, block])
    pool.adopt([block])
    pool.free_blocks([block, block])
    assert pool.num_used_blocks == 1
    pool.free_blocks([block])
    assert pool.num_used_blocks == 0


def test_touching_a_free_block_without_key_is_refused_and_nothing_touched() -> None:
    pool = BlockPool(4)
    (a,) = cached(pool, "a")
    before = visible(pool)
    with pytest.raises(IntegrityError, match="block 3 is free and has no key"):
        pool.touch([NULL_BLOCK, a, 3])
    assert visible(pool) == before
    pool.check()


@pytest.mark.parametrize(
    "ids", [[1, 3, 4], [1, 3, 1, 3, 1], [3, NULL_BLOCK, 1, 2, 2]], ids=str
)
def test_freeing_once_too_often_is_refused_and_nothing_freed(ids: list[int]) -> None:
    pool = BlockPool(5)
    pool.get_new_blocks(3)
    pool.insert([1], [key("a")])
    pool.touch([1])
    before = visible(pool)
    with pytest.raises(IntegrityError, match="freed once too often"):
        pool.free_blocks(ids)
    assert visible(pool) == before
    pool.check()


def test_tail_listed_first_leaves_before_the_head() -> None:
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(3)
    pool.insert(blocks, keys("abc"))
    pool.free_blocks(reversed(blocks))
    for name in "cba":
        assert pool.get(key(name)) is not None
        pool.get_new_blocks(1)
        assert pool.get(key(name)) is None


def test_null_block_takes_part_in_nothing() -> None:
    policy = Recorder()
    pool = BlockPool(3, policy=policy, enable_events=True)
    pool.touch([NULL_BLOCK])
    pool.adopt([NULL_BLOCK])
    pool.free_blocks([NULL_BLOCK, NULL_BLOCK, NULL_BLOCK])
    pool.evict_blocks([NULL_BLOCK])
    assert pool.take_events() == policy.calls == []
    assert pool.usage == 0
    assert pool.get_new_blocks(2) == [1, 2]
    pool.check()


# -- losing keys -------------------------------------------------------------------


def test_evicted_block_in_use_stays_with_its_user() -> None:
    pool = BlockPool(3)
    blocks = pool.get_new_blocks(1)
    pool.insert(blocks, [key("a")])
    pool.evict_blocks(blocks)
    assert pool.get(key("a")) is None
    assert pool.ref_count(1) == 1
    pool.insert(blocks, [key("b")])
    assert pool.get(key("b")) == 1


def test_evicted_free_block_is_used_next() -> None:
    pool = BlockPool(3)
    a, b = cached(pool, "ab")
    pool.evict_blocks([a, a])
    assert pool.get_new_blocks(2) == [a, b]


def test_evicting_a_block_without_key_is_harmless() -> None:
    pool = BlockPool(4, enable_events=True)
    pool.get_new_blocks(1)
    before = visible(pool)
    pool.evict_blocks(range(4))
    assert visible(pool) == before


@pytest.mark.parametrize("block", [-1, 3])
def test_evicting_outside_the_pool_is_refused_and_nothing_evicted(block: int) -> None:
    pool = BlockPool(3)
    (a,) = cached(pool, "a")
    with pytest.raises(IntegrityError, match=f"block {block} is outside the pool of 3"):
        pool.evict_blocks([a, block])
    assert pool.get(key("a")) == a


def test_prefix_cache_is_not_reset_while_a_block_is_in_use() -> None:
    pool = BlockPool(3, enable_events=True)
    blocks = cached(pool, "ab")
    pool.touch(blocks[:1])
    pool.take_events()
    before = visible(pool)
    assert pool.reset_prefix_cache() is False
    assert visible(pool) == before
    pool.free_blocks(blocks[:1])
    assert pool.reset_prefix_cache() is True
    assert pool.num_keyed_blocks == 0
    assert pool.take_events() == [AllBlocksCleared()]


def test_dropping_all_keys_leaves_users_their_blocks() -> None:
    pool = BlockPool(4)
    a, _ = cached(pool, "ab")
    pool.touch([a])
    pool.drop_all_keys()
    assert pool.get(key("a")) is pool.get(key("b")) is None
    assert pool.num_used_blocks == 1
    pool.insert([a], [key("c")])
    assert pool.get(key("c")) == a
    pool.check()


# -- usage -------------------------------------------------------------------------


def test_usage_is_the_share_of_blocks_in_use() -> None:
    pool = BlockPool(5)
    assert pool.usage == 0
    cached(pool, "ab")
    assert pool.usage == 0
    pool.get_new_blocks(1)
    assert pool.usage == 0.25
    pool.get_new_blocks(3)
    assert pool.usage == 1


def test_usage_stays_a_share_through_a_thousand_requests() -> None:
    # A count of its own drifts where blocks are cached and freed in another order
    # than it expects: here some are cached in time, some never and some too late.
    random = Random(49)
    pool = BlockPool(64)
    running: list[tuple[list[int], list[bytes], int]] = []

    def finish() -> None:
        blocks, chain, num_hits = running.pop(random.randrange(len(running)))
        caching = random.choice(["in time", "never", "too late"])
        if caching == "in time":
            pool.insert(blocks[num_hits:], chain[num_hits:])
        pool.free_blocks(reversed(blocks))
        if caching == "too late" and blocks[num_hits:]:
            with pytest.raises(IntegrityError):
                pool.insert(blocks[num_hits:], chain[num_hits:])

    for _ in range(1000):
        prefix, length = random.randrange(10), random.randint(1, 12)
        chain = [key(f"{prefix}/{i}") for i in range(length)]
        while pool.get_num_free_blocks() < length:
            finish()
        hits = [block for block in takewhile(bool, map(pool.get, chain)) if block]
        pool.adopt(hits)
        new = pool.get_new_blocks(length - len(hits))
        running.append(([*hits, *new], chain, len(hits)))
        assert 0 <= pool.usage <= 1
    while running:
        finish()
    assert pool.usage == 0
    pool.check()
