"""Copies under way, as the scheduler half knows them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvplugin.connectors.offload.admissions import Admission
from kvplugin.connectors.offload.host_tier import Reservation
from kvplugin.connectors.offload.messages import BlockPairs, Completion, CopyOrder
from kvplugin.connectors.offload.requests import RequestState
from kvplugin.connectors.under_way import UnderWay

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

    def count(self, done: Completion) -> None:
        """Take in one rank's result."""
        self.error = self.error or done.error
        self.nbytes += done.nbytes
        self.seconds += done.seconds

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


class JobTable(UnderWay[Job]):
    """All jobs under way, and which of them take too long."""

    def order(
        self, state: RequestState, parts: list[BlockPairs], refusal: str = ""
    ) -> CopyOrder:
        """A fresh order."""
        return CopyOrder(self.new_id(), state.request.request_id, parts, refusal)

    def get(self, job_id: int) -> Job | None:
        """A job under way."""
        return self._pending.get(job_id)

    @property
    def awaited_loads(self) -> Iterator[LoadJob]:
        """Loads that some rank has not told the engine to have ended or failed."""
        return self.untold(self.of_kind(LoadJob))

    def of_kind(self, kind: type[J]) -> Iterator[J]:
        """Jobs of one kind, oldest first."""
        return (job for job in self if isinstance(job, kind))
