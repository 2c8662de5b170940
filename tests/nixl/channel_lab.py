"""Two ends of a side channel for tests: real sockets, answers that are known."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvplugin.connectors.nixl import wire
from kvplugin.connectors.nixl.channel import Reply
from kvplugin.connectors.nixl.client import ChannelClient
from kvplugin.connectors.nixl.server import ChannelServer

SECRET = b"an old and well kept secret of ours"
PATIENCE_S = 50.0
"""Limit of a wait that takes milliseconds, or the five seconds of a deadline."""


class Answers:
    """Answers at once, and remembers what it was asked."""

    def __init__(self, engine_id: str = "engine") -> None:
        self.engine_id = engine_id
        self.asked: list[wire.Question] = []
        self.lock = threading.Lock()

    def describe(self) -> wire.Description:
        self._note(wire.Describe())
        return wire.Description(descriptor=self.engine_id.encode())

    def open(self, question: wire.Open) -> wire.Granted | wire.Gone:
        self._note(question)
        if question.peer_id != self.engine_id:
            return wire.Gone(reason=f"this is {self.engine_id}")
        return wire.Granted(
            num_tokens=4096,
            block_ids=[list(range(1, 257))],
            generations=[list(range(1000, 1256))],
            token_digests=[question.lease.encode()],
            seconds=30.0,
        )

    def renew(self, question: wire.Renew) -> wire.Renewed:
        self._note(question)
        return wire.Renewed(gone=[le for le, _ in question.leases if "gone" in le])

    def close(self, question: wire.Close) -> wire.Closed:
        self._note(question)
        return wire.Closed()

    def status(self) -> wire.Health:
        self._note(wire.Status())
        return wire.Health(
            engine_id=self.engine_id, role="both", leases=0, overdue_blocks=0, peers={}
        )

    def _note(self, question: wire.Question) -> None:
        with self.lock:
            self.asked.append(question)

    def of(self, kind: type) -> list[wire.Question]:
        """Questions of a kind so far."""
        with self.lock:
            return [question for question in self.asked if isinstance(question, kind)]


class Clock:
    """Time that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def serving(
    answers: Answers | None = None, *, secret: bytes = SECRET, port: int = 0
) -> Iterator[ChannelServer]:
    server = ChannelServer("127.0.0.1", port, answers or Answers(), secret=secret)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def asking(
    *,
    secret: bytes = SECRET,
    insecure: bool = False,
    clock: Callable[[], float] = time.monotonic,
    max_peers: int = 256,
) -> Iterator[ChannelClient]:
    client = ChannelClient(
        secret=secret, insecure=insecure, clock=clock, max_peers=max_peers
    )
    try:
        yield client
    finally:
        client.close()


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until it is true."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.002)


def replies_to(client: ChannelClient, tickets: list[int]) -> dict[int, Reply]:
    """Wait for the replies to these tickets; there must be no others."""
    replies: dict[int, Reply] = {}

    def all_there() -> bool:
        for reply in client.take():
            assert reply.ticket in tickets
            assert reply.ticket not in replies, "two replies to one question"
            replies[reply.ticket] = reply
        return len(replies) == len(tickets)

    eventually(all_there)
    return replies


def ask(
    client: ChannelClient,
    address: str,
    question: wire.Question | None = None,
    timeout: float = 5.0,
) -> Reply:
    """Ask, and wait for the reply."""
    ticket = client.ask(address, question or wire.Describe(), timeout)
    return replies_to(client, [ticket])[ticket]


def open_lease(lease: str = "lease", reader: str = "reader") -> wire.Open:
    return wire.Open(peer_id="engine", lease=lease, reader=reader)


class Wiretap:
    """A peer without manners: says greeting and READY, then whatever it is told."""

    def __init__(self, connection: socket.socket, kind: bytes = b"DEALER") -> None:
        connection.settimeout(PATIENCE_S)
        self.socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0")
        ready = b"\x05READY\x0bSocket-Type\0\0\0\x06" + kind
        self.socket.sendall(greeting + bytes(32) + bytes((4, len(ready))) + ready)
        self._received = b""
        self._take(64)
        self._take(self._take(2)[1])

    @classmethod
    def to(cls, address: str) -> "Wiretap":
        """A connection to a server."""
        host, _, port = address.rpartition(":")
        return cls(socket.create_connection((host, int(port)), PATIENCE_S))

    def _take(self, count: int) -> bytes:
        while len(self._received) < count:
            data = self.socket.recv(1 << 16)
            if not data:
                raise ConnectionResetError("closed")
            self._received += data
        taken, self._received = self._received[:count], self._received[count:]
        return taken

    def send(self, *parts: bytes) -> None:
        for index, part in enumerate(parts):
            more = index < len(parts) - 1
            self.socket.sendall(
                bytes((2 | more,)) + struct.pack(">Q", len(part)) + part
            )

    def receive(self) -> list[bytes]:
        parts, more = [], True
        while more:
            flags, size = self._take(2)
            if flags & 2:
                size = int.from_bytes(bytes((size,)) + self._take(7), "big")
            parts.append(self._take(size))
            more = bool(flags & 1)
        return parts

    def close(self) -> None:
        self.socket.close()


class Impostor:
    """A server that answers with what a test likes."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.settimeout(PATIENCE_S)
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"

    def accept(self) -> Wiretap:
        return Wiretap(self._socket.accept()[0], b"ROUTER")

    def close(self) -> None:
        self._socket.close()
