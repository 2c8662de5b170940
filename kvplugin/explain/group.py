"""One group of a lookup: which lengths it accepts, and why it refuses the others."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from kvplugin.explain.history import LookupHistory, block_identity, fingerprints
from kvplugin.explain.result import Loss, LostHit
from kvplugin.managers import SingleTypeKVCacheManager
from kvplugin.request import RequestLike

_KEEPS_SOME: Final = {
    "mamba": LostHit.MISSING_STATE,
    "sliding_window": LostHit.WINDOW_GAP,
    "chunked_local_attention": LostHit.WINDOW_GAP,
}
"""By kind of group: what it means that a block is not there although its prefix was
computed. Other kinds keep every block until it is evicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """What is the same for all groups."""

    request: RequestLike
    unit: int
    """Every hit is a multiple of this many tokens."""
    hit: int
    """Tokens of the hit."""
    found: int
    """Tokens that all groups agreed on; more than the hit if not all was proven."""
    top: int
    """Tokens of the longest hit that the request could have had."""
    drops: bool
    """Whether lengths without a cached block behind them are refused, for drafts."""
    history: LookupHistory | None


class GroupLookup:
    """A group's view of a lookup; computes what it is asked for."""

    def __init__(
        self, group: int, manager: SingleTypeKVCacheManager, lookup: Lookup
    ) -> None:
        self.group = group
        self.manager = manager
        self.size = manager.block_size
        self._lookup = lookup
        self._hashes = list(manager.coarse_hashes(lookup.request.block_hashes))
        self._index = manager.block_pool.cached_blocks(group)

    @property
    def name(self) -> str:
        """For humans."""
        return f"group {self.group} {self.manager.kind}"

    # -- lengths -------------------------------------------------------------------

    def longest(self, max_length: int, unit: int, drops: bool) -> int:
        """Tokens of the longest hit of this group alone."""
        rows = self.manager.find_longest_cache_hit(
            self._hashes, max_length, (self.group,), unit, drops
        )
        return len(rows[0]) * self.size

    @cached_property
    def accepts(self) -> frozenset[int]:
        """Multiples of the unit, longer than the hit, that the group accepts."""
        if not self._lookup.drops:
            return self.accepts_without_drafts
        return frozenset(self._accepted(drops=True))

    @cached_property
    def accepts_without_drafts(self) -> frozenset[int]:
        """The same if there were no draft model."""
        return frozenset(self._accepted(drops=False))

    def _accepted(self, drops: bool) -> Iterator[int]:
        unit, hit = self._lookup.unit, self._lookup.hit
        length = self._lookup.top
        while length > hit:
            length = self.longest(length, unit, drops)
            if self.manager.hits_are_downward_closed:
                yield from range(length, hit, -unit)
                return
            if length > hit:
                yield length
                length -= unit

    @cached_property
    def computed_until(self) -> int:
        """Tokens of the longest prefix of the request that left a trace in this group:
        hashes are chained, so whoever made the last block computed all before it."""
        for i in range(len(self._hashes) - 1, -1, -1):
            if not self._is_hole(i) or self._how_lost(i) is not None:
                return (i + 1) * self.size
        return 0

    # -- reasons -------------------------------------------------------------------

    def out_of_reach(self) -> list[Loss]:
        """What no cache could serve, behind the longest possible hit."""
        end = self._lookup.request.num_tokens
        last = (end - 1) // self.size * self.size
        tail = LostHit.PARTIAL_BLOCK if end % self.size else LostHit.LAST_TOKEN
        return [
            self._loss(self._lookup.top, last, LostHit.ROUNDING),
            self._loss(last, end, tail),
        ]

    def refusal(self, length: int, computed_until: int) -> list[Loss]:
        """Why the group refuses `length`: losses that cover the unit before it.

        Args:
            length: a multiple of the unit that is not in `accepts`.
            computed_until: of all groups the largest.
        """
        start = length - self._lookup.unit
        if length in self.accepts_without_drafts:
            return [self._loss(start, length, LostHit.DRAFT_DROP)]
        rounded = start
        if self.size < self._lookup.unit:
            rounded = max(self.longest(length, self.size, drops=False), start)
        return [
            self._loss(start, rounded, LostHit.ROUNDING),
            *(
                self._missing(block, length, computed_until)
                for block in range(rounded // self.size, length // self.size)
            ),
        ]

    def limited(self, length: int, by: Sequence["GroupLookup"]) -> Loss:
        """The unit before `length`, which the group accepts and others do not."""
        names = ", ".join(group.name for group in by)
        return self._loss(
            length - self._lookup.unit, length, LostHit.OTHER_GROUP, names
        )

    def accepted_in_vain(self, length: int) -> Loss:
        """The unit before `length`, which every group accepts. Found and not hit: it
        was not proven. Not found: 0.19.1 shortened it for drafts."""
        found = length <= self._lookup.found
        reason = LostHit.UNPROVEN if found else LostHit.DRAFT_DROP
        return self._loss(length - self._lookup.unit, length, reason)

    # -- inside --------------------------------------------------------------------

    def _missing(self, block: int, length: int, computed_until: int) -> Loss:
        """Why `block` cannot be part of a hit of `length` tokens."""
        start, stop = block * self.size, (block + 1) * self.size
        hole = self._hole(block, length)
        if hole is None:
            return self._loss(
                start, stop, LostHit.NEVER_CACHED_OR_EVICTED, "refused by the manager"
            )
        reason, detail = self._why_missing(hole, computed_until)
        if hole != block:
            where = f"tokens [{hole * self.size}, {(hole + 1) * self.size}) are missing"
            detail = f"{where}, {detail}" if detail else where
        return self._loss(start, stop, reason, detail)

    def _hole(self, block: int, length: int) -> int | None:
        """The missing block because of which `length` is refused: `block` itself, or
        the first that the next token would read."""
        last = length // self.size
        skipped = max(self.manager.get_num_skipped_tokens(length), 0)
        first = min(skipped // self.size, last - 1)
        at = bisect_left(self._holes, first)
        if at == len(self._holes) or self._holes[at] >= last:
            return None
        return block if block >= first and self._is_hole(block) else self._holes[at]

    @cached_property
    def _holes(self) -> list[int]:
        return [i for i in range(self._lookup.top // self.size) if self._is_hole(i)]

    def _is_hole(self, block: int) -> bool:
        return block >= len(self._hashes) or self._hashes[block] not in self._index

    def _why_missing(self, block: int, computed_until: int) -> tuple[LostHit, str]:
        if block >= len(self._hashes):
            return LostHit.UNHASHED, ""
        how = self._how_lost(block)
        if how is not None:
            return LostHit.EVICTED, how
        # Before other identities: this one computed the prefix, so it is not at fault.
        kind = self.manager.kind
        if (block + 1) * self.size <= computed_until and kind in _KEEPS_SOME:
            return _KEEPS_SOME[kind], ""
        history = self._lookup.history
        if history is None:
            return LostHit.NEVER_CACHED_OR_EVICTED, "unknown: attach a LookupHistory"
        fields = history.other_identity(
            self.group,
            self._fingerprints[block],
            block_identity(self._lookup.request, (block + 1) * self.size),
        )
        if fields:
            return LostHit.OTHER_IDENTITY, f"differs in {' and '.join(fields)}"
        return LostHit.NEVER_CACHED, ""

    def _how_lost(self, block: int) -> str | None:
        history = self._lookup.history
        if history is None:
            return None
        return history.how_lost(self.group, self._hashes[block])

    @cached_property
    def _fingerprints(self) -> list[bytes]:
        return fingerprints(self._lookup.request, self.size, len(self._hashes))

    def _loss(self, start: int, stop: int, reason: LostHit, detail: str = "") -> Loss:
        return Loss(start, stop, reason, self.group, detail)
