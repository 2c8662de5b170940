"""Whether a request fits into the pool at all."""

from kvplugin.hooks import Hooks
from kvplugin.manager import KVCacheManager
from kvplugin.replay.groups import ServedGroups
from kvplugin.replay.requests import TraceRequest
from kvplugin.spec import KVCacheConfig


def make_manager(
    served: ServedGroups, capacity: int, hooks: Hooks, **policy: object
) -> KVCacheManager:
    """A manager of `capacity` usable blocks.

    Args:
        served: the groups.
        capacity: usable blocks.
        hooks: the plugins to ask.
        policy: `eviction_policy` and its options, as the manager takes them.

    Raises:
        ConfigError: there is no such policy, or not with these options.
        PluginError: a plugin fails.
    """
    return KVCacheManager(
        KVCacheConfig(capacity + 1, (), served.groups),  # and the null block
        max_model_len=served.max_model_len,
        hash_block_size=served.hash_block_size,
        hooks=hooks,
        **policy,  # type: ignore[arg-type]
    )


class FitsAlone:
    """Which requests a pool can serve that serves nobody else and has nothing cached.

    Dense groups keep every block, so it is their number. Other groups give blocks back
    on the way: the prefill is tried in a pool of its own, for a few lengths, because
    what is longer than what does not fit does not fit either.

    Args:
        served: the groups.
        capacity: usable blocks.
        hooks: the plugins to ask.
    """

    def __init__(self, served: ServedGroups, capacity: int, hooks: Hooks) -> None:
        self._served = served
        self._hooks = hooks
        self._capacity = capacity
        self._manager: KVCacheManager | None = None
        self._fits_up_to = 0
        self._too_long: float = float("inf")

    def __call__(self, request: TraceRequest) -> bool:
        """Whether the request fits; nothing of it is kept."""
        length = len(request.block_hashes)
        if self._served.most_blocks(length) <= self._capacity:
            return True
        if self._served.is_dense or length >= self._too_long:
            return False
        if length <= self._fits_up_to:
            return True
        if fits := self._try(request):
            self._fits_up_to = length
        else:
            self._too_long = length
        return fits

    def _try(self, request: TraceRequest) -> bool:
        if self._manager is None:
            self._manager = make_manager(self._served, self._capacity, self._hooks)
        manager, done = self._manager, 0
        try:
            for end in self._served.step_ends(0, request.num_tokens - 1):
                manager.new_step_starts()
                if manager.allocate_slots(request, end - done) is None:
                    return False
                request.num_computed_tokens = done = end
            return True
        finally:
            manager.free(request)
            request.num_computed_tokens = 0
