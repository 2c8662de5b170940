"""Loads of external tokens: who waits for one, how long, and what came of it.

A load has two ends. Its *request* waits until the bytes are in, or until the deadline;
the *transfer* may go on after that, for nobody can stop it, and its blocks stay held
until every rank has reported (DESIGN section 5).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvplugin.scheduler.entry import Entry, Status
from kvplugin.scheduler.holds import Holds


@dataclass(eq=False)
class Load:
    """One transfer into blocks of one request."""

    entry: Entry
    rows: tuple[list[int], ...]
    deadline: float
    waiting_for: set[int]
    """Ranks that have not reported."""
    failed_blocks: set[int] = field(default_factory=set)
    abandoned: bool = False
    """Nobody waits for it any more."""


class Loads:
    """All transfers that have not ended on every rank.

    Args:
        holds: keeps blocks of abandoned loads.
        num_ranks: reports that end a load.
        timeout_s: from start to deadline.
        clock: seconds.
    """

    def __init__(
        self,
        holds: Holds,
        num_ranks: int,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._holds = holds
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._clock = clock
        self._loads: dict[str, Load] = {}

    def __len__(self) -> int:
        """Transfers under way."""
        return len(self._loads)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._loads

    @property
    def num_overdue_blocks(self) -> int:
        """Blocks held for transfers that nobody waits for."""
        overdue = (load for load in self._loads.values() if load.abandoned)
        return len({block for load in overdue for row in load.rows for block in row})

    def start(self, entry: Entry, rows: Sequence[Sequence[int]]) -> None:
        """A connector was told to fill these rows of a request, which now waits."""
        entry.status = Status.LOADING
        self._loads[entry.id] = Load(
            entry,
            tuple(map(list, rows)),
            self._clock() + self._timeout_s,
            set(range(self._num_ranks)),
        )

    def abandon(self, entry: Entry) -> None:
        """The request stops waiting: its blocks stay held until the transfer ends.
        To be called while the request still has its rows."""
        load = self._loads[entry.id]
        load.abandoned = True
        self._holds.hold(("load", entry.id), load.rows)

    def overdue(self) -> Iterator[Entry]:
        """Requests that have waited too long."""
        now = self._clock()
        for load in list(self._loads.values()):
            if not load.abandoned and now >= load.deadline:
                yield load.entry

    def reported(
        self, rank: int, request_id: str, failed_blocks: Sequence[int]
    ) -> Load | None:
        """A rank says that its part has ended.

        Returns:
            The load if that was the last rank and a request waits for it; None too
            for reports of loads that are not known, or came before.
        """
        load = self._loads.get(request_id)
        if load is None or rank not in load.waiting_for:
            return None
        load.waiting_for.remove(rank)
        load.failed_blocks.update(failed_blocks)
        if load.waiting_for:
            return None
        del self._loads[request_id]
        if load.abandoned:
            self._holds.release(("load", request_id))
            return None
        return load
