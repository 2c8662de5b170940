"""What a policy may ask about the keyed blocks of a vLLM pool."""

from collections.abc import Sequence
from typing import Any

from kvplugin.errors import IntegrityError
from kvplugin.hashing import split_key
from kvplugin.policies.eviction import BlockInfo


class KeyNotes:
    """Key, parent and depth of each block, as they were when its key was reported.

    vLLM's blocks know their keys, but lose them before everybody has heard of it.

    Args:
        blocks: all blocks of the pool by id; only `_block_hash` is read.
    """

    def __init__(self, blocks: Sequence[Any]) -> None:
        self._blocks = blocks
        self._keys: list[bytes | None] = [None] * len(blocks)
        self._parents: list[bytes | None] = [None] * len(blocks)
        self._depths = [0] * len(blocks)

    def place(
        self, ids: Sequence[int], parents: Sequence[bytes | None], depth: int
    ) -> None:
        """Where consecutive blocks of a request stand; some may be null.

        Args:
            ids: the blocks.
            parents: hash of the block before each of them, without group.
            depth: index of `ids[0]` in the request.
        """
        known, depths = self._parents, self._depths
        places = range(depth, depth + len(ids))
        for block, parent, i in zip(ids, parents, places, strict=True):
            known[block] = parent
            depths[block] = i

    def copy_place(self, source: int, target: int) -> None:
        """`target` stands where `source` stood."""
        self.place([target], [self._parents[source]], self._depths[source])

    def displace(self, ids: Sequence[int]) -> None:
        """Nobody knows where these blocks stand."""
        for block in ids:
            self._parents[block] = None
            self._depths[block] = 0

    def take_keys(self, ids: Sequence[int]) -> None:
        """The keys that these blocks have now are reported."""
        keys, blocks = self._keys, self._blocks
        for block in ids:
            keys[block] = blocks[block]._block_hash

    def changed(self, ids: Sequence[int]) -> list[int]:
        """Those of these blocks that have another key than was reported."""
        return [b for b in ids if self._keys[b] != self._blocks[b]._block_hash]

    def info(self, block: int) -> BlockInfo:
        """Key and place of a block whose key was reported.

        Raises:
            IntegrityError: it was not.
        """
        key = self._keys[block]
        if key is None:
            raise IntegrityError(f"no key of block {block} was reported")
        block_hash, group = split_key(key)
        parent = self._parents[block]
        if parent is not None:
            parent += key[len(block_hash) :]
        return BlockInfo(key, parent, group, self._depths[block])
