"""Which block holds the bytes of a hash, group by group."""

from collections.abc import Mapping, Sequence

from kvplugin.errors import IntegrityError


class HashIndex:
    """block hash -> block, one dict a group.

    The dict of a group names the first block inserted under a hash; the rare further
    ones (*twins*: the same content computed by two requests side by side, and block
    tables are append-only) are kept beside it, oldest first, the first included.
    """

    def __init__(self) -> None:
        self.first: list[dict[bytes, int]] = [{}]
        """One dict a group; without twins, deleting from it is `remove`."""
        self._twins: dict[tuple[int, bytes], list[int]] = {}

    def __len__(self) -> int:
        """Blocks in the index."""
        further = sum(len(blocks) - 1 for blocks in self._twins.values())
        return sum(map(len, self.first)) + further

    @property
    def has_twins(self) -> bool:
        """Whether some hash has several blocks."""
        return bool(self._twins)

    def of_group(self, group: int) -> dict[bytes, int]:
        """First block under each hash of one group; the same dict at every call."""
        while group >= len(self.first):
            self.first.append({})
        return self.first[group]

    def add(self, group: int, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Put blocks in, each under its hash."""
        first = self.of_group(group)
        count = len(first) + len(blocks)
        if first.keys().isdisjoint(hashes):
            first.update(zip(hashes, blocks, strict=True))
        if len(first) == count:
            return
        for block_hash, block in zip(hashes, blocks, strict=True):
            head = first.setdefault(block_hash, block)
            if head != block:
                self._twins.setdefault((group, block_hash), [head]).append(block)

    def remove(self, group: int, block_hash: bytes, block: int) -> bool:
        """Take one block out.

        Returns:
            Whether the hash has no block any more.
        """
        if self._twins and (group, block_hash) in self._twins:
            self._remove_twin(group, block_hash, block)
            return False
        del self.first[group][block_hash]
        return True

    def _remove_twin(self, group: int, block_hash: bytes, block: int) -> None:
        twins = self._twins[group, block_hash]
        twins.remove(block)
        self.first[group][block_hash] = twins[0]
        if len(twins) == 1:
            del self._twins[group, block_hash]

    def clear(self) -> None:
        """Forget everything. The dicts of the groups stay the same objects."""
        for first in self.first:
            first.clear()
        self._twins.clear()

    def check(self, keyed: Mapping[int, tuple[int, bytes]]) -> None:
        """Verify that the index holds exactly these blocks.

        Args:
            keyed: block -> (group, hash).

        Raises:
            IntegrityError: it does not.
        """
        indexed = {
            block: (group, block_hash)
            for group, first in enumerate(self.first)
            for block_hash, head in first.items()
            for block in self._twins.get((group, block_hash), [head])
        }
        if indexed != keyed or len(self) != len(keyed):
            raise IntegrityError("the index differs from the blocks' keys")
        for (group, block_hash), twins in self._twins.items():
            if self.first[group].get(block_hash) != twins[0] or len(twins) < 2:
                raise IntegrityError("the index's twins are out of order")
