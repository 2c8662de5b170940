"""A transport for copies inside one process: a thread, loads before stores.

The thread may fail its jobs in two ways that a job's own error is not:

- It *dies*: something that is no `Exception` goes through it, or the process forked.
  The job that it held ends as failed, and the queue goes on in a new thread.
- It *hangs* in a copy. Nothing can end a call into native code, so the job goes on,
  overdue, and its blocks stay referenced. The queue goes on beside it: jobs under way
  have no block in common (what one reads or writes is referenced or pinned for it
  alone until it ends), so another thread may do them. Should the call return, its job
  ends with what came of it, and its thread with it.
"""

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from kvplugin.contract import CopyJob, CopyResult

logger = logging.getLogger("vllm.kvplugin.offload")

HANG_SECONDS: Final = 10.0
"""After which a copy is taken to hang: far beyond any. A slow one that is taken so
costs a second thread and nothing else."""

MAX_THREADS: Final = 4
"""That may hang, the last one included: then the queue waits."""

MOST_SECONDS: Final = 30.0
"""How long anybody waits for all copies under way to end, so as to close or to drain:
far beyond any queue, so that a hang ends as a report."""

_LOOK_SECONDS: Final = 0.5
"""Between two looks after the thread while waiting: the dead do not notify."""


class _Worker:
    """A thread and the job it holds."""

    def __init__(self, run: Callable[["_Worker"], None], number: int) -> None:
        self.job: CopyJob | None = None
        self.since = 0.0
        """When it took the job."""
        self.reason = ""
        """What killed it, where it could say so."""
        self.is_hung = False
        """It takes no more jobs."""
        self.has_left = False
        """It has ended as it should."""
        self.thread = threading.Thread(
            target=run, args=(self,), name=f"kvplugin-offload-{number}", daemon=True
        )

    @property
    def is_dead(self) -> bool:
        """It has ended, whether it could say so or not."""
        return bool(self.reason) or not self.thread.is_alive()


class CopyThread:
    """Implements `kvplugin.contract.Transport`.

    Each job is one call of `execute`, which must leave the GIL while it copies: an
    engine that polls without sleeping would otherwise keep this thread waiting some
    five milliseconds a call. `submit` and `poll` look after the thread.

    Args:
        execute: copies the blocks of a job and returns the bytes copied; what it
            raises becomes the error of the job's result. Called from several threads
            at once if one hangs.
        clock: monotonic seconds, by which a copy hangs.
        close_seconds: how long `close` waits at most.
    """

    def __init__(
        self,
        execute: Callable[[CopyJob], int],
        *,
        clock: Callable[[], float] = time.monotonic,
        close_seconds: float = MOST_SECONDS,
    ) -> None:
        self._execute = execute
        self._clock = clock
        self._close_seconds = close_seconds
        self._condition = threading.Condition()
        self._queue: list[tuple[bool, int, CopyJob]] = []
        self._arrivals = itertools.count()
        self._under_way = 0
        self._results: list[CopyResult] = []
        self._closed = False
        self._numbers = itertools.count(1)
        self._hung: list[_Worker] = []
        self._worker: _Worker | None = None

    def submit(self, job: CopyJob) -> None:
        """Queue a job; a load overtakes stores that have not begun.

        Raises:
            RuntimeError: the transport is closed.
        """
        with self._condition:
            if self._closed:
                raise RuntimeError("the transport is closed")
            heapq.heappush(self._queue, (job.store, next(self._arrivals), job))
            self._under_way += 1
            self._look_after()
            self._condition.notify_all()

    def poll(self, wait: float) -> list[CopyResult]:
        """Results since the last call, after at most `wait` seconds; a copy that hangs
        is not waited for."""
        with self._condition:
            self._look_after()
            self._wait_while(self._is_copying, wait)
            results, self._results = self._results, []
        return results

    def close(self) -> None:
        """Finish what is queued and stop. What does not end in time is logged; what
        had not begun by then ends as failed. Again: does nothing."""
        with self._condition:
            if self._closed:
                return
            self._closed = True
            self._condition.notify_all()
            self._look_after()
            self._wait_while(lambda: self._under_way > 0, self._close_seconds)
            self._drop_queue("the copy thread was closed")
            if self._under_way:
                logger.error("%d copies do not end: left as they are", self._under_way)
            worker = self._worker
        if worker is not None and worker.job is None:  # it has nothing left to do
            worker.thread.join(self._close_seconds)

    def _wait_while(self, condition: Callable[[], bool], wait: float) -> None:
        """For `wait` seconds at most."""
        end = time.monotonic() + wait
        while condition() and (left := end - time.monotonic()) > 0:
            self._condition.wait(min(left, _LOOK_SECONDS))
            self._look_after()

    def _is_copying(self) -> bool:
        """Whether a copy is under way that does not hang."""
        worker = self._worker
        if worker is not None and self._takes_long(worker):
            return False
        return self._under_way > len(self._hung)

    # -- who copies ----------------------------------------------------------------

    def _look_after(self) -> None:
        """Replace a thread that died, or that hangs while others wait for it."""
        self._hung = [worker for worker in self._hung if not self._has_left(worker)]
        worker = self._worker
        if worker is not None and worker.is_dead:
            self._bury(worker)
            self._worker = None
        elif worker is not None and self._queue and self._is_to_be_left(worker):
            logger.error("a copy does not end: others go on beside it")
            worker.is_hung = True
            self._hung.append(worker)
            self._worker = None
        if self._worker is None and self._queue:
            self._worker = self._start()

    def _is_to_be_left(self, worker: _Worker) -> bool:
        return self._takes_long(worker) and len(self._hung) + 1 < MAX_THREADS

    def _takes_long(self, worker: _Worker) -> bool:
        return worker.job is not None and self._clock() - worker.since > HANG_SECONDS

    def _has_left(self, worker: _Worker) -> bool:
        """Whether a thread that hung is gone at last."""
        if worker.is_dead:
            self._bury(worker)
        return worker.job is None

    def _bury(self, worker: _Worker) -> None:
        """End the job of a thread that died."""
        if worker.has_left and worker.job is None:
            return  # of old age
        reason = f"the copy thread died: {worker.reason or 'nothing says why'}"
        logger.error("%s; another one goes on", reason)
        job, worker.job = worker.job, None
        if job is not None:
            self._end(CopyResult(job.id, error=reason))

    def _start(self) -> _Worker | None:
        worker = _Worker(self._run, next(self._numbers))
        try:
            worker.thread.start()
        except RuntimeError as error:  # the system has no more threads
            self._drop_queue(f"no copy thread: {error}")
            return None
        return worker

    def _drop_queue(self, reason: str) -> None:
        while self._queue:
            self._end(CopyResult(heapq.heappop(self._queue)[2].id, error=reason))

    # -- what the thread does ------------------------------------------------------

    def _run(self, worker: _Worker) -> None:
        try:
            while (job := self._next(worker)) is not None:
                result = self._copy(job)
                with self._condition:
                    worker.job = None
                    self._end(result)
        except BaseException as error:
            self._die(worker, f"{type(error).__name__}: {error}")

    def _next(self, worker: _Worker) -> CopyJob | None:
        with self._condition:
            self._condition.wait_for(
                lambda: self._queue or self._closed or worker.is_hung
            )
            if worker.is_hung or not self._queue:
                worker.has_left = True
                return None
            worker.job, worker.since = heapq.heappop(self._queue)[2], self._clock()
            return worker.job

    def _copy(self, job: CopyJob) -> CopyResult:
        start = time.perf_counter()
        try:
            nbytes = self._execute(job)
        except Exception as error:
            return CopyResult(job.id, error=f"{type(error).__name__}: {error}")
        return CopyResult(job.id, nbytes=nbytes, seconds=time.perf_counter() - start)

    def _end(self, result: CopyResult) -> None:
        self._results.append(result)
        self._under_way -= 1
        self._condition.notify_all()

    def _die(self, worker: _Worker, reason: str) -> None:
        with self._condition:
            worker.reason = reason
            self._condition.notify_all()
