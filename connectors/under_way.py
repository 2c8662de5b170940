"""Orders that all ranks execute, until the last one has reported: which are under way,
and which take too long. A scheduler half's account, of copies as of reads."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from kvplugin.errors import IntegrityError


class Order(Protocol):
    """What ranks were told to do."""

    @property
    def id(self) -> int: ...
    @property
    def engine_ids(self) -> list[int]:
        """Blocks of the engine that it uses."""


class Done(Protocol):
    """How an order ended on one rank."""

    @property
    def id(self) -> int: ...


class RankReport(Protocol):
    """What one rank has to say."""

    @property
    def rank(self) -> int: ...
    @property
    def step(self) -> int:
        """Of the last plan it has executed; -1 if it was none."""

    @property
    def completions(self) -> Sequence[Done]: ...


class Pending(Protocol):
    """An order, and the ranks that still have to report it."""

    @property
    def order(self) -> Order: ...
    @property
    def ranks(self) -> set[int]: ...
    @property
    def started(self) -> float: ...
    def count(self, done: Any) -> None:
        """Take in one rank's result."""


class CanBeGivenUp(Protocol):
    """A load whose request may be told that it failed before it has ended."""

    @property
    def given_up_by(self) -> int | None:
        """Number of the plan whose executors tell it."""


P = TypeVar("P", bound=Pending)
L = TypeVar("L", bound=CanBeGivenUp)


class UnderWay(Generic[P]):
    """All orders under way, and which of them take too long.

    Args:
        ranks: that report each order.
        clock: monotonic seconds.
        timeout: seconds after which an order is overdue.
    """

    def __init__(self, ranks: int, clock: Callable[[], float], timeout: float) -> None:
        self.overdue_blocks = 0
        """Engine blocks of overdue orders."""
        self._ranks = ranks
        self._clock = clock
        self._timeout = timeout
        self._num_ids = 0
        self._pending: dict[int, P] = {}
        self._by_age: deque[int] = deque()
        self._overdue: set[int] = set()
        self._executed: dict[int, int] = {}

    def __iter__(self) -> Iterator[P]:
        """Oldest first."""
        return iter(self._pending.values())

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def num_in_time(self) -> int:
        """Orders that are not overdue."""
        return len(self._pending) - len(self._overdue)

    def new_id(self) -> int:
        """Of the next order: above all before."""
        self._num_ids += 1
        return self._num_ids - 1

    def new_ranks(self) -> set[int]:
        """All that have to report an order."""
        return set(range(self._ranks))

    def add(self, pending: P) -> None:
        """The order is given out."""
        self._pending[pending.order.id] = pending
        self._by_age.append(pending.order.id)

    def ended(self, report: RankReport) -> Iterator[P]:
        """Take a report; orders of which it was the last one missing. Late, repeated
        and foreign ones change nothing."""
        if not 0 <= report.rank < self._ranks:
            return
        latest = self._executed.get(report.rank, -1)
        self._executed[report.rank] = max(latest, report.step)
        for done in report.completions:
            pending = self._pending.get(done.id)
            if pending is None or report.rank not in pending.ranks:
                continue
            pending.ranks.remove(report.rank)
            pending.count(done)
            if not pending.ranks:
                self._remove(pending)
                yield pending

    def _remove(self, pending: P) -> None:
        order = pending.order
        del self._pending[order.id]
        if order.id in self._overdue:
            self._overdue.remove(order.id)
            self.overdue_blocks -= len(order.engine_ids)

    def pop_overdue(self) -> list[P]:
        """Orders whose deadline has passed since the last call, oldest first."""
        latest = self._clock() - self._timeout
        late = []
        while self._by_age:
            pending = self._pending.get(self._by_age[0])
            if pending is not None and pending.started > latest:
                break
            self._by_age.popleft()
            if pending is not None:
                self._overdue.add(pending.order.id)
                self.overdue_blocks += len(pending.order.engine_ids)
                late.append(pending)
        return late

    def untold(self, loads: Iterable[L]) -> Iterator[L]:
        """Of these loads under way, those that some rank has not told the engine to
        have ended or failed."""
        known = len(self._executed) == self._ranks
        executed = min(self._executed.values()) if known else -1
        for load in loads:
            if load.given_up_by is None or load.given_up_by > executed:
                yield load

    def check(self) -> None:
        """Verify the account of overdue orders.

        Raises:
            IntegrityError: it is wrong.
        """
        late = (self._pending[id_] for id_ in self._overdue)
        blocks = sum(len(pending.order.engine_ids) for pending in late)
        if blocks != self.overdue_blocks:
            raise IntegrityError(
                f"{self.overdue_blocks} blocks are said to be overdue, {blocks} are"
            )
