"""vLLM's KVCacheManager whose block pool an eviction policy ranks."""

from collections.abc import Callable
from typing import Any

from kvplugin.integration.vllm.policy_pool import PolicyPoolMixin, policy_pool
from kvplugin.policies.eviction import EvictionPolicy

_Base: Any = object


class PolicyManagerMixin(_Base):
    """Stands before vLLM's `KVCacheManager` in a class made by `policy_classes`."""

    make_policy: Callable[[int], EvictionPolicy]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Pools that connectors build meanwhile stay vLLM's own.
        if not isinstance(self.block_pool, PolicyPoolMixin):
            return
        if not self.block_pool.rank_by(self.make_policy).wants_hits:
            # Nobody asks who is admitted: one call less for each running request.
            self.allocate_slots = super().allocate_slots  # type: ignore[method-assign]

    def allocate_slots(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        # What a preempted request takes back is no new reuse.
        if request.num_preemptions:
            return super().allocate_slots(request, *args, **kwargs)
        pool = self.block_pool
        pool.admitting = request
        try:
            return super().allocate_slots(request, *args, **kwargs)
        finally:
            pool.admitting = None


def policy_classes(
    pool_base: type,
    manager_base: type,
    make_policy: Callable[[int], EvictionPolicy],
) -> tuple[type, type]:
    """Subclasses of vLLM's `BlockPool` and `KVCacheManager` of the installed version.

    They are to stand in vLLM's modules for their bases while a scheduler is built. The
    pool of each manager built then has a policy of its own (its attribute `kvp`).

    Args:
        pool_base: vLLM's `BlockPool`.
        manager_base: vLLM's `KVCacheManager`.
        make_policy: an unbound policy, from the number of blocks.
    """
    manager = type(
        "PolicyKVCacheManager",
        (PolicyManagerMixin, manager_base),
        {"make_policy": staticmethod(make_policy)},
    )
    return policy_pool(pool_base), manager
