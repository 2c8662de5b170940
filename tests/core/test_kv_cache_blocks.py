"""KVCacheBlocks: ids inside, objects for those who ask."""

import pytest

from kvplugin.block_pool import BlockPool
from kvplugin.errors import IntegrityError
from kvplugin.kv_cache_blocks import KVCacheBlocks
from tests.core.manager_setups import Setup, full, window
from tests.core.pool_helpers import cached, keys


def test_empty_ones_are_one_instance() -> None:
    setup = Setup((full(), window(6)))
    kv = setup.manager()
    empty = kv.empty_kv_cache_blocks
    request = setup.request("a", range(6))
    assert kv.get_computed_blocks(request)[0] is empty
    assert kv.get_blocks("a") is empty
    assert kv.allocate_slots(request, 6) is not empty
    request.num_computed_tokens = 6
    assert kv.allocate_slots(request, 1) is empty
    assert empty.blocks == ([], [])
    assert empty.get_block_ids() == ([], [])
    assert empty.get_block_ids(allow_none=True) is None


def test_objects_are_one_an_id_and_read_the_pool() -> None:
    pool = BlockPool(9)
    (block,) = cached(pool, "a")
    (used,) = pool.get_new_blocks(1)
    blocks = KVCacheBlocks(pool, ([0, block], [used]))
    (null, keyed), (other,) = blocks.blocks
    assert blocks.blocks[0][1] is keyed is pool.block(block)
    assert [view.block_id for view in (null, keyed, other)] == [0, block, used]
    assert [view.is_null for view in (null, keyed, other)] == [True, False, False]
    assert [view.ref_cnt for view in (keyed, other)] == [0, 1]
    assert (keyed.block_hash, other.block_hash) == (*keys("a"), None)
    pool.touch([block])
    pool.evict_blocks([block])
    assert (keyed.ref_cnt, keyed.block_hash) == (1, None)


def test_sum_goes_group_by_group() -> None:
    pool = BlockPool(9)
    one, other = KVCacheBlocks(pool, ([1], [])), KVCacheBlocks(pool, ([2, 3], [4]))
    both = one + other
    assert both.get_block_ids() == ([1, 2, 3], [4])
    assert one.get_block_ids() == ([1], [])
    assert both == KVCacheBlocks(pool, ((1, 2, 3), (4,)))
    assert both != one
    assert both != KVCacheBlocks(BlockPool(9), ([1, 2, 3], [4]))
    assert both.new_empty().get_block_ids() == ([], [])
    with pytest.raises(ValueError, match="shorter"):
        one + KVCacheBlocks(pool, ([1],))


def test_ids_are_a_copy() -> None:
    setup = Setup((full(),))
    kv = setup.manager()
    assert kv.allocate_slots(setup.request("a", range(6)), 6) is not None
    for ids in (kv.get_block_ids("a"), kv.get_blocks("a").get_block_ids()):
        ids[0].clear()
    assert len(kv.get_block_ids("a")[0]) == 2
    assert kv.get_blocks("a").get_block_ids(allow_none=True) == kv.get_block_ids("a")


def test_unhashed_ids() -> None:
    pool = BlockPool(9)
    (block,) = cached(pool, "a")
    used = pool.get_new_blocks(2)
    one = KVCacheBlocks(pool, ([block, *used],))
    assert one.get_unhashed_block_ids() == used
    two = KVCacheBlocks(pool, ([0, block, used[0]], [0, used[1]]))
    assert two.get_unhashed_block_ids_all_groups() == [[used[0]], [used[1]]]
    with pytest.raises(IntegrityError, match="all_groups"):
        two.get_unhashed_block_ids()
