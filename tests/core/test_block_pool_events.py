"""What a pool tells the outside: its keys, no more and no less."""

from collections.abc import Callable

import pytest

from kvplugin.block_pool import BlockPool
from kvplugin.events import (
    MEDIUM_CPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    external_hash,
)
from kvplugin.hashing import split_key
from tests.core.pool_helpers import cached, key, keys


def outside(name: str) -> int:
    return external_hash(split_key(key(name))[0])


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(4, block_size=2, enable_events=True, medium=MEDIUM_CPU)


def test_run_of_blocks_is_one_event(pool: BlockPool) -> None:
    chain = [key("a", 5), key("b", 5)]
    pool.insert(
        pool.get_new_blocks(2),
        chain,
        parent=key("z", 5),
        depth=1,
        token_ids=[10, 11, 12, 13],
    )
    assert pool.take_events() == [
        BlockStored(
            block_hashes=[outside("a"), outside("b")],
            parent_block_hash=outside("z"),
            token_ids=[10, 11, 12, 13],
            block_size=2,
            lora_id=None,
            medium="CPU",
            lora_name=None,
            group_idx=5,
        )
    ]


def test_first_run_has_no_parent(pool: BlockPool) -> None:
    pool.insert(pool.get_new_blocks(1), [key("a")])
    (event,) = pool.take_events()
    assert isinstance(event, BlockStored)
    assert event.parent_block_hash is None
    assert event.group_idx == 0


def test_each_victim_is_removed_before_what_replaces_it_is_stored(
    pool: BlockPool,
) -> None:
    cached(pool, "abc")
    pool.take_events()
    pool.insert(pool.get_new_blocks(2), keys("de"))
    removed, also_removed, stored = pool.take_events()
    assert removed == BlockRemoved([outside("c")], "CPU", 0)
    assert also_removed == BlockRemoved([outside("b")], "CPU", 0)
    assert isinstance(stored, BlockStored)


def test_key_is_removed_with_its_last_block(pool: BlockPool) -> None:
    first, second = pool.get_new_blocks(2)
    pool.insert([first], [key("a")])
    pool.insert([second], [key("a")])
    pool.take_events()
    pool.evict_blocks([first])
    assert pool.take_events() == []
    pool.evict_blocks([second])
    assert pool.take_events() == [BlockRemoved([outside("a")], "CPU", 0)]


@pytest.mark.parametrize(
    "forget", [BlockPool.drop_all_keys, BlockPool.reset_prefix_cache]
)
def test_all_keys_are_cleared_in_one_event(
    pool: BlockPool, forget: Callable[[BlockPool], object]
) -> None:
    cached(pool, "abc")
    pool.take_events()
    forget(pool)
    assert pool.take_events() == [AllBlocksCleared()]


def test_events_are_taken_once(pool: BlockPool) -> None:
    cached(pool, "a")
    assert len(pool.take_events()) == 1
    assert pool.take_events() == []


def test_events_are_collected_only_on_demand() -> None:
    pool = BlockPool(4)
    cached(pool, "abc")
    pool.get_new_blocks(1)
    pool.evict_blocks(range(4))
    pool.drop_all_keys()
    assert pool.take_events() == []
