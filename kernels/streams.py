"""Copies on side streams of a GPU, ordered by events: the step never waits.

    compute  --step n-----*--step n+1----------   events only, no waits, no host sync
                          |(event)
    store                 +--copy out--*          reads what step n wrote
    load                  +--copy in---*          overwrites what step n read last
                                       `- polled: the host learns that it ended

A store reads blocks that the step has written, a load overwrites blocks that a step
may still be reading (the pool gave them away when their last step was launched, not
when it ended). So both begin after an event of the compute stream. Nothing on the
compute stream waits for either: blocks under copy stay referenced until `poll` has
said that the copy ended, and what is launched after that needs no more order.

Each direction has one stream, hence copies of one direction run in the order of
submission, and end in it; the two directions run side by side.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

MAX_IN_FLIGHT: Final = 8
"""Copies of a direction that are launched at once: enough that a stream does not run
dry between two steps, few enough that little is queued before a late load. Not
tuned."""

CLOSE_SECONDS: Final = 30.0
"""How long `close` waits: far beyond any copy, so that a hang ends as a report."""

_POLL_SECONDS: Final = 1e-3
"""Between two looks while closing."""


class Direction(StrEnum):
    """Which way bytes go."""

    LOAD = "load"
    """Host to device."""
    STORE = "store"
    """Device to host."""


Stream: TypeAlias = Any
"""Work that runs in order; opaque."""
Event: TypeAlias = Any
"""A point in a stream's work; opaque."""


class StreamApi(Protocol):
    """What copies need of a device's streams. Nothing here waits on the host."""

    def new_stream(self) -> Stream:
        """A stream beside the one that computes."""

    def compute_stream(self) -> Stream:
        """The stream on which the calling thread launches its steps now."""

    def record(self, stream: Stream) -> Event:
        """A new event after all that is launched on the stream so far."""

    def wait(self, stream: Stream, event: Event) -> None:
        """What is launched on the stream from now on begins after the event."""

    def done(self, event: Event) -> bool:
        """Whether the event has been reached; raises what the device reports."""

    def run(self, stream: Stream, launch: Callable[[], int]) -> int:
        """Call `launch` so that what it launches goes to the stream."""


Keep: TypeAlias = Callable[[object], None]
"""Holds on to an object until the copy has ended."""

CopyWork: TypeAlias = Callable[[Keep], int]
"""Launches a copy's kernels on the current stream and returns its bytes.

It hands every buffer that the device uses for this copy alone (staging, ids) to `Keep`
before it launches what uses it: freed earlier, its memory could go to another stream
while this one still reads it. It must not synchronise, and what it sends to the device
must come from pinned memory: a copy from other memory waits, on the host, for all that
the stream waits for, which here is the step.
"""


@dataclass(frozen=True, eq=False)
class CopyHandle:
    """A copy that was taken; each is itself alone."""

    direction: Direction


class CopyEnd(NamedTuple):
    """How a copy ended. Nothing of a failed one may be used."""

    handle: CopyHandle
    error: str = ""
    """Empty: every byte is where it should be."""
    nbytes: int = 0


class Closed(NamedTuple):
    """What `close` found."""

    ended: list[CopyEnd]
    outstanding: list[CopyHandle]
    """Still under way: their blocks must not be used for anything else."""


@dataclass
class _Copy:
    handle: CopyHandle
    after: Event = None
    """None: it was never let go, so nothing of it runs."""
    event: Event = None
    """Behind all of it. None: nothing says yet when it ends."""
    error: str = ""
    nbytes: int = 0
    kept: list[object] = field(default_factory=list)


class CopyStreams:
    """Runs copies on two side streams.

    The contract, with the caller's part in it:

    - `submit` when the step that a store reads from, or that used a load's targets
      last, has been launched. Blocks of a copy stay referenced, and nobody writes to a
      source or touches a target, until `poll` returns its handle.
    - Every handle that `submit` gave comes back from `poll` or `close` once, whatever
      fails. One that failed comes back when nothing of it runs any more, so that its
      blocks can be used again.
    - Nothing is ever waited for on the host except in `close`.

    Not thread-safe: all calls come from the thread that launches the steps, whose
    current stream is the compute stream. Not while that stream is being captured into
    a graph.

    Args:
        api: the device's streams.
        in_flight: copies of one direction that may be under way, positive.
        sleep: how `close` passes time, from seconds.

    Raises:
        ValueError: `in_flight` is not positive.
    """

    def __init__(
        self,
        api: StreamApi,
        *,
        in_flight: int = MAX_IN_FLIGHT,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if in_flight < 1:
            raise ValueError(f"in_flight {in_flight} is not positive")
        self._api = api
        self._in_flight = in_flight
        self._sleep = sleep
        self._streams = {direction: api.new_stream() for direction in Direction}
        self._copies: dict[Direction, list[_Copy]] = {d: [] for d in Direction}
        self._closed = False

    def mark(self) -> Event:
        """The compute stream's work so far, to be given to several `submit`."""
        return self._api.record(self._api.compute_stream())

    def has_room(self, direction: Direction) -> bool:
        """Whether `submit` would take a copy now."""
        return len(self._copies[direction]) < self._in_flight

    def submit(
        self, work: CopyWork, direction: Direction, after: Event | None = None
    ) -> CopyHandle | None:
        """Launch a copy behind the compute stream.

        Args:
            work: launches it; called at once, once. What it raises becomes the error
                of the handle.
            direction: which way.
            after: from a `mark` that came after that step; None for all that is on
                the compute stream now.

        Returns:
            The handle; None if as many as may be are under way (not now: poll, and
            submit it again).

        Raises:
            RuntimeError: the streams are closed.
        """
        if self._closed:
            raise RuntimeError("the copy streams are closed")
        if not self.has_room(direction):
            return None
        copy = _Copy(CopyHandle(direction))
        self._copies[direction].append(copy)
        self._launch(copy, work, after)
        return copy.handle

    def _launch(self, copy: _Copy, work: CopyWork, after: Event | None) -> None:
        stream = self._streams[copy.handle.direction]
        try:
            after = self.mark() if after is None else after
            self._api.wait(stream, after)
        except Exception as error:
            copy.error = _reason(error)
            return
        copy.after = after
        try:
            copy.nbytes = self._api.run(stream, lambda: work(copy.kept.append))
        except Exception as error:
            copy.error = _reason(error)
        # Also after a failure: what was launched before it still runs.
        self._record(copy)

    def _record(self, copy: _Copy) -> None:
        try:
            copy.event = self._api.record(self._streams[copy.handle.direction])
        except Exception as error:
            copy.error = copy.error or _reason(error)

    def poll(self) -> list[CopyEnd]:
        """Copies that ended since the last call, without waiting."""
        ends = []
        for direction, copies in self._copies.items():
            going = []
            for copy in copies:
                if self._has_ended(copy):
                    nbytes = 0 if copy.error else copy.nbytes
                    ends.append(CopyEnd(copy.handle, copy.error, nbytes))
                else:
                    going.append(copy)
            self._copies[direction] = going
        return ends

    def _has_ended(self, copy: _Copy) -> bool:
        if copy.after is None:
            return True
        if copy.event is None:
            # A later event serves too. Without any, the copy may still be writing.
            self._record(copy)
        try:
            known = copy.after if copy.event is None else copy.event
            reached = self._api.done(known)
        except Exception as error:
            # Devices answer so when their context is lost, and with it all work.
            copy.error = copy.error or _reason(error)
            return True
        return reached and copy.event is not None

    def close(self, timeout: float = CLOSE_SECONDS) -> Closed:
        """Take no more copies, and wait for those under way.

        Args:
            timeout: seconds to wait at most. What has not ended then is reported,
                and its buffers live as long as this object.
        """
        self._closed = True
        ends = self.poll()
        for _ in range(round(timeout / _POLL_SECONDS)):
            if not any(self._copies.values()):
                break
            self._sleep(_POLL_SECONDS)
            ends += self.poll()
        return Closed(
            ends, [copy.handle for copies in self._copies.values() for copy in copies]
        )


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
