"""Copies under way, as the scheduler half knows them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvplugin.connectors.offload.host_tier import Reservation
from kvplugin.connectors.offload.messages import Completion, CopyOrder
from kvplugin.contract import RequestView


@dataclass(slots=True)
class RequestState:
    """What the scheduler half remembers of one request.

    Block ids belong to one admission: a preempted request gets a new row, while jobs
    of the old one go on with references of their own.
    """

    request: RequestView
    row: list[int] = field(default_factory=list)
    """Engine blocks of the present admission; empty if nothing of it is stored."""
    admitted_after: int = -1
    """Number of the last plan before the present admission."""
    next_chunk: int = 0
    """Chunks before this one need no store in this admission."""
    has_hole: bool = False
    """The offload policy refused a chunk of this admission: what comes after it could
    never be hit."""
    wait_until: float | None = None
    """When a lookup stops waiting for transfers of others."""
    load_failed: bool = False
    """A load failed: this request computes the rest itself."""
    stores: set[int] = field(default_factory=set)
    """Ids of its store jobs under way."""


@dataclass(slots=True)
class Job:
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
        """All engine blocks of the job, in request order a group."""
        return [block for part in self.order.parts for block in part.engine_ids]

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


@dataclass(slots=True)
class StoreJob(Job):
    """Engine to host. The engine blocks are referenced until it ends."""

    reservation: Reservation = field(kw_only=True)

    @property
    def slots(self) -> Sequence[int]:
        """Host slots being written."""
        return self.reservation.slots


@dataclass(slots=True)
class LoadJob(Job):
    """Host to engine. The host slots are pinned until it ends."""

    slots: Sequence[int] = field(kw_only=True)
    keys: Sequence[bytes] = field(kw_only=True)
    num_tokens: int = field(kw_only=True)
