"""Holding: a request's own chunks stay in host memory until all of them are there."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeAlias

from kvplugin.connectors.offload.host_tier import HostTier

_Held: TypeAlias = tuple[int, int, int]
"""(tokens up to its end, group, slot): ordered as what is held may leave, last first.
Plain tuples: a long prompt has tens of thousands."""


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

    def hold(self, ends: Iterable[int], group: int, slots: Sequence[int]) -> None:
        """Reference chunks that are there or being written.

        Args:
            ends: tokens up to the end of each.
            group: whose they are.
            slots: where they are.
        """
        if slots:
            self._tier.hold(group, slots)
            self.take(ends, group, slots)

    def take(self, ends: Iterable[int], group: int, slots: Sequence[int]) -> None:
        """Take over references to chunks, see `hold`."""
        self._held += _held(ends, group, slots)

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
        tail += _held(ends, group, slots)
        is_whole = {end for end, _, _ in tail}.issuperset(needed)
        first = needed.start if is_whole else 0
        self._tails[group] = [one for one in tail if one[0] >= first]
        gone = sorted((one for one in tail if one[0] < first), reverse=True)
        self._tier.release(group, [slot for _, _, slot in gone])

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
        return ((group, slot) for _, group, slot in every)

    def _release_if_over(self) -> None:
        if not (self._is_open or self._stores):
            self._release()

    def _release(self) -> None:
        held = [*self._held, *chain.from_iterable(self._tails.values())]
        self._held, self._tails = [], {}
        held.sort(reverse=True)
        self._tier.release_all((group, slot) for _, group, slot in held)


def _held(ends: Iterable[int], group: int, slots: Sequence[int]) -> Iterator[_Held]:
    return ((end, group, slot) for end, slot in zip(ends, slots, strict=True))
