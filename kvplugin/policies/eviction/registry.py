"""The core's eviction policies by name; nothing is imported before it is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvplugin.errors import ConfigError
from kvplugin.events import MEDIUM_GPU
from kvplugin.policies.eviction.base import EvictionPolicy
from kvplugin.policies.eviction.lru import LRU
from kvplugin.policies.listing import make_listed


@dataclass(frozen=True, slots=True)
class Listed:
    """A policy that can be asked for by name."""

    place: str
    """Module and class, below this package. Options are the struct `<class>Options`
    next to the class, if there is one."""
    description: str
    protects: bool = False
    """Whether it stands before another policy, which ranks what it does not protect;
    its constructor takes that one first."""
    needs_demand: bool = False
    """Whether it does nothing without the keys that waiting requests want, which only
    the engine's own blocks are told of."""


POLICIES: Final[Mapping[str, Listed]] = {
    "lru": Listed("lru.LRU", "least recently used; the default"),
    "reuse": Listed("reuse.Reuse", "learns which blocks are reused; recommended"),
    "lfu": Listed("lfu.LFU", "least frequently used, with aging"),
    "s3fifo": Listed("s3fifo.S3FIFO", "small, main and ghost queue"),
    "sieve": Listed("sieve.Sieve", "one queue and a hand that passes over hits"),
    "arc": Listed("arc.ARC", "balances recency and frequency"),
    "cost": Listed("cost.CostAware", "keeps what is dear to compute again"),
    "random": Listed("random_order.RandomOrder", "any block, from a seed"),
    "retention": Listed(
        "retention.Retention", "protects by priority, time to live, session", True
    ),
    "queue": Listed(
        "queue_informed.QueueInformed",
        "protects what waiting requests will hit",
        protects=True,
        needs_demand=True,
    ),
}


def make_policy(
    name: str,
    options: Mapping[str, object],
    inner: EvictionPolicy | None = None,
    medium: str = MEDIUM_GPU,
) -> EvictionPolicy:
    """A fresh policy.

    Args:
        name: one of `POLICIES`.
        options: what the policy is told.
        inner: ranks what this one does not protect; LRU if None.
        medium: what the blocks stand for, as in KV events.

    Raises:
        ConfigError: an option that the policy does not know, or a wrong value; an
            inner policy for one that protects nothing; or another medium than the
            engine's own for one that needs demand.
    """
    listed = POLICIES[name]
    if listed.needs_demand and medium != MEDIUM_GPU:
        raise ConfigError(
            f"eviction policy {name!r} protects what waiting requests will hit, which "
            f"is followed for the engine's own blocks, not for those of medium "
            f"{medium!r}: leave it out of that eviction_policy"
        )
    # An empty policy is false.
    first = [LRU() if inner is None else inner] if listed.protects else []
    if inner is not None and not first:
        raise ConfigError(
            f"eviction policy {name!r} ranks all blocks: in eviction_policy it can "
            "only stand last"
        )
    place, title = f"{__package__}.{listed.place}", f"eviction policy {name!r}"
    policy: EvictionPolicy = make_listed(
        place, options, title, "eviction_policy_options", *first
    )
    return policy
