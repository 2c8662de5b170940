"""Choices that a scheduler leaves to plugins, in terms of its requests.

Contexts are made here, and only where somebody other than the built-in is asked.
"""

from collections.abc import Sequence

from kvplugin.hooks import AdmissionContext, Hooks, VictimContext, WaitingContext
from kvplugin.manager import KVCacheManager
from kvplugin.policies.scheduling import last_in_order
from kvplugin.request import RequestLike


class Choices:
    """Who is next, whether it may come, who loses its blocks.

    Args:
        hooks: the plugins to ask.
        manager: the KV cache.
        policy: fcfs or priority, the scheduler's own setting.
    """

    def __init__(self, hooks: Hooks, manager: KVCacheManager, policy: str) -> None:
        self.hooks = hooks
        self._manager = manager
        self._pool = manager.block_pool
        self._policy = policy

    @property
    def orders_waiting(self) -> bool:
        """Whether somebody may change the order of waiting requests."""
        return self.hooks.orders_waiting

    def order(self, waiting: Sequence[RequestLike], step: int) -> Sequence[str]:
        """Ids of waiting requests, all of them, in the order of a plugin."""
        return self.hooks.choose_waiting_order(
            WaitingContext(
                waiting=tuple(waiting),
                step=step,
                free_blocks=self._pool.get_num_free_blocks(),
                policy=self._policy,
                cached_tokens=self._cached_tokens,
            )
        )

    def admits(
        self, request: RequestLike, step: int, num_running: int, num_waiting: int
    ) -> bool:
        """Whether the next waiting request may come. Where nobody runs it may: a
        plugin that always says no must not stall the engine."""
        if not num_running or not self.hooks.chooses_admission:
            return True
        return self.hooks.choose_admission(
            AdmissionContext(
                request=request,
                step=step,
                num_running=num_running,
                num_waiting=num_waiting,
                free_blocks=self._pool.get_num_free_blocks(),
                num_blocks=self._pool.num_usable_blocks,
                policy=self._policy,
                cached_tokens=self._cached_tokens,
            )
        )

    def victim(self, needy: RequestLike, running: Sequence[RequestLike]) -> str:
        """Id of the running request that loses its blocks."""
        if not self.hooks.chooses_victim:
            return last_in_order(running, self._policy).request_id
        return self.hooks.choose_victim(
            VictimContext(
                needy=needy,
                candidates=tuple(running),
                policy=self._policy,
                freed_blocks=self._freed_blocks,
            )
        )

    def _cached_tokens(self, request: RequestLike) -> int:
        return self._manager.find_computed_blocks(request)[1]

    def _freed_blocks(self, request: RequestLike) -> int:
        rows = self._manager.get_block_ids(request.request_id)
        return sum(self._pool.ref_count(block) == 1 for row in rows for block in row)
