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
    may not know that this rank could not start.

    No load comes to it, as no store of all ranks ever succeeds; if one does, it fails.
    """

    def __init__(self, rank: int, reason: str) -> None:
        self._rank = rank
        self._reason = reason
        self._step = -1
        self._refused: list[Completion] = []
        self._failed: dict[str, Sequence[int]] = {}
        self._sends: set[str] = set()
        self._is_plan_unsaid = False

    def register(self, tensors: Mapping[str, KVTensor]) -> None:
        del tensors

    def begin_step(self, plan: bytes) -> None:
        """Refuse what the plan orders, unless it comes again."""
        message = decode(plan, Plan) if plan else None
        if message is None or message.step <= self._step:
            return
        self._step = message.step
        self._is_plan_unsaid = True
        self._sends.update(message.finished_sends)
        for order in message.loads:
            self._failed[order.request_id] = order.engine_ids
        self._refused += [
            Completion(order.id, order.refusal or self._reason, 0, 0.0)
            for order in (*message.loads, *message.stores)
        ]

    def end_step(self) -> None:
        """Nothing is stored."""

    def poll(self) -> WorkerOutcome:
        """What was refused since the last call."""
        if not self._is_plan_unsaid:
            return NOTHING_HAPPENED
        self._is_plan_unsaid = False
        failed, self._failed = self._failed, {}
        refused, self._refused = self._refused, []
        sends, self._sends = self._sends, set()
        return WorkerOutcome(
            frozenset(failed),
            failed,
            frozenset(sends),
            encode(Report(VERSION, self._rank, self._step, refused)),
        )

    def drain(self) -> bytes:
        return b""

    def close(self) -> None:
        """There is nothing to stop."""
