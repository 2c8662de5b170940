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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kvplugin.errors import IntegrityError
from kvplugin.policies.eviction.base import (
    NO_CONTEXT,
    BlockContext,
    BlockInfo,
    EvictionPolicy,
    needs,
)
from kvplugin.policies.eviction.ranked_set import Rank, RankedSet

Protection = tuple[float, float]
"""How much a block is worth protecting; greater is more."""


class Protecting:
    """Saves blocks up to a budget; beyond it those worth least are victims.

    Subclasses say what is protected (`_protection`), and of which blocks that has
    changed (`_reconsider`).

    Args:
        inner: ranks the blocks. It hears of every insert and hit.
        max_share: most blocks saved, as a share of the pool.
    """

    needs_info = True
    needs_hits = True
    needs_steps = True

    def __init__(self, inner: EvictionPolicy, max_share: float) -> None:
        self._inner = inner
        self._max_share = max_share
        self._saved = RankedSet()
        """By (protection, serial number)."""
        self._due = RankedSet()
        """Saved and protected no longer, by serial number. Nothing more is saved while
        there are such blocks, so they are within the budget."""
        self._last_serial = 0
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
        while len(victims) < n:
            victims += self._next_victims(n - len(victims))
        self._save_no_longer(victims)
        self._lose_keys(victims)
        return victims

    def step(
        self, now: float, soon: Iterable[bytes], dropped: Mapping[bytes, int]
    ) -> None:
        self._inner.step(now, soon, dropped)

    def order(self) -> Iterator[int]:
        yield from self._due
        ranks = ((block, self._saved.rank_of(block)) for block in self._saved)
        saved = [(self._rank(block, rank[-1]), block) for block, rank in ranks]
        heapq.heapify(saved)
        for serial, block in enumerate(self._inner.order(), self._last_serial + 1):
            protection = self._protection(block)
            if protection is None:
                yield block
                continue
            heapq.heappush(saved, ((*protection, serial), block))
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
        """How a keyed block is protected now, None if it is not. A rise needs no
        notice (`_reconsider`)."""
        raise NotImplementedError

    def _lose_keys(self, ids: Sequence[int]) -> None:
        """These blocks are losing their keys."""

    def _save_now(self, block: int) -> None:
        """The block was saved."""

    def _save_no_longer(self, ids: Sequence[int]) -> None:
        """Those of the blocks that were saved come into use or are victims."""

    def _reconsider(self, ids: Iterable[int]) -> None:
        """The protection of these blocks has begun, fallen or ended; only of those
        that are saved it makes a difference now."""
        for block in ids:
            rank = self._saved.discard(block) or self._due.discard(block)
            if rank is None:
                continue
            protection = self._protection(block)
            if protection is None:
                self._due.put(block, rank[-1:])
            else:
                self._saved.put(block, (*protection, rank[-1]))

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

    def _next_victims(self, n: int) -> list[int]:
        """At most `n`; none if all that the inner policy chose are saved."""
        if self._due:
            return [self._due.pop()[1] for _ in range(min(n, len(self._due)))]
        if not len(self._inner):
            return [self._pop_least()[1] for _ in range(n)]
        victims = []
        for block in self._inner.victims(min(n, len(self._inner))):
            protection = self._protection(block)
            if protection is None:
                victims.append(block)
                continue
            self._last_serial += 1
            self._saved.put(block, (*protection, self._last_serial))
            self._save_now(block)
            if len(self._saved) > self._budget:
                victims.append(self._pop_least()[1])
        return victims

    def _rank(self, block: int, serial: float) -> Rank:
        protection = self._protection(block)
        if protection is None:
            raise IntegrityError(f"block {block} is saved and not protected")
        return (*protection, serial)

    def _pop_least(self) -> tuple[Rank, int]:
        """Take out the saved block worth least. Ranks are too low at most, so the
        first one that is true is the least."""
        while True:
            rank, block = self._saved.pop()
            true = self._rank(block, rank[-1])
            if true == rank:
                return rank, block
            self._saved.put(block, true)
