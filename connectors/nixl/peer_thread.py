"""The thread that reads from one peer."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Final, NamedTuple, TypeAlias

from kvplugin.connectors.nixl.connection import Connection
from kvplugin.connectors.nixl.messages import Completion, ReadOrder
from kvplugin.connectors.nixl.read_job import ReadJob
from kvplugin.connectors.nixl.staging import Staging

logger = logging.getLogger("vllm.kvplugin.nixl")

IN_FLIGHT: Final = 4
"""Orders of one peer under way at once."""

_LEAST_WAIT: Final = 0.0002
_MOST_WAIT: Final = 0.01
"""Seconds between two looks at a transfer, growing with the time nothing happens."""

Steps: TypeAlias = Generator[bool, None, Completion | None]
"""True: it goes on at once. False: it waits for something. None at its end: the end has
been said already."""


class Job(NamedTuple):
    """An order, and what must be waited for before its first byte is written."""

    order: ReadOrder
    after: Callable[[], None]


class PeerThread:
    """The thread of one peer; it starts with its first order.

    Args:
        peer_id: the peer's.
        connect: to it.
        staging: this rank's.
        ended: told how each order ended.
        clock: monotonic seconds.
        before: threads of the same peer that are about to end.
    """

    def __init__(
        self,
        peer_id: str,
        connect: Callable[[], Connection],
        staging: Staging,
        ended: Callable[[Completion], None],
        clock: Callable[[], float],
        before: Iterable["PeerThread"],
    ) -> None:
        self.peer_id = peer_id
        self._connect = connect
        self._staging = staging
        self._ended = ended
        self._clock = clock
        self._before = tuple(before)
        self._condition = threading.Condition()
        self._queue: deque[Job] = deque()
        self._unbegun: set[int] = set()
        """Orders of which nothing was posted: in the queue, or waiting for the
        connection."""
        self._unwanted: set[int] = set()
        self._is_leaving = False
        self._connection: Connection | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"kvplugin-reads-{peer_id[-16:]}", daemon=True
        )

    @property
    def is_alive(self) -> bool:
        """Its thread has begun and not ended."""
        return self._thread.is_alive()

    def submit(self, job: Job) -> str:
        """Queue an order; why not, if not."""
        with self._condition:
            if not self.is_alive:
                try:
                    self._thread.start()
                except RuntimeError as error:  # the system has no more, or it died
                    return f"no thread to read with: {error}"
            self._queue.append(job)
            self._unbegun.add(job.order.id)
            self._condition.notify_all()
        return ""

    def stop(self, order_id: int) -> None:
        """Nobody waits for this order. One of which nothing was posted ends here: the
        thread may wait for ever for those before it, or for its connection."""
        is_unbegun = self._claim(order_id)
        with self._condition:
            if is_unbegun:
                rest = [job for job in self._queue if job.order.id != order_id]
                self._queue = deque(rest)
            else:
                self._unwanted.add(order_id)
            self._condition.notify_all()
        if is_unbegun:
            self._ended(failed(order_id, "nobody waits for it any more"))

    def _claim(self, order_id: int) -> bool:
        """Whether the caller is the one that begins the order, or ends it unbegun."""
        with self._condition:
            is_unbegun = order_id in self._unbegun
            self._unbegun.discard(order_id)
        return is_unbegun

    def leave(self) -> None:
        """End when the orders have."""
        with self._condition:
            self._is_leaving = True
            self._condition.notify_all()

    def join(self, seconds: float | None = None) -> None:
        """Wait for the thread's end, so long at most."""
        if self.is_alive:
            self._thread.join(seconds)

    # -- what the thread does ------------------------------------------------------

    def _run(self) -> None:
        for peer in self._before:  # it may be about to forget the same agent
            peer.join()
        active: list[_Active] = []
        moved_at = self._clock()
        has_moved = True
        while self._has_work(active, None if has_moved else moved_at):
            if has_moved := self._advance(active):
                moved_at = self._clock()
        if self._connection is not None:
            self._connection.close()

    def _has_work(self, active: "list[_Active]", moved_at: float | None) -> bool:
        """Wait for some, a little if those under way last moved then; False if there
        will be none."""
        with self._condition:
            while not (self._queue or active):
                if self._is_leaving:
                    return False
                self._condition.wait()
            can_begin = self._queue and len(active) < IN_FLIGHT
            if moved_at is not None and not can_begin:
                still = self._clock() - moved_at
                self._condition.wait(min(max(still / 8, _LEAST_WAIT), _MOST_WAIT))
            while self._queue and len(active) < IN_FLIGHT:
                job = self._queue.popleft()
                active.append(_Active(job.order.id, self._execute(job)))
        return True

    def _advance(self, active: "list[_Active]") -> bool:
        """Let each order go on until it waits; whether one did. The first in the row
        has the processor until then: two copies at once would both end late."""
        has_moved = False
        for one in list(active):
            try:
                while next(one.steps):
                    has_moved = True
                continue
            except StopIteration as end:
                completion = end.value
            except Exception as error:
                logger.exception("a read failed where none should")
                completion = failed(one.order_id, f"{type(error).__name__}: {error}")
            has_moved = True
            active.remove(one)
            self._unwanted.discard(one.order_id)
            if completion is not None:
                self._ended(completion)
        return has_moved

    def _execute(self, job: Job) -> Steps:
        """One order, from its turn on."""

        def is_unwanted() -> bool:
            return job.order.id in self._unwanted

        if job.order.id not in self._unbegun:
            return None
        connection, error = self._ready(job)
        if not self._claim(job.order.id):
            return None
        if connection is None:
            return failed(job.order.id, error)
        run = ReadJob(job.order, connection, self._staging, is_unwanted, self._clock)
        return (yield from run.run())

    def _ready(self, job: Job) -> tuple[Connection | None, str]:
        """Wait for what must be done before the first byte; or why it cannot be."""
        try:
            job.after()
            if self._connection is None:
                self._connection = self._connect()
        except Exception as error:
            return None, str(error) or type(error).__name__
        return self._connection, ""


class _Active(NamedTuple):
    order_id: int
    steps: Steps


def failed(order_id: int, error: str) -> Completion:
    """The end of an order that was not begun, or not as it should."""
    return Completion(order_id, error, 0, 0.0, False)
