"""Who waits, in which order, and who loses its blocks first."""

from bisect import insort
from collections.abc import Iterator, Sequence

from kvplugin.scheduler.entry import Entry


class FirstComeFirstServed:
    """Arrivals queue up; who lost its blocks goes to the front."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def add(self, entry: Entry) -> None:
        """A new request."""
        self._entries.append(entry)

    def put_back(self, entry: Entry) -> None:
        """A request that was admitted before."""
        self._entries.insert(0, entry)

    def remove(self, entry: Entry) -> None:
        """It was admitted, or ended."""
        self._entries.remove(entry)

    def __iter__(self) -> Iterator[Entry]:
        """First to be admitted first; may change while it is iterated over."""
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def victim(self, candidates: Sequence[Entry]) -> Entry:
        """Who loses its blocks: the one admitted last."""
        return candidates[-1]


class ByPriority(FirstComeFirstServed):
    """The least `priority` goes first, earlier arrivals before later ones."""

    def add(self, entry: Entry) -> None:
        insort(self._entries, entry, key=lambda other: other.rank)

    put_back = add

    def victim(self, candidates: Sequence[Entry]) -> Entry:
        """The one that would be admitted last."""
        return max(candidates, key=lambda entry: entry.rank)


def make_queue(policy: str) -> FirstComeFirstServed:
    """The queue of a policy, see `SchedulerConfig.policy`."""
    return ByPriority() if policy == "priority" else FirstComeFirstServed()
