"""A content model that sees what its pool does."""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from kvplugin.block_pool import BlockPool
from kvplugin.spec import KVCacheConfig
from kvplugin.testing.content import ContentModel
from kvplugin.testing.rules import group_models


def watch_pool(pool: BlockPool, memory: ContentModel) -> None:
    """Poison blocks of `memory` when `pool` hands them out or can no longer find them.

    A free block with a key keeps its bytes: they can be hit. Without one, freed or
    evicted, nobody may read it. Sets `memory.in_use` too. To be called once, before the
    pool is used; replaces methods of this one pool.
    """

    def lost(blocks: Iterable[int]) -> None:
        memory.poison(
            block
            for block in dict.fromkeys(blocks)
            if block and not pool.ref_count(block) and pool.key_of(block) is None
        )

    take = pool.get_new_blocks

    @wraps(take)
    def get_new_blocks(n: int) -> list[int]:
        blocks = take(n)
        memory.handed_out(blocks)
        return blocks

    def then_poison(method: Callable[[Iterable[int]], None]) -> Any:
        @wraps(method)
        def call(ids: Iterable[int]) -> None:
            ids = list(ids)
            method(ids)
            lost(ids)

        return call

    forget = pool.drop_all_keys

    @wraps(forget)
    def drop_all_keys() -> None:
        forget()
        lost(range(1, pool.num_blocks))

    for method in (
        get_new_blocks,
        then_poison(pool.free_blocks),
        then_poison(pool.evict_blocks),
        drop_all_keys,
    ):
        setattr(pool, method.__name__, method)
    memory.in_use = lambda block: pool.ref_count(block) > 0


def watched_content(
    config: KVCacheConfig, pool: BlockPool, *, strict: bool = True
) -> ContentModel:
    """The content model of a pool that was not used yet, watching it."""
    memory = ContentModel(group_models(config), pool.num_blocks, strict=strict)
    watch_pool(pool, memory)
    return memory
