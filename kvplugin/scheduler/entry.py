"""A request as the scheduler keeps it."""

from collections import deque
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from kvplugin.policies.scheduling.configured import rank_of
from kvplugin.request import Request
from kvplugin.scheduler.rows import Rows


class Status(StrEnum):
    """Where a request stands.

    WAITING ──> RUNNING ──> FINISHED
      │  ▲         │
      │  └─preempt─┤
      ▼            │
    LOADING ──> LOADED       (its blocks are there, it does not run yet)
    """

    WAITING = "waiting"
    LOADING = "loading"
    LOADED = "loaded"
    RUNNING = "running"
    FINISHED = "finished"


class InFlight(NamedTuple):
    """A step's share of one request, whose output is not known yet."""

    step: int
    num_tokens: int
    drafts: int
    samples: bool
    """Whether a token will come of it: no known token is left to compute after it."""


class Lost(NamedTuple):
    """Blocks that a request gave back while a step in flight could write them."""

    step: int
    """The last one that does."""
    rows: Rows
    external: frozenset[int]
    """Those of them that a connector was to fill."""


@dataclass(eq=False)
class Entry:
    """A request and what the scheduler knows of it besides."""

    request: Request
    max_tokens: int
    """Tokens to generate at most."""
    stop_token_ids: frozenset[int] = frozenset()
    num_encoder_tokens: int = 0
    status: Status = Status.WAITING
    drafts: list[int] = field(default_factory=list)
    """Proposed after its last output. If a step was in flight by then they are stale:
    that step's output replaces them, and nothing is scheduled before."""
    in_flight: deque[InFlight] = field(default_factory=deque)
    discard_until: int = 0
    """Outputs of steps up to this one come of blocks that it lost: ignored."""
    lost: list[Lost] = field(default_factory=list)
    """Until that step has landed: then the blocks may be somebody else's."""
    external_blocks: frozenset[int] = frozenset()
    """Of its blocks those that a connector was to fill."""
    seen_by_workers: bool = False
    skips_external: bool = False
    """A load has failed: compute instead."""
    ended_with_drafts: bool = False
    """Whether its last step that has ended had drafts to verify."""
    num_cached_tokens: int = -1
    """Tokens that its first admission did not have to compute; -1 before."""

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def rank(self) -> tuple[int, float]:
        """Smaller goes first under the priority policy."""
        return rank_of(self.request)

    @property
    def live_in_flight(self) -> list[InFlight]:
        """Steps in flight whose output will count."""
        return [part for part in self.in_flight if part.step > self.discard_until]

    @property
    def num_placeholders(self) -> int:
        """Tokens that steps in flight will sample."""
        return sum(part.samples for part in self.live_in_flight)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far and under way."""
        return self.request.num_output_tokens + self.num_placeholders

    @property
    def waits_for_drafts(self) -> bool:
        """It drafts, and a step of it is in flight: where it stands afterwards, and
        which drafts come next, only that step's output says."""
        live = self.live_in_flight
        return bool(live) and (bool(self.drafts) or any(part.drafts for part in live))

    @property
    def num_settled_tokens(self) -> int:
        """Tokens whose KV is in its blocks, whatever steps in flight bring; accepted
        drafts behind the token that ended it do not count."""
        request = self.request
        settled = request.num_computed_tokens - request.num_in_flight_tokens
        return min(settled, request.num_tokens)

    @property
    def states_are_settled(self) -> bool:
        """Whether its last state is the one after these tokens, at the end of its row:
        a token that was taken in cannot be taken out again."""
        return not (self.live_in_flight or self.ended_with_drafts)

    @property
    def oldest_counts(self) -> bool:
        """Whether the output of its oldest step in flight will count."""
        ended = self.status is Status.FINISHED
        return not ended and self.in_flight[0].step > self.discard_until

    def was_promised(self, blocks: AbstractSet[int]) -> bool:
        """Whether a connector was to fill one of these blocks for it."""
        promised = self.external_blocks.union(*(lost.external for lost in self.lost))
        return not promised.isdisjoint(blocks)

    def take_off(self, step: int, num_tokens: int, drafts: int) -> None:
        """A step is put under way."""
        request = self.request
        request.num_computed_tokens += num_tokens
        settled = request.num_computed_tokens - drafts
        samples = settled >= request.num_tokens + self.num_placeholders
        self.in_flight.append(InFlight(step, num_tokens, drafts, samples))
        self.seen_by_workers, self.drafts = True, []
        self._count()

    def land(self) -> InFlight:
        """The oldest step under way has ended."""
        part = self.in_flight.popleft()
        self.ended_with_drafts = part.drafts > 0
        self.lost = [lost for lost in self.lost if lost.step > part.step]
        self._count()
        return part

    def lose_progress(self) -> None:
        """Its blocks are gone: begin anew, whatever steps in flight still bring."""
        if self.in_flight:
            self.discard_until = self.in_flight[-1].step
        self.drafts, self.external_blocks = [], frozenset()
        self.request.num_computed_tokens = 0
        self._count()

    def _count(self) -> None:
        self.request.num_in_flight_tokens = sum(
            part.num_tokens for part in self.live_in_flight
        )
