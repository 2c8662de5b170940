"""GreedyDual: keep longest what is dear to compute again.

P. Cao and S. Irani, "Cost-aware WWW proxy caching algorithms", USITS 1997
(GreedyDual-Size); L. Cherkasova, "Improving WWW proxies performance with
Greedy-Dual-Size-Frequency caching policy", HP Labs HPL-98-69R1, 1998.
"""

import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from kvplugin.errors import IntegrityError, check_ranges
from kvplugin.policies.eviction.base import BlockContext, BlockInfo

_SLACK: Final = 1024
"""Stale entries that are never worth a clean-up."""

Run = tuple[float, int, list[int]]
"""Value, number, and blocks of that value with the next victim last."""


class CostAwareOptions(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """What a block costs where the request does not say."""

    attention_share_at: float = 24_576
    """Tokens of context at which attention costs a token as many FLOPs as the linear
    layers do: parameters / (2 * layers * query heads * head size), about six times the
    hidden size of a dense model. 0: only linear layers, all blocks cost the same."""
    block_size: int = 16
    """Tokens of a block."""
    frequency: bool = True
    """Count hits: a block is worth its cost times its uses (GDSF)."""

    def __post_init__(self) -> None:
        check_ranges(
            self, {"attention_share_at": (0, 1e12), "block_size": (1, 1 << 20)}
        )


_DEFAULTS: Final = CostAwareOptions()


class CostAware:
    """Evicts the block of least value, where value = age + uses * cost a byte.

    The age is the value of the last victim, so that what is not used again loses to
    newer blocks in the end. All blocks of a pool have one size, so bytes drop out.

    Cost is counted in linear FLOPs of one block. A block at depth d (blocks before it)
    costs 1 for the linear layers and (d + 1/2) * block_size / attention_share_at for
    attention, whose work a token grows with its context. `BlockContext.cost_per_block`
    takes the place of both; whoever gives it for some requests only should use the
    same unit.

    A block is of no use without its ancestors, so none may be worth less than a
    descendant: the blocks of a release take at least the value of those released before
    them (the tail comes first and is the dearest), a value does not fall while a block
    keeps its key, and a parent that is still in use inherits later. Among equals the
    one released first goes first.

    O(log n) a block, victims amortised: one call passes over all entries of blocks that
    have been used again since (about 20 ms for 100,000 blocks), and the next over none.
    """

    needs_steps = False

    def __init__(self, options: CostAwareOptions = _DEFAULTS) -> None:
        self._attention = (
            options.block_size / options.attention_share_at
            if options.attention_share_at
            else 0.0
        )
        self._frequency = options.frequency
        self._age = 0.0
        self._inherited: dict[bytes, float] = {}
        """By key, values of children whose parent was not released with them; at most
        two for each block of the pool."""
        self._last_run = 0
        # Runs may hold blocks that have left; `_drop_stale` bounds their number.
        self._heap: list[Run] = []
        self._queued = 0
        self._length = 0

    def bind(self, num_blocks: int, info: Callable[[int], BlockInfo]) -> None:
        self._info = info
        # Of keyed blocks.
        self._costs = array("d", bytes(8 * num_blocks))
        self._uses = array("I", bytes(4 * num_blocks))
        self._values = array("d", bytes(8 * num_blocks))
        # Of evictable blocks the number of their run, else 0.
        self._runs = [0] * num_blocks

    def insert(self, ids: Sequence[int], ctx: BlockContext) -> None:
        for block in ids:
            depth = self._info(block).depth
            self._costs[block] = (
                ctx.cost_per_block or 1 + (depth + 0.5) * self._attention
            )
            self._uses[block] = 1
            self._values[block] = 0.0

    def hit(self, ids: Sequence[int], ctx: BlockContext) -> None:
        if self._frequency:
            for block in ids:
                self._uses[block] += 1
        if ctx.cost_per_block:
            for block in ids:
                self._costs[block] = ctx.cost_per_block

    def pin(self, ids: Sequence[int]) -> None:
        for block in ids:
            self._runs[block] = 0
        self._length -= len(ids)

    def release(self, ids: Sequence[int]) -> None:
        last = -1.0
        run: list[int] = []
        for block, value in zip(ids, self._new_values(ids), strict=True):
            if value != last:
                self._queue(last, run)
                last, run = value, []
            run.append(block)
            self._values[block] = value
        self._queue(last, run)
        self._length += len(ids)
        self._drop_stale()

    def forget(self, ids: Sequence[int]) -> None:
        self._length -= sum(self._runs[block] != 0 for block in ids)
        for block in ids:
            self._runs[block] = 0
            if self._inherited:
                self._inherited.pop(self._info(block).key, None)

    def victims(self, n: int) -> list[int]:
        if n > self._length:
            raise ValueError(f"{n} victims wanted, {self._length} evictable")
        victims: list[int] = []
        while len(victims) < n:
            value, number, blocks = self._heap[0]
            while blocks and len(victims) < n:
                block = blocks.pop()
                self._queued -= 1
                if self._runs[block] == number:
                    self._age = value
                    self._runs[block] = 0
                    victims.append(block)
            if not blocks:
                heapq.heappop(self._heap)
        self._length -= n
        return victims

    def step(
        self, now: float, soon: Iterable[bytes], dropped: Mapping[bytes, int]
    ) -> None:
        del now, soon, dropped

    def order(self) -> Iterator[int]:
        for _, number, blocks in sorted(self._heap):
            yield from (b for b in reversed(blocks) if self._runs[b] == number)

    def __len__(self) -> int:
        return self._length

    def check(self) -> None:
        evictable = {block for block, run in enumerate(self._runs) if run}
        if not len(evictable) == self._length or set(self.order()) != evictable:
            raise IntegrityError("cost: runs and evictable blocks disagree")
        if self._queued != sum(len(blocks) for _, _, blocks in self._heap):
            raise IntegrityError("cost: queued entries are miscounted")
        if any(self._values[block] < self._age for block in evictable):
            raise IntegrityError("cost: a block is worth less than the last victim")

    def _new_values(self, ids: Sequence[int]) -> list[float]:
        """Values that never fall: neither from one block to the next, nor in time."""
        floor = 0.0
        values = []
        for block in ids:
            value = self._age + self._uses[block] * self._costs[block]
            floor = max(floor, self._values[block], value)
            if self._inherited:
                inherited = self._inherited.pop(self._info(block).key, 0.0)
                floor = max(floor, inherited)
            values.append(floor)
        if ids and (parent := self._info(ids[-1]).parent_key) is not None:
            # Anew, so that the ones of latest change are last.
            self._inherited[parent] = max(floor, self._inherited.pop(parent, 0.0))
            if len(self._inherited) > 2 * len(self._runs):
                self._drop_inherited()
        return values

    def _queue(self, value: float, blocks: list[int]) -> None:
        if not blocks:
            return
        self._last_run += 1
        for block in blocks:
            self._runs[block] = self._last_run
        heapq.heappush(self._heap, (value, self._last_run, blocks[::-1]))
        self._queued += len(blocks)

    def _drop_stale(self) -> None:
        if self._queued > 2 * self._length + _SLACK:
            fresh = (
                (value, number, [b for b in blocks if self._runs[b] == number])
                for value, number, blocks in self._heap
            )
            self._heap = [run for run in fresh if run[2]]
            heapq.heapify(self._heap)
            self._queued = self._length

    def _drop_inherited(self) -> None:
        """Keep at most one for each block, those that changed last: due only after as
        many releases, so amortised O(1). Others are mostly of parents that are gone."""
        # What is not above the age makes no difference to any value.
        kept = [entry for entry in self._inherited.items() if entry[1] > self._age]
        self._inherited = dict(kept[-len(self._runs) :])
