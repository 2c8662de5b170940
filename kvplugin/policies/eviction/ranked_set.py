"""Blocks by a rank that may change at any time."""

import heapq
from collections.abc import Iterator
from typing import Final

from kvplugin.errors import IntegrityError

_SLACK: Final = 1024
"""Stale entries that are never worth a clean-up."""

Rank = tuple[float, ...]
"""Compared from the left; all ranks of a set are of one length."""


class RankedSet:
    """A set of blocks that gives away the one of least rank. O(log n) a change.

    A heap whose entries are not searched for: an entry that is no longer true is
    skipped when it comes up.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Rank, int]] = {}
        self._heap: list[tuple[Rank, int]] = []

    def put(self, block: int, rank: Rank) -> None:
        """Add the block, or change its rank."""
        entry = self._entries[block] = (rank, block)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + _SLACK:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def discard(self, block: int) -> Rank | None:
        """Take the block out.

        Returns:
            Its rank, None if it was not there.
        """
        entry = self._entries.pop(block, None)
        return entry and entry[0]

    def pop(self) -> tuple[Rank, int]:
        """Take out the block of least rank.

        Raises:
            IndexError: the set is empty.
        """
        entry = self.first()
        heapq.heappop(self._heap)
        del self._entries[entry[1]]
        return entry

    def first(self) -> tuple[Rank, int]:
        """The block of least rank, which stays.

        Raises:
            IndexError: the set is empty.
        """
        while not self._is_true(entry := self._heap[0]):
            heapq.heappop(self._heap)
        return entry

    def rank_of(self, block: int) -> Rank:
        """Rank of the block.

        Raises:
            KeyError: it is not there.
        """
        return self._entries[block][0]

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    def __iter__(self) -> Iterator[int]:
        """Blocks, least rank first."""
        return (block for _, block in sorted(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)

    def check(self) -> None:
        """Raise `IntegrityError` if the heap lacks a block."""
        waiting = {entry for entry in self._heap if self._is_true(entry)}
        if waiting != set(self._entries.values()):
            raise IntegrityError("a heap of blocks differs from its set")

    def _is_true(self, entry: tuple[Rank, int]) -> bool:
        return self._entries.get(entry[1]) is entry
