"""Who waits, in which order.

Any request can leave a queue at any time, and ten thousand may wait: nothing here looks
through all of them to find one.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import count

from kvplugin.scheduler.entry import Entry

Place = tuple[float, ...]
"""Smaller goes first; ends with a number that no other place has."""


class FirstComeFirstServed:
    """Arrivals queue up; who lost its blocks goes to the front."""

    def __init__(self) -> None:
        self._order: list[tuple[Place, Entry]] = []
        self._places: dict[Entry, Place] = {}
        self._tickets = count(1)

    def add(self, entry: Entry) -> None:
        """A new request."""
        self._insert(entry, next(self._tickets))

    def put_back(self, entry: Entry) -> None:
        """A request that was admitted before."""
        self._insert(entry, -next(self._tickets))

    def _insert(self, entry: Entry, ticket: int) -> None:
        place = self._places[entry] = (*self._rank(entry), ticket)
        insort(self._order, (place, entry))

    def _rank(self, entry: Entry) -> Place:
        return ()

    def remove(self, entry: Entry) -> None:
        """It was admitted, or ended."""
        place = self._places.pop(entry)
        del self._order[bisect_left(self._order, (place,))]

    def __iter__(self) -> Iterator[Entry]:
        """First to be admitted first; may change while it is iterated over."""
        return iter([entry for _, entry in self._order])

    def __len__(self) -> int:
        return len(self._order)


class ByPriority(FirstComeFirstServed):
    """The least `priority` goes first, earlier arrivals before later ones."""

    def _rank(self, entry: Entry) -> Place:
        return entry.rank


def make_queue(policy: str) -> FirstComeFirstServed:
    """The queue of a policy, see `SchedulerConfig.policy`."""
    return ByPriority() if policy == "priority" else FirstComeFirstServed()
