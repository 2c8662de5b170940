"""Replay with independent keys, as simulators of object caches do it.

No key stands behind another, all have one size, and none is in use for longer than its
access. A policy then sees what it sees in its paper, so that hit counts can be compared
with those of other implementations. What a prefix cache would hit is another question.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from kvplugin.errors import check_count
from kvplugin.hashing import make_key
from kvplugin.policies.eviction import NO_CONTEXT, BlockInfo, EvictionPolicy

_HASH_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class FlatResult:
    """What a replay counted."""

    accesses: int
    hits: int

    @property
    def hit_rate(self) -> float:
        """Share of the accesses that hit, 0 to 1; 0 if there were none."""
        return self.hits / self.accesses if self.accesses else 0.0


def flat_keys(accesses: Sequence[Hashable]) -> list[bytes]:
    """The key of each access in `run_flat`, numbered as they first come up; for oracles
    that want to know the future."""
    numbers: dict[Hashable, int] = {}
    return [
        make_key(numbers.setdefault(name, len(numbers)).to_bytes(_HASH_BYTES), 0)
        for name in accesses
    ]


def run_flat(
    policy: EvictionPolicy,
    accesses: Sequence[Hashable],
    capacity: int,
    on_access: Callable[[int], object] | None = None,
) -> FlatResult:
    """Serve accesses one after another: a hit is pinned, hit and released; a miss takes
    an empty block, or that of a victim, and is inserted and released.

    Args:
        policy: a fresh one, not bound yet.
        accesses: what is wanted, in this order.
        capacity: blocks, at least 1.
        on_access: told the index of each access before it is served, if given; for
            policies with a clock.

    Raises:
        ConfigError: the capacity is no positive integer.
    """
    check_count("capacity", capacity, 1)
    cache = _FlatCache(policy, capacity)
    hits = 0
    for index, key in enumerate(flat_keys(accesses)):
        if on_access is not None:
            on_access(index)
        hits += cache.serve(key)
    return FlatResult(len(accesses), hits)


class _FlatCache:
    """Blocks 1 to `capacity`, as a pool would show them to a policy."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self._policy = policy
        self._capacity = capacity
        self._block_of: dict[bytes, int] = {}
        self._keys = [b""] * (capacity + 1)
        policy.bind(capacity + 1, self._info)

    def serve(self, key: bytes) -> bool:
        """Whether it was there; it is now."""
        block = self._block_of.get(key)
        is_hit = block is not None
        if block is None:
            block = self._empty_block()
            self._block_of[key], self._keys[block] = block, key
            self._policy.insert([block], NO_CONTEXT)
        else:
            self._policy.pin([block])
            self._policy.hit([block], NO_CONTEXT)
        self._policy.release([block])
        return is_hit

    def _empty_block(self) -> int:
        if len(self._block_of) < self._capacity:
            return len(self._block_of) + 1
        (victim,) = self._policy.victims(1)
        del self._block_of[self._keys[victim]]
        return victim

    def _info(self, block: int) -> BlockInfo:
        return BlockInfo(self._keys[block], None, 0, 0)
