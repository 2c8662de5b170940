"""Least recently used: a block's rank is the time of its last release."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from kvplugin.errors import IntegrityError
from kvplugin.policies.eviction.base import BlockContext, BlockInfo

_SLACK: Final = 1024
"""Stale entries that are never worth a clean-up."""
_LOOKED_AT: Final = 256
"""Entries of a torn release that are looked at together, at least."""


class LRU:
    """The order of vLLM 0.32's free queue among blocks that carry a hash.

    `release` appends, so of one request the pool should list the tail of a prefix
    before its head: the head then outlives the tail and a shorter prefix still hits.

    The queue holds whole releases. A block that leaves the evictable set is not
    searched for: its stamp changes, and its old entry is skipped when it comes up.
    """

    needs_info = False
    needs_hits = False
    needs_steps = False

    def __init__(self) -> None:
        # Of each block the number of the release that made it evictable, else 0.
        self._stamps: list[int] = []
        # (number of a release, its blocks with the next victim last)
        self._releases: deque[tuple[int, list[int]]] = deque()
        # Numbers of releases that blocks have left other than as victims.
        self._torn: set[int] = set()
        self._last_release = 0
        self._length = 0
        self._queued = 0

    def bind(self, num_blocks: int, info: Callable[[int], BlockInfo]) -> None:
        del info
        self._stamps = [0] * num_blocks

    def insert(self, ids: Sequence[int], ctx: BlockContext) -> None:
        del ids, ctx

    def hit(self, ids: Sequence[int], ctx: BlockContext) -> None:
        del ids, ctx  # recency is taken at release

    def pin(self, ids: Sequence[int]) -> None:
        stamps = self._stamps
        self._torn |= {stamps[block] for block in ids}
        self._leave(ids)

    def release(self, ids: Sequence[int]) -> None:
        self._last_release = number = self._last_release + 1
        stamps = self._stamps
        for block in ids:
            stamps[block] = number
        self._releases.append((number, [*reversed(ids)]))
        self._length += len(ids)
        self._queued += len(ids)
        if self._queued > 2 * self._length + _SLACK:
            self._drop_stale_entries()

    def forget(self, ids: Sequence[int]) -> None:
        evictable = [block for block in ids if self._stamps[block]]
        self._torn.update([self._stamps[block] for block in evictable])
        self._leave(evictable)

    def victims(self, n: int) -> list[int]:
        if n > self._length:
            raise ValueError(f"{n} victims wanted, {self._length} evictable")
        victims: list[int] = []
        while len(victims) < n:
            victims += self._next_victims(n - len(victims))
        self._leave(victims)
        return victims

    def _next_victims(self, n: int) -> list[int]:
        """At most `n`, all of the oldest release; perhaps none, and then it is gone."""
        number, blocks = self._releases[0]
        if number in self._torn:
            first = self._take_from_torn(number, blocks, n)
        else:
            first = blocks[-n:]
            del blocks[-n:]
        first.reverse()
        self._queued -= len(first)
        if not blocks:
            self._releases.popleft()
            self._torn.discard(number)
        return first

    def _take_from_torn(self, number: int, blocks: list[int], n: int) -> list[int]:
        """Last blocks of a torn release, at most `n`. It looks at many, so that few
        victims do not cost a call each for the stale entries before them."""
        stamps = self._stamps
        last = blocks[-max(n, _LOOKED_AT) :]
        fresh = [block for block in last if stamps[block] == number]
        blocks[-len(last) :] = fresh[:-n]
        self._queued -= len(last) - len(fresh)
        return fresh[-n:]

    def step(
        self, now: float, soon: Iterable[bytes], dropped: Mapping[bytes, int]
    ) -> None:
        del now, soon, dropped

    def order(self) -> Iterator[int]:
        for number, blocks in self._releases:
            yield from (b for b in reversed(blocks) if self._stamps[b] == number)

    def __len__(self) -> int:
        return self._length

    def check(self) -> None:
        numbers = {number for number, _ in self._releases}
        if not self._torn <= numbers:
            raise IntegrityError("LRU: a release is torn that is gone")
        stamped = sum(stamp != 0 for stamp in self._stamps)
        if not stamped == self._length == len(list(self.order())):
            raise IntegrityError("LRU: stamps, queue and length disagree")
        if self._queued != sum(len(blocks) for _, blocks in self._releases):
            raise IntegrityError("LRU: queued entries are miscounted")

    def _leave(self, ids: Sequence[int]) -> None:
        stamps = self._stamps
        for block in ids:
            stamps[block] = 0
        self._length -= len(ids)

    def _drop_stale_entries(self) -> None:
        """Linear in the queue, and due only after as many releases: amortised O(1)."""
        fresh = (
            (number, [b for b in blocks if self._stamps[b] == number])
            for number, blocks in self._releases
        )
        self._releases = deque((number, blocks) for number, blocks in fresh if blocks)
        self._torn.clear()
        self._queued = self._length
