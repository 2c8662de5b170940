"""Copies under way, as the scheduler half knows them."""

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvplugin.connectors.offload.admissions import Admission
from kvplugin.connectors.offload.host_tier import Reservation
from kvplugin.connectors.offload.messages import (
    BlockPairs,
    Completion,
    CopyOrder,
    Report,
)
from kvplugin.connectors.offload.requests import RequestState
from kvplugin.errors import IntegrityError

J = TypeVar("J", bound="Job")


@dataclass(slots=True)
class Job(ABC):
    """A copy order and the ranks that still have to report it."""

    order: CopyOrder
    state: RequestState
    ranks: set[int]
    started: float
    error: str = ""
    nbytes: int = 0
    seconds: float = 0.0

    @property
    def engine_ids(self) -> list[int]:
        """As of its order."""
        return self.order.engine_ids

    def report(self, rank: int, done: Completion) -> bool:
        """One rank's result.

        Returns:
            True when it was the last one missing; a second report of a rank is
            ignored.
        """
        if rank not in self.ranks:
            return False
        self.ranks.remove(rank)
        self.error = self.error or done.error
        self.nbytes += done.nbytes
        self.seconds += done.seconds
        return not self.ranks

    @abstractmethod
    def uses(self) -> Iterator[tuple[int, int]]:
        """(group, host slot) of each reference that the job has."""


@dataclass(slots=True)
class StoreJob(Job):
    """Engine to host. The engine blocks are referenced until it ends."""

    reservations: Sequence[Reservation] = field(kw_only=True)
    admission: Admission = field(kw_only=True)
    """Of which it stores, over by now or not."""
    frees: bool = False
    """Its request has given its blocks back since: they are free when it ends."""

    def uses(self) -> Iterator[tuple[int, int]]:
        """Slots being written."""
        for reservation in self.reservations:
            for slot in reservation.slots:
                yield reservation.cut.index, slot


@dataclass(slots=True)
class LoadJob(Job):
    """Host to engine. The host slots are pinned until it ends."""

    slots: dict[int, list[int]] = field(kw_only=True)
    """By group."""
    keys: Sequence[bytes] = field(kw_only=True)
    num_tokens: int = field(kw_only=True)
    given_up_by: int | None = None
    """Number of the plan whose executors tell its request that it failed; the engine's
    blocks are referenced until it really ends."""

    def uses(self) -> Iterator[tuple[int, int]]:
        """Slots being read."""
        for group, slots in self.slots.items():
            for slot in slots:
                yield group, slot


class JobTable:
    """All jobs under way, and which of them take too long.

    Args:
        ranks: that report each job.
        clock: monotonic seconds.
        timeout: seconds after which a job is overdue.
    """

    def __init__(self, ranks: int, clock: Callable[[], float], timeout: float) -> None:
        self.overdue_blocks = 0
        """Engine blocks of overdue jobs."""
        self._ranks = ranks
        self._clock = clock
        self._timeout = timeout
        self._ids = itertools.count()
        self._jobs: dict[int, Job] = {}
        self._by_age: deque[int] = deque()
        self._overdue: set[int] = set()
        self._executed: dict[int, int] = {}

    def __iter__(self) -> Iterator[Job]:
        """Oldest first."""
        return iter(self._jobs.values())

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def num_in_time(self) -> int:
        """Jobs that are not overdue."""
        return len(self._jobs) - len(self._overdue)

    def order(
        self, state: RequestState, parts: list[BlockPairs], refusal: str = ""
    ) -> CopyOrder:
        """A fresh order."""
        return CopyOrder(next(self._ids), state.request.request_id, parts, refusal)

    def new_ranks(self) -> set[int]:
        """All that have to report a job."""
        return set(range(self._ranks))

    def get(self, job_id: int) -> Job | None:
        """A job under way."""
        return self._jobs.get(job_id)

    def add(self, job: Job) -> None:
        """The job is given out."""
        self._jobs[job.order.id] = job
        self._by_age.append(job.order.id)

    def ended(self, report: Report) -> Iterator[Job]:
        """Take a report; jobs of which it was the last one missing. Late and repeated
        ones change nothing."""
        latest = self._executed.get(report.rank, -1)
        self._executed[report.rank] = max(latest, report.step)
        for done in report.completions:
            job = self._jobs.get(done.id)
            if job is not None and job.report(report.rank, done):
                del self._jobs[done.id]
                if done.id in self._overdue:
                    self._overdue.remove(done.id)
                    self.overdue_blocks -= len(job.engine_ids)
                yield job

    def pop_overdue(self) -> list[Job]:
        """Jobs whose deadline has passed since the last call, oldest first."""
        latest = self._clock() - self._timeout
        late = []
        while self._by_age:
            job = self._jobs.get(self._by_age[0])
            if job is not None and job.started > latest:
                break
            self._by_age.popleft()
            if job is not None:
                self._overdue.add(job.order.id)
                self.overdue_blocks += len(job.engine_ids)
                late.append(job)
        return late

    @property
    def awaited_loads(self) -> Iterator[LoadJob]:
        """Loads that some rank has not told the engine to have ended or failed."""
        known = len(self._executed) == self._ranks
        executed = min(self._executed.values()) if known else -1
        for job in self.of_kind(LoadJob):
            if job.given_up_by is None or job.given_up_by > executed:
                yield job

    def of_kind(self, kind: type[J]) -> Iterator[J]:
        """Jobs of one kind, oldest first."""
        return (job for job in self._jobs.values() if isinstance(job, kind))

    def check(self) -> None:
        """Verify the account of overdue jobs.

        Raises:
            IntegrityError: it is wrong.
        """
        blocks = sum(len(self._jobs[id_].engine_ids) for id_ in self._overdue)
        if blocks != self.overdue_blocks:
            raise IntegrityError(
                f"{self.overdue_blocks} blocks are said to be overdue, {blocks} are"
            )
