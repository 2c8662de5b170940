"""What a worker knows of its requests, from `SchedulerOutput`s alone."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvplugin.contract import GroupKind
from kvplugin.scheduler.output import (
    BlockIds,
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)
from kvplugin.testing.rules import GroupModel, Identity
from kvplugin.testing.slots import ContentError, Row
from kvplugin.testing.toy_states import StateRow, StateStep


@dataclass(slots=True)
class WorkerRequest:
    """A request as the worker knows it."""

    id: str
    identity: Identity
    tokens: list[int]
    histories: list[int]
    rows: BlockIds | None = None
    """None: it was preempted."""
    states: dict[int, StateRow] = field(default_factory=dict)
    encoded: bool = False
    """Whether its encoder's tokens were written."""


@dataclass(slots=True)
class Part:
    """One request's part of a step."""

    request: WorkerRequest
    step: StateStep
    drafts: Sequence[int]
    rows: list[Row]
    samples: bool
    folds: dict[int, list[int]] = field(default_factory=dict)
    """What each token that may be followed by a new one read, by group."""
    is_wrong: bool = False
    """It has read bytes of a failed load."""


@dataclass(slots=True)
class InFlight:
    """A step, and what was so when it was scheduled and may not be so any more."""

    output: SchedulerOutput
    grants: list[int]
    identities: dict[str, Identity]
    """Of requests that get new rows."""
    tokens: dict[str, list[int]]
    """Of resumed requests, as the scheduler knew them."""


class Requests:
    """All requests that a worker knows.

    Args:
        groups: the KV cache groups.
    """

    def __init__(self, groups: Sequence[GroupModel]) -> None:
        self._groups = groups
        self._requests: dict[str, WorkerRequest] = {}

    @property
    def ids(self) -> list[str]:
        """Of all requests."""
        return list(self._requests)

    def hear(self, step: InFlight) -> None:
        """Take in what a step says of its requests."""
        output = step.output
        for request_id in output.finished_req_ids:
            self._requests.pop(request_id, None)
        for request_id in output.preempted_req_ids:
            if request_id in self._requests:
                self._requests[request_id].rows = None
        for new in output.scheduled_new_reqs:
            self._admit(step, new, new.token_ids, new.block_ids)
        for cached in output.scheduled_cached_reqs:
            self._go_on(step, cached)

    def _admit(
        self,
        step: InFlight,
        data: NewRequestData | CachedRequestData,
        tokens: Sequence[int],
        rows: BlockIds,
    ) -> None:
        identity = step.identities[data.req_id]
        request = WorkerRequest(
            data.req_id,
            identity,
            list(tokens),
            identity.histories(tokens),
            tuple(map(list, rows)),
        )
        for group in self._groups:
            if group.kind is GroupKind.MAMBA:
                state = request.states[group.index] = StateRow(group)
                state.admitted(data.num_computed_tokens)
        self._requests[data.req_id] = request

    def _go_on(self, step: InFlight, data: CachedRequestData) -> None:
        request = self._requests.get(data.req_id)
        if request is None:
            raise ContentError(f"the worker does not know request {data.req_id!r}")
        if data.resumed:
            rows = data.new_block_ids or tuple([] for _ in self._groups)
            tokens = step.tokens.get(data.req_id, request.tokens)
            self._admit(step, data, tokens, rows)
            return
        if request.rows is None:
            raise ContentError(f"request {data.req_id!r} was preempted, not resumed")
        for row, new in zip(request.rows, data.new_block_ids or (), strict=False):
            row += new

    def part(self, step: InFlight, request_id: str, n: int) -> Part:
        """A request's part of a step, `n` tokens.

        Raises:
            ContentError: the worker lacks its rows, or tokens that it is to compute.
        """
        request = self._requests.get(request_id)
        if request is None or request.rows is None:
            raise ContentError(f"request {request_id!r} is scheduled without rows")
        output = step.output
        start = _num_computed(output, request_id)
        drafts = output.scheduled_spec_decode_tokens.get(request_id, ())
        known = start + n - len(drafts)
        total = len(request.tokens)
        if known > total or (drafts and known < total):
            raise ContentError(
                f"request {request_id!r}: tokens {start} to {start + n} with "
                f"{len(drafts)} drafts are scheduled, the worker knows {total}"
            )
        histories = request.histories[:known]
        histories += request.identity.extend(histories, drafts)
        return Part(
            request,
            StateStep(start, known, start + n, histories),
            drafts,
            [Row(request_id, row, step.grants) for row in request.rows],
            samples=known == total,
        )


def _num_computed(output: SchedulerOutput, request_id: str) -> int:
    data: Iterable[NewRequestData | CachedRequestData] = (
        *output.scheduled_new_reqs,
        *output.scheduled_cached_reqs,
    )
    computed: Mapping[str, int] = {d.req_id: d.num_computed_tokens for d in data}
    return computed[request_id]
