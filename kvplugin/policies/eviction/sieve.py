"""SIEVE: one queue and a hand that passes over hits."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Final

from kvplugin.errors import IntegrityError
from kvplugin.policies.eviction.base import BlockContext, BlockInfo
from kvplugin.policies.eviction.block_lists import UNLINKED, BlockLists

_AHEAD: Final = 64
"""Blocks that `order` looks ahead."""


class Sieve:
    """Zhang et al., SIEVE is Simpler than LRU, NSDI 2024.

    Blocks stand in the order in which they were first released (the tail of a prefix
    before its head), and a hit marks them where they stand. The hand moves from the
    oldest block to the newest and begins again: it takes marks away, and a block
    without a mark is the victim.

    A block keeps its place while it is in use. If the hand comes by it leaves the
    queue, its mark untouched, and at its release it stands right behind the hand, as
    one that the hand has passed. So blocks in use cost the hand nothing. O(1) a block,
    victims amortised: where all blocks were hit, one call takes all marks away (about
    50 ms for 100,000 blocks) and the next ones take none.
    """

    needs_info = False
    needs_steps = False

    def __init__(self) -> None:
        self._marked: list[bool] = []
        self._placed: list[bool] = []
        """Of keyed blocks whether they were released before."""
        self._evictable: list[bool] = []
        self._lists = BlockLists(0)
        self._end = 0
        self._hand = 0
        """The block that the hand looks at next; the end: the oldest one."""
        self._length = 0

    def bind(self, num_blocks: int, info: Callable[[int], BlockInfo]) -> None:
        del info
        self._marked = [False] * num_blocks
        self._placed = [False] * num_blocks
        self._evictable = [False] * num_blocks
        self._lists = BlockLists(num_blocks)
        self._end = self._hand = self._lists.make()

    def insert(self, ids: Sequence[int], ctx: BlockContext) -> None:
        del ids, ctx  # places are taken at release, tail first

    def hit(self, ids: Sequence[int], ctx: BlockContext) -> None:
        del ctx
        for block in ids:
            self._marked[block] = True

    def pin(self, ids: Sequence[int]) -> None:
        for block in ids:
            self._evictable[block] = False
        self._length -= len(ids)

    def release(self, ids: Sequence[int]) -> None:
        after, placed, evictable = self._lists.next, self._placed, self._evictable
        new: list[int] = []
        passed: list[int] = []
        for block in ids:
            evictable[block] = True
            if after[block] == UNLINKED:
                (passed if placed[block] else new).append(block)
                placed[block] = True
        self._lists.insert(passed, before=self._hand)
        self._lists.insert(new, before=self._end)
        self._length += len(ids)

    def forget(self, ids: Sequence[int]) -> None:
        self.pin([block for block in ids if self._evictable[block]])
        for block in ids:
            if self._lists.next[block] != UNLINKED:
                self._leave(block)
            self._placed[block] = self._marked[block] = False

    def victims(self, n: int) -> list[int]:
        if n > self._length:
            raise ValueError(f"{n} victims wanted, {self._length} evictable")
        victims: list[int] = []
        after, marked = self._lists.next, self._marked
        while len(victims) < n:
            block = self._hand
            if block == self._end:
                self._hand = after[block]
            elif not self._evictable[block]:
                self._leave(block)
            elif marked[block]:
                marked[block] = False
                self._hand = after[block]
            else:
                self._leave(block)
                self._evictable[block] = self._placed[block] = False
                victims.append(block)
        self._length -= n
        return victims

    def step(
        self, now: float, soon: Iterable[bytes], dropped: Mapping[bytes, int]
    ) -> None:
        del now, soon, dropped

    def order(self) -> Iterator[int]:
        twin = self._twin()
        while twin:
            yield from twin.victims(min(_AHEAD, len(twin)))

    def __len__(self) -> int:
        return self._length

    def check(self) -> None:
        self._lists.check()
        queue = list(self._lists.blocks(self._end))
        if self._hand not in (*queue, self._end):
            raise IntegrityError("SIEVE: the hand points nowhere")
        if self._evictable.count(True) != self._length:
            raise IntegrityError("SIEVE: evictable blocks are miscounted")
        if sum(self._evictable[block] for block in queue) != self._length:
            raise IntegrityError("SIEVE: an evictable block is not in the queue")
        if not all(self._placed[block] for block in queue):
            raise IntegrityError("SIEVE: a block in the queue has no place")

    def _leave(self, block: int) -> None:
        if block == self._hand:
            self._hand = self._lists.next[block]
        self._lists.unlink_one(block)

    def _twin(self) -> "Sieve":
        """One that can be asked for victims in this one's stead."""
        twin = copy(self)
        twin._marked = self._marked.copy()
        twin._placed = self._placed.copy()
        twin._evictable = self._evictable.copy()
        twin._lists = self._lists.copy()
        return twin
