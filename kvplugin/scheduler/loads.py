"""Loads of external tokens: who waits for one, how long, and what came of it.

A load has two ends. Its *request* waits until the bytes are in, or until the deadline;
the *transfer* may go on after that, for nobody can stop it, and its blocks stay held
until every rank has reported (DESIGN section 5).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvplugin.scheduler.entry import Entry, Status
from kvplugin.scheduler.holds import Holds
from kvplugin.scheduler.rows import Rows


@dataclass(eq=False)
class Load:
    """One transfer into blocks of one request."""

    entry: Entry
    rows: Rows
    to_fill: frozenset[int]
    """Of its blocks those that have no valid bytes before."""
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
        self, holds: Holds, num_ranks: int, timeout_s: float, clock: Callable[[], float]
    ) -> None:
        self._holds = holds
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._clock = clock
        self._loads: dict[str, Load] = {}
        self.num_overdue_blocks = 0
        """Blocks that transfers which nobody waits for may still fill."""

    def __len__(self) -> int:
        """Transfers under way."""
        return len(self._loads)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._loads

    @property
    def any_awaited(self) -> bool:
        """Whether a request waits for one."""
        return not all(load.abandoned for load in self._loads.values())

    def start(self, entry: Entry, rows: Rows) -> None:
        """A connector was told to fill these rows of a request, which now waits."""
        entry.status = Status.LOADING
        deadline, ranks = self._clock() + self._timeout_s, set(range(self._num_ranks))
        load = Load(entry, rows, entry.external_blocks, deadline, ranks)
        self._loads[entry.id] = load

    def abandon(self, entry: Entry) -> None:
        """The request stops waiting: its blocks stay held until the transfer ends.
        To be called while the request still has its rows."""
        load = self._loads[entry.id]
        load.abandoned = True
        self.num_overdue_blocks += len(load.to_fill)
        self._holds.hold(("load", entry.id), load.rows)

    def overdue(self) -> Iterator[Entry]:
        """Requests that have waited too long."""
        now = self._clock()
        for load in list(self._loads.values()):
            if not load.abandoned and now >= load.deadline:
                yield load.entry

    def failed(self, request_id: str, blocks: Sequence[int]) -> frozenset[int]:
        """A rank says that blocks of a load hold no valid bytes.

        Returns:
            Blocks not to be trusted: these, and all that the load was to fill if none
            is named or another one than those.
        """
        named = frozenset(blocks)
        load = self._loads.get(request_id)
        if load is None:
            return named
        if not named or not named <= load.to_fill:
            named |= load.to_fill
        load.failed_blocks |= named & load.to_fill
        return named

    def reported(self, rank: int, request_id: str) -> Load | None:
        """A rank says that its part has ended.

        Returns:
            The load if that was the last rank and a request waits for it; None too
            for reports of loads that are not known, or came before.
        """
        load = self._loads.get(request_id)
        if load is None or rank not in load.waiting_for:
            return None
        load.waiting_for.remove(rank)
        if load.waiting_for:
            return None
        del self._loads[request_id]
        if load.abandoned:
            self.num_overdue_blocks -= len(load.to_fill)
            self._holds.release(("load", request_id))
            return None
        return load
