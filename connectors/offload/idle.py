"""Halves that do nothing: for models not served yet, and for a disabled connector."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from kvplugin.connectors.offload.messages import VERSION, Completion, Plan, Report
from kvplugin.contract import (
    MISS,
    NOTHING_HAPPENED,
    EngineBlocks,
    KVTensor,
    Lookup,
    RequestView,
    Stats,
    Step,
    WorkerOutcome,
)
from kvplugin.events import KVCacheEvent
from kvplugin.wire import decode, encode


class IdleScheduler:
    """A scheduler half that never hits and never stores."""

    watched: Collection[str] = ()

    def bind_blocks(self, blocks: EngineBlocks) -> None:
        del blocks

    def lookup(self, request: RequestView, num_local_tokens: int) -> Lookup:
        del request, num_local_tokens
        return MISS

    def allocated(
        self,
        request: RequestView,
        block_ids: tuple[Sequence[int], ...],
        num_external_tokens: int,
    ) -> None:
        del request, block_ids, num_external_tokens

    def plan_step(self, step: Step) -> bytes:
        del step
        return b""

    def apply(self, reports: Iterable[bytes]) -> None:
        del reports

    def distrust(self, block_ids: AbstractSet[int]) -> None:
        del block_ids

    def finished(self, request: RequestView) -> bool:
        del request
        return False

    def reset(self) -> bool:
        return True

    def has_pending_work(self) -> bool:
        return False

    def has_pending_frees(self) -> bool:
        return False

    def take_events(self) -> list[KVCacheEvent]:
        return []

    def take_stats(self) -> Stats | None:
        return None

    def check(self) -> None:
        """There is nothing that could be wrong."""

    def close(self) -> None:
        """There is nothing to stop."""


class IdleWorker:
    """A worker half that refuses every job: the scheduler half of another process
    may not know that this rank could not start."""

    def __init__(self, rank: int, reason: str) -> None:
        self._rank = rank
        self._reason = reason
        self._plan: Plan | None = None

    def register(self, tensors: Mapping[str, KVTensor]) -> None:
        del tensors

    def begin_step(self, plan: bytes) -> None:
        self._plan = decode(plan, Plan) if plan else None

    def end_step(self) -> None:
        """Nothing is stored."""

    def poll(self) -> WorkerOutcome:
        plan, self._plan = self._plan, None
        if plan is None:
            return NOTHING_HAPPENED
        failed = {
            order.request_id: [b for part in order.parts for b in part.engine_ids]
            for order in plan.loads
        }
        refused = [
            Completion(order.id, self._reason, 0, 0.0)
            for order in (*plan.loads, *plan.stores)
        ]
        return WorkerOutcome(
            frozenset(failed),
            failed,
            frozenset(plan.finished_sends),
            encode(Report(VERSION, self._rank, plan.step, refused)),
        )

    def drain(self) -> bytes:
        return b""

    def close(self) -> None:
        """There is nothing to stop."""
