"""The step loop around the KV cache: queues, loads, preemption, recovery."""

from kvplugin.scheduler.config import SchedulerConfig
from kvplugin.scheduler.entry import Entry, Status
from kvplugin.scheduler.output import (
    CachedRequestData,
    ModelOutput,
    NewRequestData,
    RequestOutput,
    SchedulerOutput,
)
from kvplugin.scheduler.scheduler import Scheduler

__all__ = [
    "CachedRequestData",
    "Entry",
    "ModelOutput",
    "NewRequestData",
    "RequestOutput",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutput",
    "Status",
]
