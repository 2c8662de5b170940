"""A TCP connection that carries messages of the side channel; never blocks."""

import contextlib
import os
import socket
from typing import Final

from kvplugin.connectors.nixl.zmtp import Zmtp

_CHUNK: Final = 1 << 16
_KEEPALIVE: Final = {
    # A peer whose machine is gone without a word is noticed within a minute.
    "TCP_KEEPIDLE": 30,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 3,
}


class LostError(Exception):
    """The connection has ended; says why."""


class Stream:
    """A connected socket, or one that connects.

    Args:
        connection: non-blocking; the stream's from now on.
        zmtp: the state of the protocol on it.
    """

    def __init__(self, connection: socket.socket, zmtp: Zmtp) -> None:
        self._socket = connection
        self._zmtp = zmtp
        with contextlib.suppress(OSError):  # only the system's defaults are worse
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if option := getattr(socket, name, None):
                    connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def fileno(self) -> int:
        """For a poller."""
        return self._socket.fileno()

    @property
    def is_ready(self) -> bool:
        """The peer speaks the protocol, and has said so."""
        return self._zmtp.is_ready

    @property
    def is_ours(self) -> bool:
        """It is an end of a side channel; known when it is ready."""
        return self._zmtp.is_ours

    @property
    def unsent(self) -> int:
        """Bytes that the network has not taken yet."""
        return len(self._zmtp.output)

    def connected(self) -> None:
        """The socket is writable for the first time.

        Raises:
            LostError: because nobody listens.
        """
        if error := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise LostError(os.strerror(error).lower())

    def send(self, parts: list[bytes]) -> None:
        """Send a message, or as much of it as goes; see `flush` for the rest.

        Raises:
            LostError: to nobody.
        """
        self._zmtp.send(parts)
        self.flush()

    def flush(self) -> None:
        """Send what has not gone out yet.

        Raises:
            LostError: to nobody.
        """
        output = self._zmtp.output
        while output:
            try:
                sent = self._socket.send(output[: 4 * _CHUNK])
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise LostError(str(error)) from error
            del output[:sent]

    def receive(self) -> None:
        """Take a chunk from the network; its messages are `next_message`'s.

        Raises:
            LostError: nothing will come any more.
        """
        try:
            data = self._socket.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise LostError(str(error)) from error
        if not data:
            raise LostError("closed by the peer")
        self._zmtp.feed(data)

    def next_message(self) -> list[bytes] | None:
        """The frames of a message that has arrived; None: receive more.

        Raises:
            IntegrityError: the peer speaks something else: close.
            LostError: the connection has ended.
        """
        message = self._zmtp.next_message()
        self.flush()  # what the protocol itself has to say
        return message

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(OSError):
            self._socket.close()
