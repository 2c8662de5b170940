"""Eviction policies; `kvp_make_eviction_policy` is how one is chosen by its name."""

from kvplugin.policies.eviction.base import (
    NO_CONTEXT,
    BlockContext,
    BlockInfo,
    EvictionPolicy,
    context_of,
    hears_demand,
    needs,
)
from kvplugin.policies.eviction.lru import LRU

__all__ = [
    "LRU",
    "NO_CONTEXT",
    "BlockContext",
    "BlockInfo",
    "EvictionPolicy",
    "context_of",
    "hears_demand",
    "needs",
]
