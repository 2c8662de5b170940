"""Where the keyed blocks of a pool stand in their prefixes."""

from collections.abc import Sequence

from kvplugin.hashing import make_key
from kvplugin.policies.eviction import BlockInfo


class Lineage:
    """Parent and depth of each keyed block, for policies that rank by them.

    Args:
        num_blocks: ids of the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self._parents: list[bytes | None] = [None] * num_blocks
        self._depths = [0] * num_blocks

    def note(
        self,
        ids: Sequence[int],
        hashes: Sequence[bytes],
        parent: bytes | None,
        depth: int,
    ) -> None:
        """Consecutive blocks of one request were given their hashes."""
        for i, (block, block_hash) in enumerate(zip(ids, hashes, strict=True)):
            self._parents[block] = parent
            self._depths[block] = depth + i
            parent = block_hash

    def info(self, block: int, block_hash: bytes, group: int) -> BlockInfo:
        """All that is known of a keyed block."""
        parent = self._parents[block]
        return BlockInfo(
            make_key(block_hash, group),
            None if parent is None else make_key(parent, group),
            group,
            self._depths[block],
        )
