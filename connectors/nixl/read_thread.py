"""Threads that read from peers, one a peer.

A thread a peer, so that one which hangs holds up nobody else; several orders of a peer
at once, as long as they wait for its network. Nothing but the peer's thread calls into
NIXL or the kernel for it: planning, connecting and posting take time, and a step has
none. A thread takes the GIL for short pieces of Python between long calls without it.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from kvplugin.connectors.nixl.connection import Connection
from kvplugin.connectors.nixl.messages import Completion, ReadOrder
from kvplugin.connectors.nixl.peer_thread import Job, PeerThread, failed
from kvplugin.connectors.nixl.staging import Staging

logger = logging.getLogger("vllm.kvplugin.nixl")

CLOSE_SECONDS: Final = 10.0
"""How long closing waits for all reads: more than any takes that does not hang."""


class Reads(Protocol):
    """Reads from other engines, without keeping the caller waiting."""

    def meet(self, peer_id: str, descriptor: bytes) -> None:
        """A peer that orders may name from now on."""

    def leave(self, peer_id: str) -> None:
        """No order will name it; those under way go on until they end."""

    def submit(self, order: ReadOrder, after: Callable[[], None]) -> None:
        """Read from a peer that was met; what is written to our blocks is written
        after this call has returned, once `after` has, which may wait."""

    def stop(self, ids: Iterable[int]) -> None:
        """Nobody waits for these orders: they may end early."""

    def poll(self, wait: float) -> list[Completion]:
        """How orders ended since the last call, each once; waits for one at most so
        many seconds while any is under way."""

    def close(self) -> bool:
        """End what can be ended; whether nothing is left that might write."""


class ReadThreads:
    """Implements `Reads`.

    Args:
        connect: to a peer, from its encoded descriptor; what it raises becomes the
            error of the orders.
        staging: this rank's.
        clock: monotonic seconds.
        close_seconds: how long `close` waits at most.
    """

    def __init__(
        self,
        connect: Callable[[bytes], Connection],
        staging: Staging,
        *,
        clock: Callable[[], float] = time.monotonic,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self._connect = connect
        self._staging = staging
        self._clock = clock
        self._close_seconds = close_seconds
        self._condition = threading.Condition()
        self._completions: list[Completion] = []
        self._under_way: dict[int, PeerThread] = {}
        self._peers: dict[str, PeerThread] = {}
        self._leaving: list[PeerThread] = []

    def meet(self, peer_id: str, descriptor: bytes) -> None:
        """A peer that orders may name from now on."""
        if peer_id in self._peers:
            return
        self._forget_dead()
        before = [peer for peer in self._leaving if peer.peer_id == peer_id]
        self._peers[peer_id] = PeerThread(
            peer_id,
            lambda: self._connect(descriptor),
            self._staging,
            self._ended,
            self._clock,
            before,
        )

    def leave(self, peer_id: str) -> None:
        """No order will name it any more."""
        peer = self._peers.pop(peer_id, None)
        if peer is not None:
            peer.leave()
            self._leaving.append(peer)
        self._forget_dead()

    def _forget_dead(self) -> None:
        self._leaving = [peer for peer in self._leaving if peer.is_alive]

    def submit(self, order: ReadOrder, after: Callable[[], None]) -> None:
        """Queue a read for the peer's thread."""
        peer = self._peers[order.peer_id]
        with self._condition:
            self._under_way[order.id] = peer
        if why := peer.submit(Job(order, after)):
            self._ended(failed(order.id, why))

    def stop(self, ids: Iterable[int]) -> None:
        """Let these orders end early."""
        for order_id in ids:
            with self._condition:
                peer = self._under_way.get(order_id)
            if peer is not None:
                peer.stop(order_id)

    def _ended(self, completion: Completion) -> None:
        with self._condition:
            self._under_way.pop(completion.id, None)
            self._completions.append(completion)
            self._condition.notify_all()

    def poll(self, wait: float) -> list[Completion]:
        """How orders ended since the last call."""
        with self._condition:
            if wait > 0:
                self._condition.wait_for(
                    lambda: self._completions or not self._under_way, wait
                )
            completions, self._completions = self._completions, []
        return completions

    def close(self) -> bool:
        """Stop all threads. What does not end in time is logged and left to its
        thread. Again: waits again for what is left."""
        for peer_id in list(self._peers):
            self.leave(peer_id)
        with self._condition:
            under_way = list(self._under_way)
        self.stop(under_way)
        end = time.monotonic() + self._close_seconds
        for peer in self._leaving:
            peer.join(max(0.0, end - time.monotonic()))
        self._forget_dead()
        for peer in self._leaving:
            logger.error("reads from %s do not end: left as they are", peer.peer_id)
        return not self._leaving
