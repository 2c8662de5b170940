"""Holding: a request's own chunks stay in host memory until all of them are there."""

from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from operator import attrgetter
from typing import NamedTuple

from kvplugin.connectors.offload.host_tier import HostTier


class _Held(NamedTuple):
    end: int
    group: int
    slot: int


class Holding:
    """References to the chunks of one admission of a request.

    A prefix is hit from its start, so no dense chunk of it should leave before the one
    behind it. While more are being stored, the earlier ones are therefore not evicted.
    Nor is what the last boundary needs of windows and states: without it, all the rest
    would be of no use. In the end all of them are released at once, tail first.
    """

    def __init__(self, tier: HostTier) -> None:
        self._tier = tier
        self._held: list[_Held] = []
        self._tails: dict[int, list[_Held]] = {}
        self._stores = 0
        self._is_open = True

    def store_began(self) -> None:
        """More chunks are on their way."""
        self._stores += 1

    def store_ended(self) -> None:
        """They have arrived, and were `take`n, or have not."""
        self._stores -= 1
        self._release_if_over()

    def hold(self, end: int, group: int, slot: int) -> None:
        """Reference a chunk that is there or being written.

        Args:
            end: tokens up to its end.
            group: whose it is.
            slot: where it is.
        """
        self._tier.hold(group, [slot])
        self._held.append(_Held(end, group, slot))

    def take(self, ends: Sequence[int], group: int, slots: Sequence[int]) -> None:
        """Take over references to chunks, see `hold`."""
        for end, slot in zip(ends, slots, strict=True):
            self._held.append(_Held(end, group, slot))

    def take_tail(
        self, ends: Sequence[int], group: int, slots: Sequence[int], needed: range
    ) -> None:
        """Take over references to blocks of a group that is not dense.

        Args:
            ends: as of `take`.
            group: whose they are.
            slots: where they are.
            needed: ends of the blocks that the new boundary needs: if they are there,
                those before are released.
        """
        tail = self._tails.pop(group, [])
        tail += [_Held(end, group, s) for end, s in zip(ends, slots, strict=True)]
        is_whole = {one.end for one in tail}.issuperset(needed)
        first = needed.start if is_whole else 0
        self._tails[group] = [one for one in tail if one.end >= first]
        gone = sorted((one for one in tail if one.end < first), reverse=True)
        self._tier.release(group, [one.slot for one in gone])

    def close(self) -> None:
        """Nothing more will be stored: release when all stores have ended."""
        self._is_open = False
        self._release_if_over()

    def abandon(self) -> None:
        """Release at once: what is held cannot be hit any more."""
        self._is_open = False
        self._release()

    @property
    def is_over(self) -> bool:
        """Whether nothing is held, nor will be."""
        return not (self._is_open or self._stores or self._held or self._tails)

    def uses(self) -> Iterator[tuple[int, int]]:
        """(group, slot) of each reference."""
        every = chain(self._held, *self._tails.values())
        return ((held.group, held.slot) for held in every)

    def _release_if_over(self) -> None:
        if not (self._is_open or self._stores):
            self._release()

    def _release(self) -> None:
        held = [*self._held, *chain.from_iterable(self._tails.values())]
        self._held, self._tails = [], {}
        held.sort(reverse=True)
        for group, run in groupby(held, attrgetter("group")):
            self._tier.release(group, [one.slot for one in run])
