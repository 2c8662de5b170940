"""Connections of the side channel's server, and what each may take.

Whoever reaches the port can open connections and send what he likes. So there is a
limit to their number, to what waits on each (one message in, some answers out), and to
how long a stranger may say nothing. A connection becomes *trusted* by its first
question that is signed as it should be; if there are too many, strangers go first.
"""

import errno
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from typing import Final

from kvplugin.connectors.nixl.address import resolve
from kvplugin.connectors.nixl.grumble import Grumble
from kvplugin.connectors.nixl.stream import LostError, Stream
from kvplugin.connectors.nixl.wake import Wake
from kvplugin.connectors.nixl.zmtp import Zmtp
from kvplugin.errors import ConfigError, IntegrityError

MAX_CONNECTIONS: Final = 512
STRANGER_S: Final = 15.0
"""A stranger who says nothing that makes sense for so long goes."""
_STRANGER_SAYS: Final = 64
"""Messages that are listened to before one must have been signed as it should be: each
takes time from the engine in the same process."""
_TURN: Final = 16
"""Messages of one connection that are answered before others have their turn."""
_MAX_UNSENT: Final = 1 << 20
"""With more bytes of answers waiting than this, a connection is not read."""
_UNREAD_S: Final = 60.0
"""A peer that does not read its answers for so long goes."""
_BACKLOG: Final = 512
_NO_FILES_S: Final = 0.05
"""Before the next look where the process has no files left."""
_LOOK_S: Final = 1.0
"""Between two looks for connections whose time is over."""


class Connection:
    """One peer of the server."""

    def __init__(self, stream: Stream, peer: str, now: float) -> None:
        self.stream = stream
        self.peer = peer
        """Its address, for the log."""
        self.is_trusted = False
        self.seen_at = now
        """When it last said something, or read what it was told."""
        self.said = 0
        """Messages so far."""
        self.has_more = False
        """Messages may be left that have arrived but not had their turn."""


class Listener:
    """A listening socket and its connections; used by one thread.

    Args:
        host: a name is looked up once.
        port: 0 for any that is free.
        wake: makes `messages` return.
        garbage: told what makes no sense.
        clock: monotonic seconds.
        max_bytes: of a message.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        wake: Wake,
        garbage: Grumble,
        clock: Callable[[], float],
        max_bytes: int,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._wake = wake
        self._garbage = garbage
        self._clock = clock
        self._max_bytes = max_bytes
        self._max_connections = max_connections
        self._connections: set[Connection] = set()
        self._looked_at = clock()
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(wake, selectors.EVENT_READ)

    def __len__(self) -> int:
        return len(self._connections)

    def messages(self) -> Iterator[tuple[Connection, list[bytes]]]:
        """Wait, and yield what has arrived: fairly, in bounded numbers."""
        backlog = [c for c in self._connections if c.has_more]
        patience = _LOOK_S if self._connections else None
        ready = self._selector.select(0 if backlog else patience)
        self._wake.clear()
        for connection in backlog:
            yield from self._messages_of(connection)
        for key, events in ready:
            if key.fileobj is self._socket:
                self._accept()
            elif key.data in self._connections:
                yield from self._serve(key.data, events)
        self._drop_the_silent()

    def send(self, connection: Connection, parts: list[bytes]) -> None:
        """Answer; nothing if the peer has left."""
        if connection not in self._connections:
            return
        try:
            connection.stream.send(parts)
        except LostError:
            self._drop(connection)
            return
        self._watch(connection)

    def trust(self, connection: Connection) -> None:
        """It has asked something that was signed as it should be."""
        connection.is_trusted = True
        connection.seen_at = self._clock()

    def close(self) -> None:
        """Every connection, and the socket."""
        for connection in list(self._connections):
            self._drop(connection)
        self._selector.close()
        self._socket.close()

    def _serve(
        self, connection: Connection, events: int
    ) -> Iterator[tuple[Connection, list[bytes]]]:
        try:
            if events & selectors.EVENT_WRITE:
                connection.stream.flush()
                connection.seen_at = self._clock()
            if events & selectors.EVENT_READ:
                connection.stream.receive()
        except LostError:
            self._drop(connection)
            return
        yield from self._messages_of(connection)

    def _messages_of(
        self, connection: Connection
    ) -> Iterator[tuple[Connection, list[bytes]]]:
        connection.has_more = False
        try:
            for _ in range(_TURN):
                if connection.stream.unsent > _MAX_UNSENT:
                    break
                message = connection.stream.next_message()
                if message is None:
                    break
                yield connection, message
                connection.said += 1
                if connection not in self._connections:
                    return
                if connection.said >= _STRANGER_SAYS and not connection.is_trusted:
                    raise IntegrityError("a stranger who asks nothing that is signed")
            else:
                connection.has_more = True
        except IntegrityError as error:
            self._garbage(f"from {connection.peer}: {error}")
            self._drop(connection)
            return
        except LostError:
            self._drop(connection)
            return
        self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        """Read from it unless it does not read; write to it if it can take more."""
        unsent = connection.stream.unsent
        events = selectors.EVENT_WRITE if unsent else 0
        if unsent <= _MAX_UNSENT:
            events |= selectors.EVENT_READ
        if self._selector.get_key(connection.stream).events != events:
            self._selector.modify(connection.stream, events, connection)

    def _accept(self) -> None:
        try:
            accepted, peer = self._socket.accept()
        except OSError as error:  # it has left already, or there are no more files
            self._garbage(f"no connection: {error}")
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._make_room(0)
                time.sleep(_NO_FILES_S)
            return
        self._make_room(self._max_connections)
        accepted.setblocking(False)
        stream = Stream(accepted, Zmtp("ROUTER", self._max_bytes))
        connection = Connection(stream, str(peer[0]), self._clock())
        self._connections.add(connection)
        self._selector.register(stream, selectors.EVENT_READ, connection)
        try:
            connection.stream.flush()
        except LostError:
            self._drop(connection)

    def _make_room(self, most: int) -> None:
        """Let the one go that has been silent for longest, strangers first."""
        if self._connections and len(self._connections) >= most:
            self._drop(
                min(self._connections, key=lambda c: (c.is_trusted, c.seen_at)),
            )

    def _drop_the_silent(self) -> None:
        now = self._clock()
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        for connection in list(self._connections):
            silent = now - connection.seen_at
            deaf = connection.stream.unsent and silent >= _UNREAD_S
            if deaf or (not connection.is_trusted and silent >= STRANGER_S):
                self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._selector.unregister(connection.stream)
        connection.stream.close()


def _listen(host: str, port: int) -> socket.socket:
    where = f"side_channel_host={host!r}, side_channel_port={port}"
    try:
        ip = resolve("0.0.0.0" if host == "*" else host)[0]  # noqa: S104 (checked)
        family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((str(ip), port))
            listening.listen(_BACKLOG)
            listening.setblocking(False)
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"{where}: the port is taken. Another engine on this machine? Give "
                "each its own side_channel_port. What a killed one has left? End it"
            ) from error
        raise ConfigError(f"{where}: cannot listen there: {error}") from error
    return listening
