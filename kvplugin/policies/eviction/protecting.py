"""What policies share that protect some blocks and leave the rest to another policy.

Every block is the inner policy's, protected or not, until that one chooses it as a
victim. A protected block is then *saved*: for the inner policy it is evicted, as it
would have been without protection, and if it is adopted after all it is inserted there
again. So the inner policy learns from what it sees without protection, and protecting
a block that it would have kept costs nothing.

Saved blocks whose protection ends are the next victims. Those that are still protected
are victims when the inner policy has no more, so that protection can never leave a
pool without victims.
"""

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from kvplugin.errors import IntegrityError
from kvplugin.policies.eviction.base import (
    NO_CONTEXT,
    BlockContext,
    BlockInfo,
    EvictionPolicy,
    hears_demand,
    needs,
)
from kvplugin.policies.eviction.ranked_groups import RankedGroups
from kvplugin.policies.eviction.ranked_set import Rank, RankedSet

_PER_AHEAD: Final = 8
"""Blocks saved in vain for each that the inner policy is then asked for ahead."""
_MOST_AHEAD: Final = 256

Protection = tuple[Hashable, float]
"""What protects a block, and among all that it protects the block's rank; those of
greater rank are kept longer."""


class Protecting:
    """Saves blocks up to a budget; beyond it those worth least are victims.

    Subclasses say what protects a block (`_protection`), how much that is worth
    (`_worth`), and of which blocks it has changed (`_reconsider`).

    When the inner policy chooses many protected blocks in a row it is asked for more
    than is wanted, an eighth of the blocks so far. What is not protected of the surplus
    goes next.

    Args:
        inner: ranks the blocks. It hears of every insert and hit.
        max_share: most blocks saved, as a share of the pool.
    """

    needs_info = True
    needs_hits = True
    needs_steps = True
    needs_demand = True

    def __init__(self, inner: EvictionPolicy, max_share: float) -> None:
        self._inner = inner
        self._max_share = max_share
        self._saved = RankedGroups(self._worth)
        """By what protects them, then by (rank, serial number)."""
        self._due = RankedSet()
        """Chosen by the inner policy and not protected, or no longer, by serial
        number. Nothing more is saved while there are such blocks, so they are within
        the budget."""
        self._last_serial = 0
        self.needs_demand = hears_demand(self) or hears_demand(inner)
        for what in ("needs_info", "needs_hits", "needs_steps"):
            setattr(self, what, needs(self, what) or needs(inner, what))

    def bind(self, num_blocks: int, info: Callable[[int], BlockInfo]) -> None:
        self._info = info
        self._budget = int(num_blocks * self._max_share)
        self._inner.bind(num_blocks, info)

    def insert(self, ids: Sequence[int], ctx: BlockContext) -> None:
        self._inner.insert(ids, ctx)

    def hit(self, ids: Sequence[int], ctx: BlockContext) -> None:
        self._inner.hit(ids, ctx)

    def pin(self, ids: Sequence[int]) -> None:
        known, unknown = self._split(ids)
        if known:
            self._inner.pin(known)
        if unknown:
            self._inner.insert(unknown, NO_CONTEXT)

    def release(self, ids: Sequence[int]) -> None:
        self._inner.release(ids)

    def forget(self, ids: Sequence[int]) -> None:
        known, _ = self._split(ids)
        self._lose_keys(ids)
        if known:
            self._inner.forget(known)

    def victims(self, n: int) -> list[int]:
        if n > len(self):
            raise ValueError(f"{n} victims wanted, {len(self)} evictable")
        victims: list[int] = []
        saved_before = len(self._saved)
        while len(victims) < n:
            ahead = (len(self._saved) - saved_before) // _PER_AHEAD
            victims += self._next_victims(n - len(victims), min(ahead, _MOST_AHEAD))
        self._save_no_longer(victims)
        self._lose_keys(victims)
        return victims

    def step(
        self, now: float, soon: Iterable[bytes], dropped: Mapping[bytes, int]
    ) -> None:
        self._inner.step(now, soon, dropped)

    def order(self) -> Iterator[int]:
        yield from self._due
        saved = [*self._saved.ranks()]
        heapq.heapify(saved)
        for serial, block in enumerate(self._inner.order(), self._last_serial + 1):
            protection = self._protection(block)
            if protection is None:
                yield block
                continue
            what, rank = protection
            heapq.heappush(saved, ((*self._worth(what), rank, serial), block))
            if len(saved) > self._budget:
                yield heapq.heappop(saved)[1]
        yield from (block for _, block in sorted(saved))

    def __len__(self) -> int:
        return len(self._inner) + len(self._saved) + len(self._due)

    def check(self) -> None:
        self._inner.check()
        self._saved.check()
        self._due.check()
        if len(self._saved) + len(self._due) > self._budget:
            raise IntegrityError("more blocks are saved than the budget allows")
        places = [*self._inner.order(), *self._saved, *self._due]
        if len(set(places)) < len(places):
            raise IntegrityError("a block is evictable in two places")

    # -- for subclasses ------------------------------------------------------------

    def _protection(self, block: int) -> Protection | None:
        """How a keyed block is protected now, None if it is not. If that changes,
        `_reconsider` is told."""
        raise NotImplementedError

    def _worth(self, what: Hashable) -> Rank:
        """How much it is worth to keep what this protects; greater is more. It may
        rise at any time, and does not fall."""
        raise NotImplementedError

    def _lose_keys(self, ids: Sequence[int]) -> None:
        """These blocks are losing their keys."""

    def _save_now(self, block: int) -> None:
        """The block was saved."""

    def _save_no_longer(self, ids: Sequence[int]) -> None:
        """Those of the blocks that were saved come into use or are victims."""

    def _reconsider(self, ids: Iterable[int]) -> None:
        """The protection of these blocks has begun, changed or ended; only of those
        that are saved it makes a difference now."""
        for block in ids:
            rank = self._saved.discard(block) or self._due.discard(block)
            if rank is not None:
                self._put(block, self._protection(block), rank[-1])

    # -- inside --------------------------------------------------------------------

    def _split(self, ids: Sequence[int]) -> tuple[Sequence[int], list[int]]:
        """Blocks that the inner policy knows, and the others, which are saved no
        longer."""
        if not self._saved and not self._due:
            return ids, []
        saved = (self._saved, self._due)
        unknown = [b for b in ids if any(s.discard(b) is not None for s in saved)]
        self._save_no_longer(unknown)
        gone = set(unknown)
        return [block for block in ids if block not in gone], unknown

    def _next_victims(self, n: int, ahead: int) -> list[int]:
        """At most `n`; none if all that the inner policy chose are saved.

        Args:
            n: victims wanted.
            ahead: how many more the inner policy is asked for. As many as the budget
                has room for at most, so that those which go next are within it.
        """
        if self._due:
            return [self._due.pop()[1] for _ in range(min(n, len(self._due)))]
        if not len(self._inner):
            return [self._saved.pop() for _ in range(n)]
        ahead = min(ahead, self._budget - len(self._saved))
        victims: list[int] = []
        for block in self._inner.victims(min(n + ahead, len(self._inner))):
            protection = self._protection(block)
            if protection is None and len(victims) < n:
                victims.append(block)
                continue
            self._last_serial += 1
            self._put(block, protection, self._last_serial)
            self._save_now(block)
            if len(self._saved) > self._budget:
                victims.append(self._saved.pop())
        return victims

    def _put(self, block: int, protection: Protection | None, serial: float) -> None:
        """Save the block, or let it go next if nothing protects it."""
        if protection is None:
            self._due.put(block, (serial,))
        else:
            what, rank = protection
            self._saved.put(block, what, (rank, serial))
