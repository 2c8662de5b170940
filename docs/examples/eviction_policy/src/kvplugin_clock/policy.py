"""CLOCK: first in, first out, where a hit gives another chance."""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kvplugin import IntegrityError
from kvplugin.policies.eviction import BlockContext, BlockInfo


class Clock:
    """Blocks have a place in a queue, which they take when they are first released
    (the tail of a prefix before its head) and keep while they are in use again. A
    victim is the first one without chances; those passed by lose one and go to the
    end. O(log n) a block, victims amortised.

    Args:
        chances: most rounds that a block survives by its hits.
    """

    needs_info = False

    def __init__(self, chances: int = 1) -> None:
        self._most = chances
        self._chances: dict[int, int] = {}
        """Of keyed blocks that were hit."""
        self._places: dict[int, int] = {}
        """Of keyed blocks that were released before."""
        self._evictable: set[int] = set()
        self._next_place = 0
        # May hold places that are no longer true; `_drop_stale` bounds their number.
        self._heap: list[tuple[int, int]] = []

    def bind(self, num_blocks: int, info: Callable[[int], BlockInfo]) -> None:
        del num_blocks, info

    def insert(self, ids: Sequence[int], ctx: BlockContext) -> None:
        del ids, ctx  # places are taken at release, tail first

    def hit(self, ids: Sequence[int], ctx: BlockContext) -> None:
        del ctx
        for block in ids:
            self._chances[block] = min(self._chances.get(block, 0) + 1, self._most)

    def pin(self, ids: Sequence[int]) -> None:
        self._evictable.difference_update(ids)

    def release(self, ids: Sequence[int]) -> None:
        self._evictable.update(ids)
        for block in ids:
            if block in self._places:
                heapq.heappush(self._heap, (self._places[block], block))
            else:
                self._append(block)
        self._drop_stale()

    def forget(self, ids: Sequence[int]) -> None:
        self._evictable.difference_update(ids)
        for block in ids:
            self._places.pop(block, None)
            self._chances.pop(block, None)

    def victims(self, n: int) -> list[int]:
        if n > len(self._evictable):
            raise ValueError(f"{n} victims wanted, {len(self._evictable)} evictable")
        victims: list[int] = []
        while len(victims) < n:
            place, block = heapq.heappop(self._heap)
            if not self._is_true(place, block):
                continue
            if chances := self._chances.get(block, 0):
                self._chances[block] = chances - 1
                self._append(block)
            else:
                victims.append(block)
                self.forget([block])
        return victims

    def step(
        self, now: float, soon: Iterable[bytes], dropped: Mapping[bytes, int]
    ) -> None:
        del now, soon, dropped

    def order(self) -> Iterator[int]:
        # A block with one chance more survives one round more.
        chances, places = self._chances, self._places
        return iter(
            sorted(self._evictable, key=lambda b: (chances.get(b, 0), places[b]))
        )

    def __len__(self) -> int:
        return len(self._evictable)

    def check(self) -> None:
        waiting = {block for place, block in self._heap if self._is_true(place, block)}
        if waiting != self._evictable:
            raise IntegrityError("the queue differs from the evictable blocks")

    def _append(self, block: int) -> None:
        self._places[block] = self._next_place
        heapq.heappush(self._heap, (self._next_place, block))
        self._next_place += 1

    def _is_true(self, place: int, block: int) -> bool:
        return block in self._evictable and self._places[block] == place

    def _drop_stale(self) -> None:
        if len(self._heap) > 2 * len(self._evictable) + 64:
            self._heap = [(self._places[b], b) for b in self._evictable]
            heapq.heapify(self._heap)
