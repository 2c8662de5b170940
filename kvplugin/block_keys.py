"""BlockKeys: which block of a pool carries which key.

A key is a block hash and the number of the group whose block it names. The two are
held apart, and each group has an index of its own, so that neither a lookup nor an
insertion has to build a key.
"""

from collections.abc import Iterable, Sequence

from kvplugin.errors import IntegrityError
from kvplugin.hash_index import HashIndex
from kvplugin.hashing import make_key
from kvplugin.lineage import Lineage
from kvplugin.policies.eviction import BlockInfo


class BlockKeys:
    """The keys of blocks 0..num_blocks-1, in flat lists and an index.

    Args:
        num_blocks: ids of the pool.
        lineage: keep what `info` tells besides the key.
    """

    def __init__(self, num_blocks: int, lineage: bool) -> None:
        self.hashes: list[bytes | None] = [None] * num_blocks
        """Hash of each block, None while it has no key. Read only for others."""
        # Of keyed blocks; 0 for all others.
        self._groups = [0] * num_blocks
        self._lineage = Lineage(num_blocks) if lineage else None
        self.index = HashIndex()

    def __len__(self) -> int:
        """Blocks with a key."""
        return len(self.index)

    def key_of(self, block: int) -> bytes | None:
        """Key of the block, None while it has none."""
        block_hash = self.hashes[block]
        if block_hash is None:
            return None
        return make_key(block_hash, self._groups[block])

    def info(self, block: int) -> BlockInfo:
        """Key and place of a keyed block.

        Raises:
            IntegrityError: the block carries no key, or no lineage is kept.
        """
        block_hash = self.hashes[block]
        if block_hash is None:
            raise IntegrityError(f"block {block} carries no key")
        if self._lineage is None:
            raise IntegrityError("this pool was built with lineage=False")
        return self._lineage.info(block, block_hash, self._groups[block])

    def give(
        self,
        ids: Sequence[int],
        hashes: Sequence[bytes],
        parent: bytes | None,
        depth: int,
        group: int,
    ) -> None:
        """Give consecutive blocks of one request, none of them keyed, their keys."""
        if len(ids) != len(hashes):
            raise IntegrityError(f"{len(ids)} blocks cannot have {len(hashes)} hashes")
        self.index.add(group, hashes, ids)
        own = self.hashes
        for block, block_hash in zip(ids, hashes, strict=True):
            own[block] = block_hash
        if group:
            groups = self._groups
            for block in ids:
                groups[block] = group
        if self._lineage is not None:
            self._lineage.note(ids, hashes, parent, depth)

    def take(self, ids: Sequence[int]) -> None:
        """Take the keys of these blocks, all of them keyed, away."""
        if self.index.has_twins:
            self.take_each(ids)
            return
        if len(self.index.first) == 1:
            self._take_of_group_0(ids)
            return
        hashes, groups, first = self.hashes, self._groups, self.index.first
        for block in ids:
            group = groups[block]
            del first[group][hashes[block]]  # type: ignore[arg-type]  # keyed
            hashes[block] = None
            groups[block] = 0

    def _take_of_group_0(self, ids: Sequence[int]) -> None:
        hashes, first = self.hashes, self.index.first[0]
        for block in ids:
            del first[hashes[block]]  # type: ignore[arg-type]  # keyed
            hashes[block] = None

    def take_each(self, ids: Iterable[int]) -> list[tuple[int, bytes]]:
        """`take` that tells: (group, hash) of each key that no block has any more."""
        lost = []
        for block in ids:
            block_hash, group = self.hashes[block], self._groups[block]
            self.hashes[block], self._groups[block] = None, 0
            if block_hash is not None and self.index.remove(group, block_hash, block):
                lost.append((group, block_hash))
        return lost

    def clear(self) -> None:
        """Take every key away."""
        for block in self.keyed():
            self.hashes[block], self._groups[block] = None, 0
        self.index.clear()

    def keyed(self) -> list[int]:
        """Blocks with a key, in O(num_blocks)."""
        return [b for b, block_hash in enumerate(self.hashes) if block_hash is not None]

    def check(self) -> None:
        """Verify that lists and index agree, in O(num_blocks).

        Raises:
            IntegrityError: they do not.
        """
        keyed: dict[int, tuple[int, bytes]] = {}
        for block, block_hash in enumerate(self.hashes):
            if block_hash is not None:
                keyed[block] = self._groups[block], block_hash
            elif self._groups[block]:
                raise IntegrityError(f"block {block} has no key and belongs to a group")
        self.index.check(keyed)
