"""A transport for copies inside one process: one thread, loads before stores."""

import heapq
import itertools
import threading
import time
from collections.abc import Callable

from kvplugin.contract import CopyJob, CopyResult


class CopyThread:
    """Implements `kvplugin.contract.Transport`.

    Each job is one call of `execute`, which must leave the GIL while it copies: an
    engine that polls without sleeping would otherwise keep this thread waiting some
    five milliseconds a call.

    Args:
        execute: copies the blocks of a job and returns the bytes copied; what it
            raises becomes the error of the job's result.
    """

    def __init__(self, execute: Callable[[CopyJob], int]) -> None:
        self._execute = execute
        self._condition = threading.Condition()
        self._queue: list[tuple[bool, int, CopyJob]] = []
        self._arrivals = itertools.count()
        self._under_way = 0
        self._results: list[CopyResult] = []
        self._closed = False
        self._thread = threading.Thread(
            target=self._run, name="kvplugin-offload", daemon=True
        )
        self._thread.start()

    def submit(self, job: CopyJob) -> None:
        """Queue a job; a load overtakes stores that have not begun."""
        with self._condition:
            if self._closed:
                raise RuntimeError("the transport is closed")
            heapq.heappush(self._queue, (job.store, next(self._arrivals), job))
            self._under_way += 1
            self._condition.notify_all()

    def poll(self, wait: float) -> list[CopyResult]:
        """Results since the last call, after at most `wait` seconds."""
        with self._condition:
            if self._under_way and wait > 0:
                self._condition.wait_for(lambda: not self._under_way, timeout=wait)
            results, self._results = self._results, []
        return results

    def close(self) -> None:
        """Finish what is queued and stop."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            result = self._copy(job)
            with self._condition:
                self._results.append(result)
                self._under_way -= 1
                self._condition.notify_all()

    def _next(self) -> CopyJob | None:
        with self._condition:
            self._condition.wait_for(lambda: self._queue or self._closed)
            return heapq.heappop(self._queue)[2] if self._queue else None

    def _copy(self, job: CopyJob) -> CopyResult:
        start = time.perf_counter()
        try:
            nbytes = self._execute(job)
        except Exception as error:
            return CopyResult(job.id, error=f"{type(error).__name__}: {error}")
        return CopyResult(job.id, nbytes=nbytes, seconds=time.perf_counter() - start)
