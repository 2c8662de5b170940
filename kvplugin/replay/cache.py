"""One cache of a replay: the core's manager, and how a request goes through it."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvplugin.block_pool import BlockPool
from kvplugin.coordinator import Rows
from kvplugin.errors import PluginError
from kvplugin.hooks import Hooks
from kvplugin.kv_cache_blocks import KVCacheBlocks
from kvplugin.policies.eviction import context_of
from kvplugin.replay.fits import FitsAlone, make_manager
from kvplugin.replay.groups import ServedGroups
from kvplugin.replay.host import HostTier
from kvplugin.replay.requests import TraceRequest
from kvplugin.request import RequestLike


class Served(NamedTuple):
    """What a request found, in blocks."""

    device: int
    host: int


class _LostKeys:
    """Counts keys that leave the cache, as the pool's listener."""

    def __init__(self) -> None:
        self.count = 0

    def keys_given(
        self,
        request: RequestLike,
        group: int,
        block_size: int,
        start: int,
        hashes: Sequence[bytes],
        given: Sequence[int],
        parent: bytes | None,
    ) -> None:
        """Nothing to count."""

    def keys_lost(self, keys: Sequence[tuple[int, bytes]]) -> None:
        """Evictions."""
        self.count += len(keys)

    def all_keys_lost(self) -> None:
        """A replay resets nothing."""


class ReplayCache:
    """A `KVCacheManager` that serves whole requests, one after another.

    Of each: lookup, allocation of all its blocks, keys, and `free` (the tail first)
    once `running` later requests have been served.

    Args:
        served: the groups.
        capacity: usable blocks.
        policy: name of the eviction policy.
        options: what the policy is told.
        hooks: the plugins that make it.
        running: requests that keep their blocks.
        host: the tier behind it.

    Raises:
        ConfigError: there is no such policy, or not with these options.
        PluginError: a plugin fails.
    """

    def __init__(
        self,
        served: ServedGroups,
        capacity: int,
        policy: str,
        options: Mapping[str, object],
        hooks: Hooks,
        *,
        running: int = 0,
        host: HostTier | None = None,
    ) -> None:
        self.manager = make_manager(
            served,
            capacity,
            hooks,
            eviction_policy=policy,
            eviction_policy_options=options,
        )
        self._fits_alone = FitsAlone(served, capacity, hooks)
        self.pool = self.manager.block_pool
        self._lost = self.pool.listener = _LostKeys()
        self._served = served
        self._policy = policy
        self._running_limit = running
        self._running: deque[TraceRequest] = deque()
        self._host = host
        self.pools = (self.pool,) if host is None else (self.pool, host.pool)
        """Of the device, and of the host tier if there is one."""

    @property
    def evictions(self) -> int:
        """Keys that the device lost so far."""
        return self._lost.count

    @property
    def running(self) -> Sequence[TraceRequest]:
        """Requests that hold blocks."""
        return self._running

    def serve(self, request: TraceRequest) -> Served | None:
        """Let a request run.

        Returns:
            What it found; None if it does not fit, even alone (it left no trace).
        """
        if not self._fits_alone(request):
            return None
        size = self._served.hash_block_size
        rows, hit = self.manager.coordinator.find_longest_cache_hit(
            request.block_hashes, request.lookup_tokens
        )
        device, host = hit // size, self._host
        loaded = host.load(request, device) if host is not None else []
        fits = self._admit(request, rows, hit, len(loaded) * size)
        if host is not None:
            if fits:
                host.store(request, device + len(loaded), loaded)
            else:
                host.give_back(loaded)
        if not fits:
            return None
        self._running.append(request)
        while len(self._running) > self._running_limit:
            self.manager.free(self._running.popleft())
        return Served(device, len(loaded))

    def _admit(
        self, request: TraceRequest, rows: Rows, hit: int, external: int
    ) -> bool:
        """Give the request all its blocks; running ones end early if they must."""
        manager = self.manager
        total = request.num_tokens - 1
        if hit == total:
            # Nothing to compute: `allocate_slots` would take a block for the answer.
            manager.coordinator.allocate_new_computed_blocks(
                request.request_id, rows, hit, 0, context_of(request)
            )
            return True
        hits: KVCacheBlocks | None = manager.create_kv_cache_blocks(rows)
        done = hit + external
        for end in self._served.step_ends(done, total):
            manager.new_step_starts()
            while (
                manager.allocate_slots(
                    request,
                    end - done,
                    num_new_computed_tokens=hit,
                    new_computed_blocks=hits,
                    num_external_computed_tokens=external,
                )
                is None
            ):
                if not self._running:  # it needs more behind its hits than alone
                    manager.free(request)
                    request.num_computed_tokens = 0
                    return False
                manager.free(self._running.popleft())
            request.num_computed_tokens = done = end
            hit, external, hits = 0, 0, None
        request.num_computed_tokens = 0
        return True

    def check(self) -> None:
        """Verify that the policy worked to the end.

        Raises:
            PluginError: it failed, so that LRU chose from then on.
            IntegrityError: an invariant of the core does not hold.
        """
        self.check_policies()
        self.manager.check()

    def check_policies(self) -> None:
        """Verify that the policies worked until now.

        Raises:
            PluginError: one failed, so that LRU chose from then on.
        """
        if _has_failed(self.pool):
            raise _replaced(self._policy)
        if self._host is not None and _has_failed(self._host.pool):
            raise _replaced(self._host.policy, " of the host tier")


def _has_failed(pool: BlockPool) -> bool:
    failures: int = getattr(pool, "policy_failures", 0)  # a plugin's pool may not say
    return failures > 0


def _replaced(policy: str, where: str = "") -> PluginError:
    return PluginError(
        f"eviction policy {policy!r}{where} failed and was replaced by LRU: see the "
        f"log; results would be LRU's"
    )
