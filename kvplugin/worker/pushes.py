"""Copies to a GPU that the host does not wait for, from memory that it goes on using.

    host      fill a | fill b | fill c | fill a again: only when push a has passed
    stream      push a --- step n --- push b --- step n+1 --- push c --- step n+2

A copy from pinned memory reads it when its turn comes, which may be long after it was
launched: so each push gets a buffer of its own, and a buffer is filled again only when
the event behind its push has been reached. With one buffer more than steps in flight
it has been long since, and nothing waits.
"""

from typing import Any, Protocol, TypeAlias

import torch

Event: TypeAlias = Any
"""A point in a stream's work; opaque."""


class PushApi(Protocol):
    """What pushes need of a device."""

    def staging(self, like: torch.Tensor) -> torch.Tensor:
        """Memory of the host, of this shape and dtype, that the device copies from by
        itself."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Put a copy on the current stream."""

    def record(self) -> Event:
        """A new event after all that is on the current stream."""

    def done(self, event: Event) -> bool:
        """Whether it has been reached."""

    def wait(self, event: Event) -> None:
        """Wait for it, on the host."""


class TorchPushes:
    """`PushApi` of a GPU.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def staging(self, like: torch.Tensor) -> torch.Tensor:
        """Pinned."""
        return torch.empty_like(like, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """On torch's current stream of the device."""
        with torch.cuda.device(self._device):
            target.copy_(source, non_blocking=True)

    def record(self) -> Event:
        """Without timing, which is the cheap kind."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def done(self, event: Event) -> bool:
        """Raises RuntimeError for any error of work before the event."""
        return event.query()

    def wait(self, event: Event) -> None:
        """Likewise."""
        event.synchronize()


class Ring:
    """Staging buffers that take turns.

    Args:
        api: the device's copies and events.
        like: what is pushed, at most.
        count: number of buffers: pushes that may be under way before one is waited
            for.
    """

    def __init__(self, api: PushApi, like: torch.Tensor, count: int) -> None:
        self._api = api
        self._buffers = [api.staging(like) for _ in range(count)]
        self._events: list[Event | None] = [None] * count
        self._next = 0

    def push(self, target: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy rows to the device; they may be changed when this returns."""
        place = self._next
        self._next = (place + 1) % len(self._buffers)
        event = self._events[place]
        if event is not None and not self._api.done(event):
            self._api.wait(event)
        staged = self._buffers[place][: len(rows)]
        staged.copy_(rows)
        self._api.copy(target, staged)
        self._events[place] = self._api.record()
