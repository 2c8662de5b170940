"""The requests that a worker knows, each in a row, kept from step to step.

The scheduler sends changes only (`SchedulerOutput`); a batch applies them: rows of
finished and preempted requests are filled by the last one, new requests go to the end,
and requests that are known but not scheduled in this step stand behind those that
are. Kernels so find the requests of a step in rows [0, n), and few rows move.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvplugin.errors import CapacityError, IntegrityError
from kvplugin.scheduler import SchedulerOutput
from kvplugin.scheduler.output import CachedRequestData
from kvplugin.worker.block_table import BlockTables, Entries


@dataclass(slots=True)
class WorkerRequest:
    """What a worker keeps of a request beside its rows of blocks."""

    req_id: str
    token_ids: list[int]
    """Prompt and output; the engine appends what it samples."""
    num_computed_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """The requests of one step, in the order of their rows."""

    requests: tuple[WorkerRequest, ...]
    num_computed: npt.NDArray[np.int32]
    """Tokens before the step, [requests]."""
    num_scheduled: npt.NDArray[np.int32]
    """Tokens of the step, drafts included, [requests]."""
    num_drafts: npt.NDArray[np.int32]
    """Drafts among them, the last ones, [requests]."""
    num_common_prefix_blocks: Sequence[int] = ()
    """Of each group the manager's leading blocks that all requests share."""

    def __len__(self) -> int:
        """The number of requests."""
        return len(self.requests)


@dataclass(frozen=True, slots=True)
class _Change:
    """What a step says of one request."""

    req_id: str
    entries: Entries | None
    """For its rows; None for nothing new."""
    num_computed: int
    token_ids: Sequence[int] | None = None
    """Of one whose rows are whole; None for one that goes on."""


class WorkerBatch:
    """The requests of a worker.

    Args:
        tables: block tables, empty; from now on the batch changes them.
    """

    def __init__(self, tables: BlockTables) -> None:
        self.tables = tables
        self.requests: list[WorkerRequest] = []
        """The request in each row."""
        self._rows: dict[str, int] = {}

    def __contains__(self, req_id: str) -> bool:
        """Whether this request has a row."""
        return req_id in self._rows

    def row(self, req_id: str) -> int:
        """Where this request is; `KeyError` if it has no row."""
        return self._rows[req_id]

    def apply(self, output: SchedulerOutput) -> StepBatch:
        """Take over a step of the scheduler, and tell who computes what.

        The tables are not committed. Nothing is changed if anything is raised.

        Raises:
            CapacityError: more requests than rows, or a request longer than
                `max_model_len`.
            IntegrityError: a scheduled request is not known, one comes twice, or goes
                back to tokens whose blocks fell out of a window.
            ValueError: block ids are no integers, or not a list a group.
        """
        gone = output.finished_req_ids | output.preempted_req_ids
        changes = self._changes(output, gone)
        # Sorted: every rank must come to the same order, and sets have one a process.
        for req_id in sorted(gone):
            self._remove(req_id)
        for change in changes:
            if change.token_ids is None:
                self._continue(change)
            else:
                self._place(change, change.token_ids)
        self._bring_to_front(output.num_scheduled_tokens.keys())
        return self._step(output)

    def _changes(
        self, output: SchedulerOutput, gone: AbstractSet[str]
    ) -> list[_Change]:
        """What becomes of requests, all checked before anything is changed."""
        known = self._rows.keys() - gone
        changes = [
            _Change(
                new.req_id,
                self.tables.expand(f"request {new.req_id}", new.block_ids),
                new.num_computed_tokens,
                new.token_ids,
            )
            for new in output.scheduled_new_reqs
        ]
        for cached in output.scheduled_cached_reqs:
            changes.append(self._cached(cached, known))
        names = [change.req_id for change in changes]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise IntegrityError(f"requests {twice} come twice in step {output.step}")
        if unknown := output.num_scheduled_tokens.keys() - known - set(names):
            raise IntegrityError(f"requests {sorted(unknown)} have no row")
        rows, arrivals = self.tables.max_num_reqs, [n for n in names if n not in known]
        if len(known) + len(arrivals) > rows:
            raise CapacityError(
                f"request {arrivals[rows - len(known)]} is one more than the {rows} "
                "rows of this worker: raise max_num_seqs of the worker to the "
                "scheduler's"
            )
        return changes

    def _cached(self, data: CachedRequestData, known: AbstractSet[str]) -> _Change:
        name, who = data.req_id, f"request {data.req_id}"
        computed, ids = data.num_computed_tokens, data.new_block_ids
        if data.resumed:
            if ids is None or data.token_ids is None:
                raise IntegrityError(f"{who} resumes without its blocks or its tokens")
            return _Change(name, self.tables.expand(who, ids), computed, data.token_ids)
        if name not in known:
            raise IntegrityError(f"{who} continues but has no row")
        row = self._rows[name]
        before = self.requests[row].num_computed_tokens
        if self.tables.sees_again(before, computed):
            raise IntegrityError(
                f"{who} goes back from {before} computed tokens to {computed}, but "
                "blocks fell out of its windows: it must resume with new rows"
            )
        if ids is None:
            return _Change(name, None, computed)
        lengths = self.tables.lengths(row)
        return _Change(name, self.tables.expand(who, ids, lengths), computed)

    def _remove(self, req_id: str) -> None:
        """Fill a request's row with the last one; it may have lost its row before."""
        row = self._rows.pop(req_id, None)
        if row is None:
            return
        last = self.requests.pop()
        self.tables.clear(row)
        if row < len(self.requests):
            self.requests[row] = last
            self._rows[last.req_id] = row
            self.tables.move(len(self.requests), row)

    def _place(self, change: _Change, token_ids: Sequence[int]) -> None:
        """A request with whole new rows, in its old row if it has one."""
        row = self._rows.get(change.req_id, len(self.requests))
        if change.entries is not None:
            self.tables.put(row, change.entries)
        request = WorkerRequest(change.req_id, list(token_ids), change.num_computed)
        self.requests[row : row + 1] = [request]
        self._rows[change.req_id] = row

    def _continue(self, change: _Change) -> None:
        row = self._rows[change.req_id]
        request = self.requests[row]
        if change.entries is not None:
            self.tables.put(row, change.entries)
        self.tables.skip(row, request.num_computed_tokens, change.num_computed)
        request.num_computed_tokens = change.num_computed

    def _bring_to_front(self, scheduled: AbstractSet[str]) -> None:
        """Give the leading rows to scheduled requests, with as few swaps as can be."""
        count = len(scheduled)
        late = [row for row in map(self._rows.__getitem__, scheduled) if row >= count]
        if not late:
            return
        for row in range(count):
            if self.requests[row].req_id not in scheduled:
                self._swap(row, late.pop())

    def _swap(self, one: int, other: int) -> None:
        requests = self.requests
        self.tables.swap(one, other)
        requests[one], requests[other] = requests[other], requests[one]
        for row in (one, other):
            self._rows[requests[row].req_id] = row

    def _step(self, output: SchedulerOutput) -> StepBatch:
        requests = tuple(self.requests[: len(output.num_scheduled_tokens)])
        drafts = output.scheduled_spec_decode_tokens
        return StepBatch(
            requests,
            _int32([request.num_computed_tokens for request in requests]),
            _int32([output.num_scheduled_tokens[r.req_id] for r in requests]),
            _int32([len(drafts.get(request.req_id, ())) for request in requests]),
            output.num_common_prefix_blocks,
        )

    def check(self) -> None:
        """Verify that every request is in its row, and that no other row has blocks.

        Raises:
            IntegrityError: one is not, or has.
        """
        found = {request.req_id: row for row, request in enumerate(self.requests)}
        if found != self._rows:
            raise IntegrityError(f"rows {self._rows} hold {found}")
        for group, table in enumerate(self.tables.tables):
            if table.blocks.array[len(found) :].any():
                raise IntegrityError(f"rows of no request have blocks in group {group}")


def _int32(values: list[int]) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)
