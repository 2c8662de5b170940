"""Whose turn it is among waiting requests, and whether the next one may come."""

from typing import Any

from kvplugin.hooks import AdmissionContext, Hooks, WaitingContext
from kvplugin.integration.vllm.waiting import Listener, SteeredQueue


class Turns:
    """Asks hooks for the order once a step, and for admission once a request and step.

    Puts a `SteeredQueue` in the place of the scheduler's `waiting`. Requests that hold
    KV blocks go first and need no permission, as in vLLM: blocks that wait behind a
    request without any would never come free.

    Args:
        scheduler: vLLM's.
        hooks: are asked, where anybody but the built-in answers.
        listener: hears who waits.
    """

    def __init__(self, scheduler: Any, hooks: Hooks, listener: Listener) -> None:
        self._scheduler = scheduler
        self._hooks = hooks
        self._queue = SteeredQueue(scheduler.waiting, listener, self._admits)
        scheduler.waiting = self._queue
        self._skipped = getattr(scheduler, "skipped_waiting", None)
        """Of vLLM 0.19, which tries it before `waiting`; 0.32 has none."""
        self._step = 0
        self._answers: dict[str, bool] = {}
        """This step's, by request."""

    def begin_step(self) -> None:
        """A step may admit some of those that wait."""
        self._step += 1
        self._answers.clear()
        self._take_skipped()
        order: list[Any] = []
        if self._hooks.orders_waiting and len(self._queue) and self._has_room():
            order = self._ask_order()
        self._queue.choose_order(order)

    def _has_room(self) -> bool:
        return len(self._scheduler.running) < self._scheduler.max_num_running_reqs

    def _ask_order(self) -> list[Any]:
        waiting = tuple(self._queue)
        ctx = WaitingContext(
            waiting=waiting,
            step=self._step,
            free_blocks=self._pool.get_num_free_blocks(),
            policy=self._scheduler.policy.value,
            cached_tokens=self._cached_tokens,
        )
        by_id = {request.request_id: request for request in waiting}
        return [by_id[id_] for id_ in self._hooks.choose_waiting_order(ctx)]

    def _admits(self, request: Any) -> bool:
        """Where nobody runs admission is open: the engine would stall."""
        if not (self._hooks.chooses_admission and self._scheduler.running):
            return True
        answer = self._answers.get(request.request_id)
        if answer is None:
            answer = self._answers[request.request_id] = self._ask_admission(request)
        return answer

    def _ask_admission(self, request: Any) -> bool:
        return self._hooks.choose_admission(
            AdmissionContext(
                request=request,
                step=self._step,
                num_running=len(self._scheduler.running),
                num_waiting=len(self._queue),
                free_blocks=self._pool.get_num_free_blocks(),
                num_blocks=self._pool.num_gpu_blocks - 1,
                policy=self._scheduler.policy.value,
                cached_tokens=self._cached_tokens,
            )
        )

    @property
    def _pool(self) -> Any:
        return self._scheduler.kv_cache_manager.block_pool

    def _cached_tokens(self, request: Any) -> int:
        manager = self._scheduler.kv_cache_manager
        if not manager.enable_caching or request.skip_reading_prefix_cache:
            return 0
        # The last token is computed in any case, for its logits.
        found = manager.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )
        return int(found[1])

    def _take_skipped(self) -> None:
        """Requests that 0.19 passed over wait with the others again, at their head;
        those that hold blocks stay where they come first."""
        if not self._skipped:
            return
        idle = [request for request in self._skipped if not _holds_blocks(request)]
        self._skipped.remove_requests(idle)
        for request in reversed(idle):
            self._queue.prepend_request(request)


def _holds_blocks(request: Any) -> bool:
    loads = request.status.name == "WAITING_FOR_REMOTE_KVS"
    return loads or request.num_computed_tokens > 0
