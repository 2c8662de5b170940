"""An eviction policy as a pool uses it: asked for order, trusted with nothing else.

A policy that raises or answers something impossible is replaced by LRU for the life
of the pool, and no block is lost: LRU is rebuilt from what the pool knows.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter

from kvplugin.errors import IntegrityError
from kvplugin.policies.eviction import (
    LRU,
    BlockContext,
    BlockInfo,
    EvictionPolicy,
    hears_demand,
    needs,
)

logger = logging.getLogger("vllm.kvplugin.block_pool")


class Ranking:
    """The evictable blocks of a pool in a policy's order.

    Args:
        policy: the policy, not bound yet.
        refs: reference count of each block; the pool's own list, read only.
        hashes: hash of each block or None; the pool's own list, read only.
        info: what the policy may ask of a keyed block.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        refs: Sequence[int],
        hashes: Sequence[bytes | None],
        info: Callable[[int], BlockInfo],
    ) -> None:
        self.failures = 0
        self._refs = refs
        self._hashes = hashes
        self._info = info
        self._count = 0
        # The order of last releases, so that recency outlives the policy.
        self._released_at = [] if type(policy) is LRU else [0] * len(refs)
        self._releases = 0
        self._use(policy)

    @property
    def wants_hits(self) -> bool:
        """Whether `hit` makes a difference to the policy."""
        return self._wants_hits

    @property
    def wants_steps(self) -> bool:
        """Whether `step` makes a difference to the policy."""
        return self._wants_steps

    @property
    def wants_demand(self) -> bool:
        """Whether the policy wants to know which keys waiting requests want."""
        return self._wants_demand

    def __len__(self) -> int:
        """Evictable blocks, as the pool counts them."""
        return self._count

    def insert(self, ids: Sequence[int], ctx: BlockContext) -> None:
        """Blocks in use were given a key."""
        self._tell(self._policy.insert, self._for_policy(ids), ctx)

    def hit(self, ids: Sequence[int], ctx: BlockContext) -> None:
        """A request adopted these blocks."""
        if ids:
            self._tell(self._policy.hit, self._for_policy(ids), ctx)

    def pin(self, ids: Sequence[int]) -> None:
        """Evictable blocks come into use."""
        self._count -= len(ids)
        self._tell(self._policy.pin, self._for_policy(ids))

    def release(self, ids: Sequence[int]) -> None:
        """Keyed blocks fell out of use; what should go first is listed first."""
        self._count += len(ids)
        if self._released_at:
            released_at = self._released_at
            for number, block in enumerate(ids, self._releases + 1):
                released_at[block] = number
            self._releases += len(ids)
        self._tell(self._policy.release, self._for_policy(ids))

    def forget(self, ids: Sequence[int], num_evictable: int) -> None:
        """Keys are about to go; the pool still has them while the policy is told.

        Args:
            ids: the blocks.
            num_evictable: how many of them are not in use.
        """
        try:
            self._policy.forget(self._for_policy(ids))
        except Exception:
            self._fall_back()
            self._policy.forget(ids)
        self._count -= num_evictable

    def step(
        self, now: float, soon: Iterable[bytes], dropped: Mapping[bytes, int]
    ) -> None:
        """The engine's step begins."""
        self._tell(self._policy.step, now, soon, dropped)

    def victims(self, n: int) -> list[int]:
        """`n` evictable blocks that the pool takes now, `n` at most `len(self)`."""
        victims = self._policy.victims(n) if self._is_own else self._choose(n)
        self._count -= n
        return victims

    def order(self) -> Iterator[int]:
        """Evictable blocks, next victim first."""
        return self._policy.order()

    def check(self) -> None:
        """Verify that the policy ranks exactly the evictable blocks.

        Raises:
            IntegrityError: it does not.
        """
        evictable = self._evictable()
        try:
            ranked, count = sorted(self._policy.order()), len(self._policy)
        except Exception as error:
            name = type(self._policy).__name__
            raise IntegrityError(f"eviction policy {name}: {error!r}") from error
        if ranked != evictable:
            raise IntegrityError(
                "the policy's evictable set differs from the free keyed blocks"
            )
        if not len(evictable) == count == self._count:
            raise IntegrityError("policy and pool count evictable blocks differently")
        self._policy.check()

    def _use(self, policy: EvictionPolicy) -> None:
        # LRU is what the pool falls back to: it is trusted as the pool itself is.
        self._is_own = type(policy) is LRU
        self._wants_hits = needs(policy, "needs_hits")
        self._wants_steps = needs(policy, "needs_steps")
        self._wants_demand = hears_demand(policy)
        self._policy = policy
        policy.bind(len(self._refs), self._info)

    def _tell(self, call: Callable[..., None], *args: object) -> None:
        """Tell the policy what has happened; LRU learns it from the pool's lists."""
        try:
            call(*args)
        except Exception:
            self._fall_back()

    def _for_policy(self, ids: Sequence[int]) -> Sequence[int]:
        """The pool goes on with its own list, whatever a policy does with this one."""
        return ids if self._is_own else list(ids)

    def _choose(self, n: int) -> list[int]:
        try:
            victims = list(self._policy.victims(n))
            self._verify(victims, n)
        except Exception:
            self._fall_back()
            victims = self._policy.victims(n)
        return victims

    def _verify(self, victims: Sequence[int], n: int) -> None:
        if len(victims) != n or len(set(victims)) != n:
            raise IntegrityError(f"{n} distinct victims wanted, got {victims}")
        if set(map(type, victims)) != {int} or min(victims) < 1:
            raise IntegrityError(f"victims {victims} are not all blocks of the pool")
        choose = itemgetter(*victims, *victims[:1])  # two at least make a tuple
        if any(choose(self._refs)) or None in choose(self._hashes):
            raise IntegrityError(f"victims {victims} are not all free keyed blocks")

    def _evictable(self) -> list[int]:
        pairs = zip(self._refs, self._hashes, strict=True)
        return [
            b for b, (refs, key) in enumerate(pairs) if key is not None and not refs
        ]

    def _fall_back(self) -> None:
        logger.exception(
            "eviction policy %s failed and is replaced by LRU",
            type(self._policy).__name__,
        )
        self.failures += 1
        evictable = self._evictable()
        if self._released_at:
            evictable.sort(key=self._released_at.__getitem__)
        self._released_at = []
        self._use(LRU())
        self._policy.release(evictable)
