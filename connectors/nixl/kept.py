"""Leases that a client renews at one peer until it drops them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvplugin.connectors.nixl.wire import MAX_PAIRS, Renew, Renewed

MAX_KEPT: Final = 65_536
"""At a time. One more is not renewed, and ends by itself."""

Lease: TypeAlias = tuple[str, str]
"""(lease, reader)."""


@dataclass(slots=True)
class _Kept:
    every: float
    due: float


class KeptLeases:
    """When which lease is to be renewed. Times are those of the caller's clock."""

    def __init__(self) -> None:
        self._kept: dict[Lease, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._kept))

    def keep(self, lease: Lease, every: float, now: float) -> None:
        """Renew it every so many seconds from now on."""
        if len(self._kept) < MAX_KEPT or lease in self._kept:
            self._kept[lease] = _Kept(every, now + every)

    def drop(self, lease: Lease) -> None:
        """Renew it no longer, if it was kept."""
        self._kept.pop(lease, None)

    def next_time(self) -> float:
        """When one is due, infinity for never."""
        return min((kept.due for kept in self._kept.values()), default=float("inf"))

    def renewals(self, now: float) -> Iterator[tuple[Renew, float]]:
        """The renewals that are due, each with the seconds until the next one."""
        due = [lease for lease, kept in self._kept.items() if kept.due <= now]
        for start in range(0, len(due), MAX_PAIRS):
            leases = due[start : start + MAX_PAIRS]
            for lease in leases:
                self._kept[lease].due = now + self._kept[lease].every
            every = min(self._kept[lease].every for lease in leases)
            yield Renew(leases=leases), every

    def renewed(self, answer: Renewed) -> None:
        """Forget what is gone."""
        gone = set(answer.gone)
        for lease in list(self._kept):
            if lease[0] in gone:
                del self._kept[lease]
