"""S3-FIFO: a small queue to try blocks in, a main queue, and ghosts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import chain
from typing import Final

import msgspec

from kvplugin.errors import IntegrityError, check_ranges
from kvplugin.policies.eviction.base import BlockContext, BlockInfo
from kvplugin.policies.eviction.block_lists import UNLINKED, BlockLists
from kvplugin.policies.eviction.ghosts import Ghosts

_MOST_HITS: Final = 3
"""Two bits a block, as in the paper."""
_AHEAD: Final = 64
"""Blocks that `order` looks ahead."""
_SMALL: Final = 0
_MAIN: Final = 1


class S3FIFOOptions(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Settings of `s3fifo`; the defaults are the paper's."""

    small_share: float = 0.1
    """Share of the queued blocks above which victims come from the small queue."""
    ghost_share: float = 0.9
    """Most ghosts, as a share of the pool's blocks."""
    move_threshold: int = 2
    """Hits with which a block moves from the small queue to the main one."""
    fill_main: bool = False
    """Before the first eviction, append to the main queue once the small one has its
    share of the pool, as libCacheSim does since 2024. The paper appends to the small
    queue."""

    def __post_init__(self) -> None:
        ranges = {
            "small_share": (0.0, 1.0),
            "ghost_share": (0.0, 1.0),
            "move_threshold": (1, _MOST_HITS),
        }
        check_ranges(self, ranges)


_DEFAULTS: Final = S3FIFOOptions()


class S3FIFO:
    """Yang et al., FIFO Queues are All You Need for Cache Eviction, SOSP 2023.

    A block joins the end of the small queue when it is first released (the tail of a
    prefix before its head), or that of the main queue if its key was a ghost at
    `insert`. Hits are only counted. From the front of the small queue a block with
    enough hits goes to the main queue, another one is a victim and leaves a ghost.
    From the front of the main queue a block with hits goes to the end and has one
    less, another one is a victim.

    A block keeps its place while it is in use. If it comes up at the front it leaves
    the queue, its hits untouched, and at its release it is at the front again. So
    blocks in use are passed over at no cost. Both queues' sizes count blocks in use
    that have a place. O(1) a block, victims amortised.
    """

    needs_steps = False

    def __init__(self, options: S3FIFOOptions = _DEFAULTS) -> None:
        self._options = options
        self._hits: list[int] = []
        self._queue_of: list[int] = []
        """Of keyed blocks: the queue in which they are or will be."""
        self._placed: list[bool] = []
        """Of keyed blocks whether they were released before."""
        self._evictable: list[bool] = []
        self._lists = BlockLists(0)
        self._ends = [0, 0]
        self._sizes = [0, 0]
        """Blocks with a place, by queue."""
        self._ghosts = Ghosts()
        self._most_ghosts = 0
        self._most_small = 0
        """Blocks of the small queue beyond which new ones join the main queue."""
        self._length = 0

    def bind(self, num_blocks: int, info: Callable[[int], BlockInfo]) -> None:
        self._info = info
        self._hits = [0] * num_blocks
        self._queue_of = [_SMALL] * num_blocks
        self._placed = [False] * num_blocks
        self._evictable = [False] * num_blocks
        self._lists = BlockLists(num_blocks)
        self._ends = [self._lists.make(), self._lists.make()]
        usable = num_blocks - 1  # without the null block
        self._most_ghosts = int(self._options.ghost_share * usable)
        share = self._options.small_share if self._options.fill_main else 1.0
        self._most_small = int(share * usable)

    def insert(self, ids: Sequence[int], ctx: BlockContext) -> None:
        del ctx
        for block in ids:
            was_ghost = self._ghosts.discard(self._info(block).key)
            self._queue_of[block] = _MAIN if was_ghost else _SMALL
            self._hits[block] = 0

    def hit(self, ids: Sequence[int], ctx: BlockContext) -> None:
        del ctx
        hits = self._hits
        for block in ids:
            if hits[block] < _MOST_HITS:
                hits[block] += 1

    def pin(self, ids: Sequence[int]) -> None:
        for block in ids:
            self._evictable[block] = False
        self._length -= len(ids)

    def release(self, ids: Sequence[int]) -> None:
        after, evictable, placed = self._lists.next, self._evictable, self._placed
        new: list[int] = []
        back: list[int] = []
        for block in ids:
            evictable[block] = True
            if after[block] == UNLINKED:
                (back if placed[block] else new).append(block)
        self._length += len(ids)
        for block in reversed(back):
            front = after[self._ends[self._queue_of[block]]]
            self._lists.insert([block], before=front)
        self._join(new)

    def forget(self, ids: Sequence[int]) -> None:
        self.pin([block for block in ids if self._evictable[block]])
        after = self._lists.next
        self._lists.unlink([block for block in ids if after[block] != UNLINKED])
        for block in ids:
            if self._placed[block]:
                self._placed[block] = False
                self._sizes[self._queue_of[block]] -= 1

    def victims(self, n: int) -> list[int]:
        if n > self._length:
            raise ValueError(f"{n} victims wanted, {self._length} evictable")
        victims = self._choose(n)
        info, queue_of = self._info, self._queue_of
        self._ghosts.add([info(b).key for b in victims if queue_of[b] == _SMALL])
        self._ghosts.shrink(self._most_ghosts)
        self._most_small = len(self._hits)  # the main queue has been filled
        return victims

    def step(
        self, now: float, soon: Iterable[bytes], dropped: Mapping[bytes, int]
    ) -> None:
        del now, soon, dropped

    def order(self) -> Iterator[int]:
        twin = self._twin()
        while twin:
            yield from twin._choose(min(_AHEAD, len(twin)))

    def __len__(self) -> int:
        return self._length

    def check(self) -> None:
        self._lists.check()
        queues = [list(self._lists.blocks(end)) for end in self._ends]
        for queue, blocks in enumerate(queues):
            if any(self._queue_of[b] != queue or not self._placed[b] for b in blocks):
                raise IntegrityError("S3-FIFO: a block is in a queue that it is not of")
        if sum(self._evictable[b] for b in chain(*queues)) != self._length:
            raise IntegrityError("S3-FIFO: an evictable block is in no queue")
        if self._evictable.count(True) != self._length:
            raise IntegrityError("S3-FIFO: evictable blocks are miscounted")
        if sum(self._sizes) != self._placed.count(True):
            raise IntegrityError("S3-FIFO: the queues are miscounted")
        if len(self._ghosts) > self._most_ghosts:
            raise IntegrityError("S3-FIFO: there are too many ghosts")

    def _join(self, ids: Sequence[int]) -> None:
        """New blocks take their places at the ends of their queues."""
        sizes, queue_of, placed = self._sizes, self._queue_of, self._placed
        joining: tuple[list[int], list[int]] = ([], [])
        for block in ids:
            if queue_of[block] == _SMALL and sizes[_SMALL] >= self._most_small:
                queue_of[block] = _MAIN
            queue = queue_of[block]
            placed[block] = True
            sizes[queue] += 1
            joining[queue].append(block)
        for end, blocks in zip(self._ends, joining, strict=True):
            self._lists.insert(blocks, before=end)

    def _choose(self, n: int) -> list[int]:
        """`victims` that leave no ghosts; of those, `_queue_of` stays true."""
        hits, evictable, sizes = self._hits, self._evictable, self._sizes
        after, unlink = self._lists.next, self._lists.unlink_one
        share, enough = self._options.small_share, (self._options.move_threshold, 1)
        victims: list[int] = []
        while len(victims) < n:
            small, main = sizes
            queue = _SMALL if small >= int(share * (small + main)) else _MAIN
            block = after[self._ends[queue]]
            if block == self._ends[queue]:
                queue = 1 - queue
                block = after[self._ends[queue]]
            unlink(block)
            if not evictable[block]:
                continue
            sizes[queue] -= 1
            if hits[block] >= enough[queue]:
                hits[block] = 0 if queue == _SMALL else hits[block] - 1
                self._queue_of[block] = _MAIN
                sizes[_MAIN] += 1
                self._lists.insert([block], before=self._ends[_MAIN])
            else:
                self._placed[block] = evictable[block] = False
                victims.append(block)
        self._length -= n
        return victims

    def _twin(self) -> "S3FIFO":
        """One that can choose in this one's stead."""
        twin = copy(self)
        twin._hits = self._hits.copy()
        twin._queue_of = self._queue_of.copy()
        twin._placed = self._placed.copy()
        twin._evictable = self._evictable.copy()
        twin._sizes = self._sizes.copy()
        twin._lists = self._lists.copy()
        return twin
