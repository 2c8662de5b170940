"""Eviction policies and the names by which a configuration chooses one."""

from collections.abc import Callable
from typing import Final

from kvplugin.errors import unknown_name
from kvplugin.policies.eviction.base import (
    NO_CONTEXT,
    BlockContext,
    BlockInfo,
    EvictionPolicy,
)
from kvplugin.policies.eviction.lru import LRU

EVICTION_POLICIES: Final[dict[str, Callable[[], EvictionPolicy]]] = {"lru": LRU}


def make_eviction_policy(name: str) -> EvictionPolicy:
    """A fresh policy by its configuration name.

    Raises:
        ConfigError: no policy has this name.
    """
    factory = EVICTION_POLICIES.get(name)
    if factory is None:
        raise unknown_name(
            "eviction policy", name, EVICTION_POLICIES, "eviction_policy"
        )
    return factory()


__all__ = [
    "EVICTION_POLICIES",
    "LRU",
    "NO_CONTEXT",
    "BlockContext",
    "BlockInfo",
    "EvictionPolicy",
    "make_eviction_policy",
]
