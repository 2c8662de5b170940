"""Least frequently used, with dynamic aging."""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final

import msgspec

from kvplugin.errors import IntegrityError, check_ranges
from kvplugin.policies.eviction.base import BlockContext, BlockInfo
from kvplugin.policies.eviction.block_lists import UNLINKED, BlockLists

_SLACK: Final = 64
"""Empty lists that are never worth a clean-up."""


class LFUOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `lfu`."""

    aging: bool = True
    """Let favourites of the past go in time. Without it counts never lose weight."""

    def __post_init__(self) -> None:
        check_ranges(self, {})


_DEFAULTS: Final = LFUOptions()


class LFU:
    """The victim is the block with the lowest rank, the least recently released of
    several.

    A block's rank is its count, which is 1 when it is inserted and grows by 1 with each
    hit, plus the cache's age at that time. With aging (LFU-DA: Arlitt et al.,
    Evaluating Content Management Techniques for Web Proxy Caches, Performance
    Evaluation Review 27(4), 2000) the age is the rank of the last victim, otherwise 0.
    Counts end with the key.

    A block in use keeps its rank and is in no list; it comes back at the end of the
    list of its rank. O(1) a block, and O(log ranks) for each new rank.
    """

    needs_info = False
    needs_steps = False

    def __init__(self, options: LFUOptions = _DEFAULTS) -> None:
        self._ages = options.aging
        self._age = 0
        self._counts: list[int] = []
        """Of keyed blocks."""
        self._ranks: list[int] = []
        """Of keyed blocks."""
        self._lists = BlockLists(0)
        self._ends: dict[int, int] = {}
        """Rank -> list of its evictable blocks; perhaps an empty one."""
        self._open: list[int] = []
        """A heap of the ranks that have a list."""
        self._length = 0

    def bind(self, num_blocks: int, info: Callable[[int], BlockInfo]) -> None:
        del info
        self._counts = [0] * num_blocks
        self._ranks = [0] * num_blocks
        self._lists = BlockLists(num_blocks)

    def insert(self, ids: Sequence[int], ctx: BlockContext) -> None:
        del ctx
        rank = self._age + 1
        for block in ids:
            self._counts[block] = 1
            self._ranks[block] = rank

    def hit(self, ids: Sequence[int], ctx: BlockContext) -> None:
        del ctx
        counts, ranks, age = self._counts, self._ranks, self._age
        for block in ids:
            counts[block] = count = counts[block] + 1
            ranks[block] = age + count

    def pin(self, ids: Sequence[int]) -> None:
        self._lists.unlink(ids)
        self._length -= len(ids)

    def release(self, ids: Sequence[int]) -> None:
        for rank, blocks in groupby(ids, self._ranks.__getitem__):
            end = self._ends.get(rank)
            self._lists.insert(blocks, self._add_list(rank) if end is None else end)
        self._length += len(ids)
        if len(self._ends) > 2 * self._length + _SLACK:
            self._drop_empty_lists()

    def forget(self, ids: Sequence[int]) -> None:
        after = self._lists.next
        self.pin([block for block in ids if after[block] != UNLINKED])

    def victims(self, n: int) -> list[int]:
        if n > self._length:
            raise ValueError(f"{n} victims wanted, {self._length} evictable")
        victims: list[int] = []
        while len(victims) < n:
            rank = self._open[0]
            first = self._lists.first(self._ends[rank], n - len(victims))
            if first:
                self.pin(first)
                victims += first
                self._age = rank if self._ages else 0
            else:
                heapq.heappop(self._open)
                self._lists.drop(self._ends.pop(rank))
        return victims

    def step(
        self, now: float, soon: Iterable[bytes], dropped: Mapping[bytes, int]
    ) -> None:
        del now, soon, dropped

    def order(self) -> Iterator[int]:
        for _, end in sorted(self._ends.items()):
            yield from self._lists.blocks(end)

    def __len__(self) -> int:
        return self._length

    def check(self) -> None:
        self._lists.check()
        if sorted(self._open) != sorted(self._ends):
            raise IntegrityError("LFU: heap and lists have different ranks")
        if len(list(self.order())) != self._length:
            raise IntegrityError("LFU: lists and length disagree")
        for rank, end in self._ends.items():
            if any(self._ranks[block] != rank for block in self._lists.blocks(end)):
                raise IntegrityError("LFU: a block is in the list of another rank")

    def _add_list(self, rank: int) -> int:
        end = self._ends[rank] = self._lists.make()
        heapq.heappush(self._open, rank)
        return end

    def _drop_empty_lists(self) -> None:
        """Linear in the lists, and due only after as many releases: amortised O(1)."""
        after = self._lists.next
        for rank in [rank for rank, end in self._ends.items() if after[end] == end]:
            self._lists.drop(self._ends.pop(rank))
        self._open = sorted(self._ends)
