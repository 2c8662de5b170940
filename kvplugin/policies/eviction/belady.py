"""Belady's choice: evict what is wanted again last. An oracle for replays.

L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM
Systems Journal 5(2), 1966.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf

from kvplugin.errors import IntegrityError
from kvplugin.policies.eviction.base import BlockContext, BlockInfo
from kvplugin.policies.eviction.first_blocks import FirstBlocks
from kvplugin.policies.eviction.ranked_set import Rank, RankedSet


class Future:
    """When each key is wanted, while a clock moves over the accesses.

    Takes 8 bytes an occurrence of a key and one entry of a dictionary a key.

    Args:
        accesses: of each access (a request), the keys that it wants.
    """

    def __init__(self, accesses: Sequence[Iterable[bytes]]) -> None:
        # A linked list a key: occurrence 0 is the end of every one.
        self._times = array("I", (0,))
        self._later = array("I", (0,))
        self._first: dict[bytes, int] = {}
        for time in range(len(accesses) - 1, -1, -1):
            for key in accesses[time]:
                self._later.append(self._first.get(key, 0))
                self._first[key] = len(self._times)
                self._times.append(time)
        self._now = -1

    @property
    def now(self) -> int:
        """Index of the access that is served, -1 before the first one."""
        return self._now

    def advance(self, now: int) -> None:
        """Move the clock to access `now`.

        Raises:
            ValueError: the clock stands behind it already.
        """
        if now < self._now:
            raise ValueError(f"the clock stands at access {self._now}, after {now}")
        self._now = now

    def next_use(self, key: bytes) -> float:
        """Index of the first access after the clock that wants `key`, or `inf`.
        Amortised O(1)."""
        first = place = self._first.get(key, 0)
        while place and self._times[place] <= self._now:
            place = self._later[place]
        if place != first:
            self._first[key] = place
        return self._times[place] if place else inf


class Belady:
    """Evicts the block whose key is wanted again last; among equals the deepest one
    first (a child before its parent), then the one that was released first.

    With independent blocks of one size no other order that admits every block has
    more hits. In a prefix cache it is a reference and no bound: it weighs block by
    block, and does not see that a block is of no use without its ancestors.

    Of several blocks with one key all but the first are of no use, so they count as
    never wanted.

    Args:
        future: the accesses; whoever replays them moves its clock.
    """

    needs_hits = False
    needs_steps = False

    def __init__(self, future: Future) -> None:
        self._future = future
        self._settled = future.now
        """Clock for which all ranks are true."""
        self._evictable = RankedSet()
        """By (-next use, -depth, number of the release)."""
        self._due: dict[float, list[tuple[int, Rank]]] = {}
        """Ranks by next use: when the clock passes it, they must be looked up again."""
        self._last_release = 0
        self._firsts = FirstBlocks()

    def bind(self, num_blocks: int, info: Callable[[int], BlockInfo]) -> None:
        del num_blocks
        self._info = info

    def insert(self, ids: Sequence[int], ctx: BlockContext) -> None:
        del ctx
        for block in ids:
            self._firsts.add(block, self._info(block).key)

    def hit(self, ids: Sequence[int], ctx: BlockContext) -> None:
        del ids, ctx

    def pin(self, ids: Sequence[int]) -> None:
        for block in ids:
            self._evictable.discard(block)

    def release(self, ids: Sequence[int]) -> None:
        self._settle()
        for block in ids:
            self._last_release += 1
            self._rank(block, -self._info(block).depth, self._last_release)

    def forget(self, ids: Sequence[int]) -> None:
        for block in ids:
            self._evictable.discard(block)
            self._lose_key(block)

    def victims(self, n: int) -> list[int]:
        if n > len(self._evictable):
            raise ValueError(f"{n} victims wanted, {len(self._evictable)} evictable")
        self._settle()
        victims = []
        for _ in range(n):
            victims.append(self._evictable.pop()[1])
            self._lose_key(victims[-1])
        return victims

    def step(
        self, now: float, soon: Iterable[bytes], dropped: Mapping[bytes, int]
    ) -> None:
        del now, soon, dropped  # the clock is the future's

    def order(self) -> Iterator[int]:
        self._settle()
        return iter(self._evictable)

    def __len__(self) -> int:
        return len(self._evictable)

    def check(self) -> None:
        self._settle()
        self._evictable.check()
        self._firsts.check()
        for block in self._evictable:
            if -self._evictable.rank_of(block)[0] != self._next_use(block):
                raise IntegrityError(f"Belady: the rank of block {block} is old")

    def _next_use(self, block: int) -> float:
        key = self._firsts.key_of_first(block)
        return inf if key is None else self._future.next_use(key)

    def _rank(self, block: int, *rest: float) -> None:
        next_use = self._next_use(block)
        rank = (-next_use, *rest)
        self._evictable.put(block, rank)
        if next_use < inf:
            self._due.setdefault(next_use, []).append((block, rank))

    def _settle(self) -> None:
        """Rank again what was wanted since the last time and not adopted: a block
        whose ancestors are missing."""
        for time in range(self._settled + 1, self._future.now + 1):
            for block, rank in self._due.pop(time, ()):
                if block in self._evictable and self._evictable.rank_of(block) is rank:
                    self._rank(block, *rank[1:])
        self._settled = self._future.now

    def _lose_key(self, block: int) -> None:
        heir = self._firsts.remove(block)
        if heir is not None and heir in self._evictable:
            self._rank(heir, *self._evictable.rank_of(heir)[1:])
