"""Scheduling policies by name; each is a plugin that answers one hook."""

from kvplugin.policies.scheduling.configured import last_in_order
from kvplugin.policies.scheduling.registry import (
    SCHEDULING,
    SchedulingKind,
    make_scheduling,
)
from kvplugin.policies.scheduling.sparing import may_lose

__all__ = [
    "SCHEDULING",
    "SchedulingKind",
    "last_in_order",
    "make_scheduling",
    "may_lose",
]
