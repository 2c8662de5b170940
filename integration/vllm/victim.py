"""Who is preempted first, where vLLM takes the last of `running`."""

from collections.abc import Sequence
from itertools import count
from typing import Any

from kvplugin.hooks import Hooks, VictimContext
from kvplugin.spec import cdiv


class VictimChooser:
    """Moves the chosen victims to the end of a scheduler's `running`.

    The choice is inside vLLM's `schedule`, so it is made before: as soon as the
    requests that run could need more blocks than are free, the hook is asked, once for
    each victim that this would take. Where the estimate was too high nobody is
    preempted, and only the order within the batch has changed.

    Args:
        scheduler: vLLM's, policy fcfs.
        hooks: are asked for the victim.
    """

    def __init__(self, scheduler: Any, hooks: Hooks) -> None:
        self._scheduler = scheduler
        self._hooks = hooks
        self._numbers = count()
        # Admissions in their order; after a preemption it is another admission.
        self._admitted: dict[tuple[str, int], int] = {}

    def prepare(self) -> None:
        """A step begins."""
        running = self._in_order_of_admission()
        needed = [self._blocks_needed(request) for request in running]
        free = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        last: list[Any] = []
        while len(running) > 1 and sum(needed) > free:
            needy = _first_without(running, needed, free)
            index = self._choose(needy, running)
            free += self._blocks_held(running[index])
            last.append(running.pop(index))
            del needed[index]
        self._scheduler.running[:] = [*running, *reversed(last)]

    def _choose(self, needy: Any, candidates: Sequence[Any]) -> int:
        ctx = VictimContext(
            needy=needy,
            candidates=tuple(candidates),
            policy="fcfs",
            freed_blocks=self._blocks_held,
        )
        victim = self._hooks.choose_victim(ctx)
        return [request.request_id for request in candidates].index(victim)

    def _in_order_of_admission(self) -> list[Any]:
        """Those that run, whatever order an earlier step has left them in."""
        running, known = self._scheduler.running, self._admitted
        keys = [(request.request_id, request.num_preemptions) for request in running]
        self._admitted = {
            key: known[key] if key in known else next(self._numbers) for key in keys
        }
        order = sorted(zip(keys, running, strict=True), key=self._number)
        return [request for _, request in order]

    def _number(self, admission: tuple[tuple[str, int], Any]) -> int:
        return self._admitted[admission[0]]

    def _blocks_needed(self, request: Any) -> int:
        """Blocks that the next step may add to its rows, at most: a window also gives
        some back."""
        scheduler = self._scheduler
        new = min(
            request.num_tokens_with_spec
            + request.num_output_placeholders
            - request.num_computed_tokens,
            scheduler.max_num_scheduled_tokens,
        )
        tokens = request.num_computed_tokens + new + scheduler.num_lookahead_tokens
        tokens = min(tokens, scheduler.max_model_len)
        needed = 0
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
            held = len(manager.req_to_blocks.get(request.request_id, ()))
            needed += max(cdiv(tokens, manager.block_size) - held, 0)
        return needed

    def _blocks_held(self, request: Any) -> int:
        """Blocks that nobody else uses."""
        rows = self._scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
        return sum(block.ref_cnt == 1 for row in rows for block in row)


def _first_without(running: Sequence[Any], needed: Sequence[int], free: int) -> Any:
    """The request at which the free blocks run out."""
    for request, blocks in zip(running, needed, strict=True):
        free -= blocks
        if free < 0:
            return request
    return running[-1]
