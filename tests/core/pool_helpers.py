"""What tests of the pool say often."""

from collections.abc import Iterable
from hashlib import sha256

from kvplugin.block_pool import BlockPool
from kvplugin.hashing import make_key


def key(name: str, group: int = 0) -> bytes:
    return make_key(sha256(name.encode()).digest(), group)


def keys(names: Iterable[str]) -> list[bytes]:
    return [key(name) for name in names]


def cached(pool: BlockPool, names: str) -> list[int]:
    """Blocks under these keys that nobody uses; the last one is the first to go."""
    blocks = pool.get_new_blocks(len(names))
    pool.insert(blocks, keys(names))
    pool.free_blocks(reversed(blocks))
    return blocks


def visible(pool: BlockPool) -> object:
    """What callers see of a pool, with the events since they last looked."""
    return (
        [pool.ref_count(block) for block in range(1, pool.num_blocks)],
        [pool.get(key(name)) for name in "abcdefgh"],
        pool.get_num_free_blocks(),
        pool.num_keyed_blocks,
        pool.take_events(),
    )
