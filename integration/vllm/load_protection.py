"""The undoing of failed synchronous loads in one scheduler."""

import inspect
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from kvplugin.integration.vllm.load_reach import Reach, Row, admitted_rows, reached

logger = logging.getLogger("vllm.kvplugin.protection")

_QUEUED: Final = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


@dataclass
class _Step:
    """A step that was scheduled and did not return yet."""

    output: Any
    void: set[str] = field(default_factory=set)
    """Requests whose output of this step is dropped (where vLLM does not do it)."""


class LoadProtection:
    """Knows the steps under way, and undoes what a failed load reached.

    Args:
        scheduler: vLLM's, complete, with a connector.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._steps: deque[_Step] = deque()
        self.unasked: set[str] = set()
        """Requests that a failed load reached: the connector is not asked for them
        again, or one that always fails would keep them for ever."""
        self._unannounced: set[str] = set()
        # Since 0.32 vLLM counts the tokens under way of each request, and drops its
        # output by itself.
        preempt = inspect.signature(scheduler._preempt_request).parameters
        self._drops_stale = "drop_stale_output" in preempt
        managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._block_sizes = [manager.block_size for manager in managers]
        specs = [manager.kv_cache_spec for manager in managers]
        self._keeps_rows = len(specs) == 1 and isinstance(specs[0], FullAttentionSpec)

    def begins(self, output: Any) -> None:
        """A step was scheduled."""
        self._steps.append(_Step(output))

    def announce(self, output: Any) -> None:
        """Let connectors and workers know whom `undo` preempted, before the step's
        metadata is made."""
        if self._unannounced:
            output.preempted_req_ids = self._unannounced | (
                output.preempted_req_ids or set()
            )
            self._unannounced = set()

    def returns(self, output: Any) -> Any:
        """A step came back: its output, without requests whose part is void."""
        while self._steps and self._steps[0].output is not output:
            self._steps.popleft()
        if not self._steps or not self._steps[0].void:
            return output
        void, scheduled = self._steps[0].void, output.num_scheduled_tokens
        sound = {name: n for name, n in scheduled.items() if name not in void}
        return replace(output, num_scheduled_tokens=sound)

    def ends(self) -> None:
        """The step that came back is done with."""
        if self._steps:
            self._steps.popleft()

    @contextmanager
    def connector_unasked(self) -> Iterator[None]:
        """Let the connector offer nothing to requests that a failed load reached."""
        self.unasked &= self._scheduler.requests.keys()
        connector, unasked = self._scheduler.connector, self.unasked
        ask = connector.get_num_new_matched_tokens

        def answer(request: Any, *args: Any, **kwargs: Any) -> Any:
            if request.request_id in unasked:
                return 0, False
            return ask(request, *args, **kwargs)

        own = vars(connector)
        before = own.get("get_num_new_matched_tokens")
        own["get_num_new_matched_tokens"] = answer
        try:
            yield
        finally:
            del own["get_num_new_matched_tokens"]
            if before is not None:
                own["get_num_new_matched_tokens"] = before

    def undo(self, invalid: Set[int]) -> tuple[set[str], set[int]]:
        """Undo what was computed from blocks that a worker reports as not loaded.

        Returns:
            Requests whose output of the step is void; under
            `kv_load_failure_policy=fail` vLLM ends them. And ids that are vLLM's:
            asynchronous loads into blocks that nobody has read.
        """
        scheduler = self._scheduler
        manager = scheduler.kv_cache_manager
        pool = manager.block_pool
        held = [Row(name, manager.get_block_ids(name)) for name in scheduler.requests]
        rows = [*admitted_rows(step.output for step in self._steps), *held]
        bad = {block for block in invalid if 0 <= block < len(pool.blocks)}
        left = self._asynchronous(bad, rows)
        reach = reached(bad - left, rows, self._block_sizes, pool.null_block.block_id)
        manager.evict_blocks(reach.blocks)
        alive = self._alive(reach)
        if scheduler.recompute_kv_load_failures:
            self._restart(alive, reach)
        if alive or bad - left:
            self._log(len(bad - left), len(reach.blocks), alive)
        return {request.request_id for request in alive}, left

    def _asynchronous(self, bad: set[int], rows: Sequence[Row]) -> set[int]:
        """Bad blocks that only requests hold whose load is under way, where vLLM gets
        them right: it goes on after the last sound block, for which all blocks before
        must be there. (Of a window they are not, and with several groups it raises.)
        Elsewhere such requests begin again like others.
        """
        if not self._keeps_rows:
            return set()
        loading, read = set[int](), set[int]()
        requests = self._scheduler.requests
        for row in rows:
            request = requests.get(row.request_id)
            (blocks,) = row.groups
            mine = bad.intersection(blocks)
            (loading if _is_loading(request) else read).update(mine)
        pool = self._scheduler.kv_cache_manager.block_pool
        return {b for b in loading - read if pool.blocks[b].block_hash is None}

    def _alive(self, reach: Reach) -> list[Any]:
        """Requests that did not end, those that run in their order."""
        requests = self._scheduler.requests
        found = [requests[name] for name in reach.requests if name in requests]
        place = {id(r): i for i, r in enumerate(self._scheduler.running)}
        found.sort(key=lambda request: place.get(id(request), -1))
        return [r for r in found if not RequestStatus.is_finished(r.status)]

    def _restart(self, requests: Sequence[Any], reach: Reach) -> None:
        # Each goes to the front of the queue: in reverse they keep their order.
        for request in reversed(requests):
            name = request.request_id
            _correct_counts(request, reach.requests[name])
            if _is_loading(request):
                # vLLM frees its blocks once nothing writes to them any more, and asks
                # again, as after any asynchronous load that failed.
                request.num_computed_tokens = 0
                self._scheduler.failed_recving_kv_req_ids.add(name)
            else:
                self.unasked.add(name)
            if request.status == RequestStatus.RUNNING:
                self._preempt(request)
            elif request.status in _QUEUED and request.num_computed_tokens:
                # It was loaded, and not admitted yet.
                self._scheduler.kv_cache_manager.free(request)
                request.num_computed_tokens = 0
            self._drop(request)

    def _preempt(self, request: Any) -> None:
        scheduler = self._scheduler
        scheduler.running.remove(request)
        # As after `reset_prefix_cache`: it may run again in the very next step.
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        if self._drops_stale:
            scheduler._preempt_request(
                request, time.monotonic(), drop_stale_output=True
            )
            return
        scheduler._preempt_request(request, time.monotonic())
        self._unannounced.add(request.request_id)

    def _drop(self, request: Any) -> None:
        """Void what steps under way say of a request."""
        if self._drops_stale:
            request.drop_stale_output |= request.num_stale_output_tokens > 0
            return
        request.num_output_placeholders = 0
        for step in self._steps:
            step.void.add(request.request_id)

    def _log(self, bad: int, reached_blocks: int, requests: Sequence[Any]) -> None:
        logger.warning(
            "%d blocks failed to load: %d blocks left the prefix cache, %d requests "
            "%s: %s",
            bad,
            reached_blocks,
            len(requests),
            "are computed again"
            if self._scheduler.recompute_kv_load_failures
            else "end with an error",
            ", ".join(request.request_id for request in requests[:8]) or "-",
        )


def _is_loading(request: Any) -> bool:
    return (
        request is not None and request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    )


def _correct_counts(request: Any, sound: int) -> None:
    """Count no token as cached that is computed again."""
    if (stats := getattr(request, "prefill_stats", None)) is not None:
        local = min(stats.num_local_cached_tokens, sound)
        external = min(stats.num_external_cached_tokens, sound - local)
        stats.set(stats.num_prompt_tokens, local, external)
    elif hasattr(request, "num_cached_tokens") and not request.num_output_tokens:
        request.num_cached_tokens = min(request.num_cached_tokens, sound)
