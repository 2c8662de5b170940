"""ARC: balances recency and frequency by what it evicted wrongly."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Final

from kvplugin.errors import IntegrityError
from kvplugin.policies.eviction.base import BlockContext, BlockInfo
from kvplugin.policies.eviction.block_lists import UNLINKED, BlockLists
from kvplugin.policies.eviction.ghosts import Ghosts

_NONE: Final = -1
_ONCE: Final = 0
_AGAIN: Final = 1


class ARC:
    """Megiddo and Modha, ARC: A Self-Tuning, Low Overhead Replacement Cache, FAST 2003.

    Two LRU lists: T1 has the blocks that were used once, T2 those that were used again.
    Victims leave ghosts, B1 and B2. A block whose key was a ghost is of T2 at once, and
    moves the aim for T1's size: up if it was in B1, down if in B2. A victim is the
    least recently released block of T1 while T1 has more blocks than it should, or of
    T2.

    A block in use is of T1 or T2 and counts for its size; its place in the list it
    takes when it is released. If the list that should give the victim has only blocks
    in use, the other one does. O(1) a block.

    Differs from the paper: a pool wants victims before it says for what, so the aim
    moves after the victim is chosen, and a victim never goes without a ghost (the
    oldest ghost goes for it, at the next `insert`).
    """

    needs_steps = False

    def __init__(self) -> None:
        self._capacity = 0
        self._aim = 0.0
        """Size that T1 should have, in blocks: p of the paper."""
        self._list_of: list[int] = []
        """Of keyed blocks, `_NONE` of others."""
        self._sizes = [0, 0]
        """Keyed blocks by list."""
        self._lists = BlockLists(0)
        self._ends = [0, 0]
        self._ghosts = (Ghosts(), Ghosts())
        self._length = 0

    def bind(self, num_blocks: int, info: Callable[[int], BlockInfo]) -> None:
        self._info = info
        self._capacity = num_blocks - 1  # without the null block
        self._list_of = [_NONE] * num_blocks
        self._lists = BlockLists(num_blocks)
        self._ends = [self._lists.make(), self._lists.make()]

    def insert(self, ids: Sequence[int], ctx: BlockContext) -> None:
        del ctx
        for block in ids:
            which = _AGAIN if self._was_ghost(self._info(block).key) else _ONCE
            self._list_of[block] = which
            self._sizes[which] += 1
        self._drop_ghosts()

    def hit(self, ids: Sequence[int], ctx: BlockContext) -> None:
        del ctx
        list_of, sizes = self._list_of, self._sizes
        for block in ids:
            if list_of[block] == _ONCE:
                list_of[block] = _AGAIN
                sizes[_ONCE] -= 1
                sizes[_AGAIN] += 1

    def pin(self, ids: Sequence[int]) -> None:
        self._lists.unlink(ids)
        self._length -= len(ids)

    def release(self, ids: Sequence[int]) -> None:
        for which, blocks in groupby(ids, self._list_of.__getitem__):
            self._lists.insert(blocks, before=self._ends[which])
        self._length += len(ids)

    def forget(self, ids: Sequence[int]) -> None:
        after = self._lists.next
        self.pin([block for block in ids if after[block] != UNLINKED])
        for block in ids:
            self._sizes[self._list_of[block]] -= 1
            self._list_of[block] = _NONE

    def victims(self, n: int) -> list[int]:
        if n > self._length:
            raise ValueError(f"{n} victims wanted, {self._length} evictable")
        victims = list(islice(self.order(), n))
        info, list_of = self._info, self._list_of
        for which, ghosts in enumerate(self._ghosts):
            ghosts.add([info(b).key for b in victims if list_of[b] == which])
        self.forget(victims)
        return victims

    def step(
        self, now: float, soon: Iterable[bytes], dropped: Mapping[bytes, int]
    ) -> None:
        del now, soon, dropped

    def order(self) -> Iterator[int]:
        after, (end, end_again) = self._lists.next, self._ends
        once, again = after[end], after[end_again]
        size = self._sizes[_ONCE]
        while once != end or again != end_again:
            if once != end and (size > self._aim or again == end_again):
                yield once
                once = after[once]
                size -= 1
            else:
                yield again
                again = after[again]

    def __len__(self) -> int:
        return self._length

    def check(self) -> None:
        self._lists.check()
        lists = [list(self._lists.blocks(end)) for end in self._ends]
        for which, blocks in enumerate(lists):
            if self._sizes[which] != self._list_of.count(which):
                raise IntegrityError("ARC: a list is miscounted")
            if any(self._list_of[block] != which for block in blocks):
                raise IntegrityError("ARC: a block is in the other list")
        if sum(map(len, lists)) != self._length:
            raise IntegrityError("ARC: lists and length disagree")
        if not 0 <= self._aim <= self._capacity:
            raise IntegrityError("ARC: T1 aims at an impossible size")
        if sum(map(len, self._ghosts)) > 2 * self._capacity:
            raise IntegrityError("ARC: there are too many ghosts")

    def _was_ghost(self, key: bytes) -> bool:
        once, again = map(len, self._ghosts)
        if self._ghosts[_ONCE].discard(key):
            self._aim = min(self._aim + max(1.0, again / once), self._capacity)
            return True
        if self._ghosts[_AGAIN].discard(key):
            self._aim = max(self._aim - max(1.0, once / again), 0.0)
            return True
        return False

    def _drop_ghosts(self) -> None:
        """T1 and B1 are together at most the pool, all four at most twice the pool."""
        once, again = self._ghosts
        once.shrink(self._capacity - self._sizes[_ONCE])
        again.shrink(2 * self._capacity - sum(self._sizes) - len(once))
