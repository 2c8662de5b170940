"""The worker half of a rank that could not start."""

from collections.abc import Sequence

from kvplugin.connectors.idle import IdleWorker
from kvplugin.connectors.offload.messages import VERSION, Completion, Plan, Report
from kvplugin.contract import NOTHING_HAPPENED, WorkerOutcome
from kvplugin.wire import decode, encode


class RefusingWorker(IdleWorker):
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
