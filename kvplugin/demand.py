"""Demand: the keys that waiting requests will want when their turn comes.

An eviction policy that knows them can spare blocks which are about to be hit
(`EvictionPolicy.step`). Without such a policy nothing is followed.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from kvplugin.block_pool import BlockPool
from kvplugin.hashing import make_key
from kvplugin.manager import KVCacheManager
from kvplugin.request import RequestLike

MOST_BLOCKS: Final = 2048
"""Leading blocks of a request that are followed, in each group."""

MOST_REQUESTS: Final = 256
"""Requests that are followed: with `MOST_BLOCKS` half a million keys a group."""

KeysOf = Callable[[RequestLike], list[bytes]]
"""Keys that a request wants, as `BlockInfo.key`."""


class Change(NamedTuple):
    """How what waiting requests want has changed, as `EvictionPolicy.step` has it."""

    soon: list[bytes]
    """Keys that they began to want, once for each request."""
    dropped: dict[bytes, int]
    """Keys that they want no longer, and by how many of them."""


class Demand:
    """The keys of waiting requests, and how they have changed. O(changed).

    Args:
        keys_of: what a request wants. Asked when it begins to be followed; it may have
            more hashes when it ends to.
        most_requests: that are followed, those that began to wait first; the next one
            when one of them waits no longer.
    """

    def __init__(self, keys_of: KeysOf, most_requests: int = MOST_REQUESTS) -> None:
        self._keys_of = keys_of
        self._most = most_requests
        self._wanted: dict[str, list[bytes]] = {}
        self._beyond: dict[str, RequestLike] = {}
        """Wait and are not followed yet."""
        self._change: Counter[bytes] = Counter()

    def add(self, request: RequestLike) -> None:
        """A request waits from now on."""
        if len(self._wanted) < self._most:
            self._follow(request)
        else:
            self._beyond[request.request_id] = request

    def _follow(self, request: RequestLike) -> None:
        if keys := self._keys_of(request):
            self._wanted[request.request_id] = keys
            self._change.update(keys)

    def remove(self, request: RequestLike) -> None:
        """It was admitted, or ended; one that does not wait is fine."""
        self._beyond.pop(request.request_id, None)
        self._change.subtract(self._wanted.pop(request.request_id, ()))
        while self._beyond and len(self._wanted) < self._most:
            self._follow(self._beyond.pop(next(iter(self._beyond))))

    def renew(self, requests: Iterable[RequestLike]) -> None:
        """The hashes of these requests have changed, of those that wait."""
        for request in requests:
            if request.request_id in self._wanted:
                self._change.subtract(self._wanted.pop(request.request_id))
                self._follow(request)

    def take(self) -> Change:
        """What has changed since the last call: who came and went counts nothing."""
        change, self._change = self._change, Counter()
        dropped = {key: -more for key, more in change.items() if more < 0}
        return Change([*change.elements()], dropped)

    def tell(self, pool: BlockPool, now: float) -> None:
        """The engine's step begins: the pool's policy hears it, if it wants to.

        Args:
            pool: of the keys.
            now: seconds, of the clock of `BlockContext.expires_at`.
        """
        if pool.wants_steps:
            pool.step(now, *self.take())


class HitKeys:
    """The keys of the blocks that a lookup of a request can hit: all its tokens but the
    last, in all groups. None while the pool's policy does not want to know.

    Args:
        kv: the groups and their pool.
        most_blocks: leading blocks of a request that count, in each group.
    """

    def __init__(self, kv: KVCacheManager, most_blocks: int = MOST_BLOCKS) -> None:
        managers = kv.coordinator.single_type_managers
        self._managers = managers if kv.enable_caching else ()
        self._pool = kv.block_pool
        self._most = most_blocks

    def __call__(self, request: RequestLike) -> list[bytes]:
        """The keys, group by group."""
        keys: list[bytes] = []
        if not self._pool.wants_demand or request.skip_reading_prefix_cache:
            return keys
        for manager in self._managers:
            most = min((request.num_tokens - 1) // manager.block_size, self._most)
            hashes = manager.coarse_hashes(request.block_hashes)[:most]
            group = manager.kv_cache_group_id
            keys += [make_key(block_hash, group) for block_hash in hashes]
        return keys
