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
from kvplugin.scheduler.output import BlockIds, CachedRequestData, NewRequestData
from kvplugin.worker.block_table import BlockTables


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

        The tables are not committed.

        Raises:
            CapacityError: more requests than rows, or a request longer than
                `max_model_len`.
            IntegrityError: a scheduled request is not known.
        """
        # Sorted: every rank must come to the same order, and sets have one a process.
        for req_id in sorted(output.finished_req_ids | output.preempted_req_ids):
            self._remove(req_id)
        for new in output.scheduled_new_reqs:
            self._place(new, new.block_ids, new.token_ids)
        for cached in output.scheduled_cached_reqs:
            self._continue(cached)
        scheduled = output.num_scheduled_tokens
        unknown = scheduled.keys() - self._rows.keys()
        if unknown:
            raise IntegrityError(f"requests {sorted(unknown)} have no row")
        self._bring_to_front(scheduled.keys())
        return self._step(output)

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

    def _place(
        self,
        data: NewRequestData | CachedRequestData,
        block_ids: BlockIds,
        token_ids: Sequence[int],
    ) -> None:
        """A request with whole new rows, in its old row if it has one."""
        row = self._rows.get(data.req_id, len(self.requests))
        if row >= self.tables.max_num_reqs:
            raise CapacityError(
                f"request {data.req_id} is one more than the {row} rows of this "
                "worker: raise max_num_seqs of the worker to the scheduler's"
            )
        self.tables.overwrite(row, block_ids)
        request = WorkerRequest(data.req_id, list(token_ids), data.num_computed_tokens)
        self.requests[row : row + 1] = [request]
        self._rows[data.req_id] = row

    def _continue(self, data: CachedRequestData) -> None:
        if data.resumed:
            if data.new_block_ids is None or data.token_ids is None:
                raise IntegrityError(
                    f"request {data.req_id} resumes without its blocks or its tokens"
                )
            self._place(data, data.new_block_ids, data.token_ids)
            return
        row = self._rows.get(data.req_id)
        if row is None:
            raise IntegrityError(f"request {data.req_id} continues but has no row")
        if data.new_block_ids is not None:
            self.tables.append(row, data.new_block_ids)
        self.requests[row].num_computed_tokens = data.num_computed_tokens

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
