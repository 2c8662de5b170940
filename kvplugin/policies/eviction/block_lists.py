"""Doubly linked lists over block ids, in two flat lists of ints.

A block is in at most one list. A list is named by its *end*: a node behind its last
block and before its first one, whose number lies above the blocks'. So the next of the
last block is the end, and the next of the end is the first block, or the end itself if
there is none. All of it is O(1) a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from kvplugin.errors import IntegrityError

UNLINKED: Final = -1


class BlockLists:
    """Args: num_blocks: blocks are 0..num_blocks-1, in no list at first."""

    def __init__(self, num_blocks: int) -> None:
        self.next = [UNLINKED] * num_blocks
        """Node after each node; `UNLINKED` of a block in no list. Read only."""
        self.prev = [UNLINKED] * num_blocks
        """Node before each node; `UNLINKED` of a block in no list. Read only."""
        self._num_blocks = num_blocks
        self._dropped: list[int] = []

    def make(self) -> int:
        """The end of a new, empty list."""
        if self._dropped:
            return self._dropped.pop()
        end = len(self.next)
        self.next.append(end)
        self.prev.append(end)
        return end

    def drop(self, end: int) -> None:
        """Give up an empty list; its end may come back as that of a new one."""
        self._dropped.append(end)

    def insert(self, ids: Iterable[int], before: int) -> None:
        """Link blocks of no list, in their order, before a node: an end appends.

        Args:
            ids: the blocks.
            before: a linked block or an end.
        """
        after, ahead = self.next, self.prev
        last = ahead[before]
        for block in ids:
            after[last] = block
            ahead[block] = last
            last = block
        after[last] = before
        ahead[before] = last

    def unlink(self, ids: Iterable[int]) -> None:
        """Take linked blocks out of their lists."""
        for block in ids:
            self.unlink_one(block)

    def unlink_one(self, block: int) -> None:
        """`unlink` of one block."""
        after, ahead = self.next, self.prev
        before, behind = ahead[block], after[block]
        after[before] = behind
        ahead[behind] = before
        after[block] = ahead[block] = UNLINKED

    def first(self, end: int, n: int) -> list[int]:
        """The first `n` blocks of a list, or all if it has fewer."""
        after = self.next
        blocks: list[int] = []
        block = after[end]
        while block != end and len(blocks) < n:
            blocks.append(block)
            block = after[block]
        return blocks

    def blocks(self, end: int) -> Iterator[int]:
        """Blocks of a list from the first to the last."""
        block = self.next[end]
        while block != end:
            yield block
            block = self.next[block]

    def copy(self) -> BlockLists:
        """Lists of their own with the same blocks, in O(num_blocks)."""
        copy = BlockLists(0)
        copy.next, copy.prev = self.next.copy(), self.prev.copy()
        copy._num_blocks, copy._dropped = self._num_blocks, self._dropped.copy()
        return copy

    def check(self) -> None:
        """Verify that every linked block is reached from one end, both ways.

        Raises:
            IntegrityError: it is not.
        """
        reached = [
            block
            for end in range(self._num_blocks, len(self.next))
            for block in self.blocks(end)
        ]
        nodes = [*range(self._num_blocks)]
        if sorted(reached) != [b for b in nodes if self.next[b] != UNLINKED]:
            raise IntegrityError("a linked block is in no list, or in two")
        linked = [*reached, *range(self._num_blocks, len(self.next))]
        if any(self.prev[self.next[node]] != node for node in linked):
            raise IntegrityError("a list reads otherwise backwards than forwards")
