"""A transport for copies between a device and the host: side streams, no waits.

A job is submitted when the step that it must not disturb has been launched: for a
store the one that wrote its blocks, for a load all that may still read what its blocks
held before. So an event of the compute stream at that moment is what its copy waits
for, on the device; whether engines start loads before their forward (vLLM 0.19) or
behind it (0.32) makes no difference, as nobody in that step uses a load's blocks.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from kvplugin.contract import CopyJob, CopyResult
from kvplugin.kernels.streams import (
    CLOSE_SECONDS,
    CopyEnd,
    CopyHandle,
    CopyStreams,
    Direction,
    Event,
    Keep,
)

logger = logging.getLogger("vllm.kvplugin.offload")

Launch: TypeAlias = Callable[[CopyJob, Keep], int]
"""Launches a job's copies on the current stream, as `kernels.streams.CopyWork` says;
the bytes."""

_LOOK_SECONDS: Final = 1e-3
"""Between two looks while waiting."""


@dataclass(frozen=True, slots=True)
class _Queued:
    job: CopyJob
    after: Event


@dataclass(frozen=True, slots=True)
class _Launched:
    job: CopyJob
    since: float


class StreamTransport:
    """Implements `kvplugin.contract.Transport` over `CopyStreams`.

    As many copies of a direction as these take are launched at once; others wait for
    room in the order of their submission. A load never waits for stores: each
    direction has room of its own. Not thread-safe: all calls come from the thread that
    launches the steps. Only `close`, and a `poll` that is to wait, wait on the host.

    Args:
        streams: who runs copies; nobody else uses them.
        launch: launches the copies of a job; what it raises becomes the error of the
            job's result.
        clock: monotonic seconds. A copy's are counted from its launch to the poll that
            finds it ended, its wait for the step included.
        sleep: how waiting passes time, from seconds.
        close_seconds: how long `close` waits at most.
    """

    def __init__(
        self,
        streams: CopyStreams,
        launch: Launch,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self._streams = streams
        self._launch = launch
        self._clock = clock
        self._sleep = sleep
        self._close_seconds = close_seconds
        self._queues: dict[Direction, deque[_Queued]] = {d: deque() for d in Direction}
        self._launched: dict[CopyHandle, _Launched] = {}
        self._results: list[CopyResult] = []
        self._closed = False

    @property
    def outstanding(self) -> int:
        """Jobs that have not ended."""
        return len(self._launched) + sum(map(len, self._queues.values()))

    def submit(self, job: CopyJob) -> None:
        """Launch a job, or queue it until there is room.

        Raises:
            RuntimeError: the transport is closed.
        """
        if self._closed:
            raise RuntimeError("the transport is closed")
        try:
            after = self._streams.mark()
        except Exception as error:  # nothing of the job runs
            reason = f"{type(error).__name__}: {error}"
            self._results.append(CopyResult(job.id, error=reason))
            return
        direction = Direction.STORE if job.store else Direction.LOAD
        self._queues[direction].append(_Queued(job, after))
        self._fill()

    def poll(self, wait: float) -> list[CopyResult]:
        """Results since the last call. It looks at events and waits for none, unless
        it is to wait."""
        self._collect()
        self._wait_for_all(wait)
        results, self._results = self._results, []
        return results

    def close(self) -> None:
        """Finish what is under way and stop. What does not end in time is logged, and
        stays `outstanding`; what had not begun by then ends as failed. Again: does
        nothing."""
        if self._closed:
            return
        self._closed = True
        self._collect()
        self._wait_for_all(self._close_seconds)
        for end in self._streams.close(timeout=0).ended:
            self._end(end)
        for queue in self._queues.values():
            while queue:
                job = queue.popleft().job
                self._results.append(
                    CopyResult(job.id, error="the streams were closed")
                )
        if self._launched:
            logger.error("%d copies do not end: left as they are", len(self._launched))

    def _wait_for_all(self, wait: float) -> None:
        for _ in range(math.ceil(wait / _LOOK_SECONDS)):
            if not self.outstanding:
                return
            self._sleep(_LOOK_SECONDS)
            self._collect()

    def _collect(self) -> None:
        for end in self._streams.poll():
            self._end(end)
        self._fill()

    def _end(self, end: CopyEnd) -> None:
        launched = self._launched.pop(end.handle)
        seconds = 0.0 if end.error else self._clock() - launched.since
        self._results.append(
            CopyResult(launched.job.id, end.error, end.nbytes, seconds)
        )

    def _fill(self) -> None:
        """Launch what has waited for room."""
        for direction, queue in self._queues.items():
            while queue and self._streams.has_room(direction):
                job, after = queue[0].job, queue[0].after
                handle = self._streams.submit(
                    partial(self._launch, job), direction, after
                )
                if handle is None:
                    break
                queue.popleft()
                self._launched[handle] = _Launched(job, self._clock())
