"""A connection to one peer, made again when it is lost, and the conversation on it."""

import errno
import math
import select
import socket
from typing import Final

from kvplugin.connectors.nixl import frames
from kvplugin.connectors.nixl.conversation import Conversation
from kvplugin.connectors.nixl.grumble import Grumble
from kvplugin.connectors.nixl.names import Endpoint
from kvplugin.connectors.nixl.stream import LostError, Stream
from kvplugin.connectors.nixl.zmtp import Zmtp
from kvplugin.errors import IntegrityError

CONNECT_S: Final = 2.0
"""After which a peer that is there should have said which protocol it speaks."""
RETRY_S: Final = 0.1
"""Before a connection is tried again at first; then twice as long each time."""
MAX_RETRY_S: Final = 1.0
_REFUSED: Final = 2
"""Attempts in a row that found nobody, after which nobody is taken to be there."""
_TURN: Final = 64
"""Messages of a peer that are looked at before others have their turn."""
_MAX_UNSENT: Final = 1 << 20
"""With more bytes waiting than this, nothing more is sent."""


class Link:
    """One peer.

    Args:
        conversation: with it.
        address: for messages.
        garbage: told what makes no sense.
    """

    def __init__(
        self, conversation: Conversation, address: str, garbage: Grumble
    ) -> None:
        self.conversation = conversation
        self.used_at = 0.0
        """When the engine last wanted something of it."""
        self._address = address
        self._garbage = garbage
        self._endpoint: Endpoint | None = None
        self._stream: Stream | None = None
        self._is_connecting = False
        self._since = 0.0
        """When the attempt under way began."""
        self._retry_at = -math.inf
        self._retry_s = RETRY_S
        self._refused = 0
        self._has_more = False
        """Messages may be left that have arrived but not had their turn."""

    def reach(self, endpoint: Endpoint) -> None:
        """The peer's numeric address is known."""
        self._endpoint = endpoint

    def register(self, poller: "select.poll") -> int | None:
        """Watch for what can be done next; the descriptor that stands for it."""
        stream = self._stream
        if stream is None:
            return None
        wants = self._is_connecting or stream.unsent > 0
        poller.register(stream, select.POLLIN | (select.POLLOUT if wants else 0))
        return stream.fileno()

    def next_time(self, now: float) -> float:
        """When something is due; infinity for never."""
        due = self.conversation.next_time(now)
        if self._has_more:
            return now
        if self._stream is not None and not self._stream.is_ready:
            return min(due, self._since + CONNECT_S)
        if self._stream is None and self._endpoint and not self.conversation.is_idle:
            return min(due, self._retry_at)
        return due

    def work(self, events: int, now: float) -> None:
        """Do what can be done now; `events` is what the poller says."""
        try:
            if self._stream is not None:
                self._use(self._stream, events, now)
            self.conversation.tick(now)
            if self._stream is None:
                self._connect(now)
            elif self._stream.is_ready:
                self.conversation.met(is_ours=self._stream.is_ours)
                self._send(self._stream, now)
            elif now - self._since >= CONNECT_S:
                raise LostError("it does not say which protocol it speaks")
        except LostError as error:
            self._lost(str(error), now)
        except IntegrityError as error:
            self._give_up(f"{self._address} is no side channel: {error}")
            self._lost(str(error), now)

    def close(self) -> None:
        """End the connection."""
        if self._stream is not None:
            self._stream.close()
            self._stream, self._has_more = None, False

    def _connect(self, now: float) -> None:
        """Begin to, if there is something to say."""
        if self._endpoint is None or now < self._retry_at or self.conversation.is_idle:
            return
        connecting = socket.socket(self._endpoint.family, socket.SOCK_STREAM)
        connecting.setblocking(False)
        self._stream = Stream(connecting, Zmtp("DEALER", frames.MAX_ANSWER_FRAME))
        self._is_connecting, self._since = True, now
        result = connecting.connect_ex(self._endpoint.address)
        if result not in (0, errno.EINPROGRESS):
            self._refused += 1
            raise LostError(f"{self._address}: {errno.errorcode.get(result, result)}")

    def _use(self, stream: Stream, events: int, now: float) -> None:
        """What the network has for us."""
        if self._is_connecting:
            if not events:
                return
            self._connected(stream)
        if events & select.POLLOUT:
            stream.flush()
        if events & ~select.POLLOUT:
            stream.receive()
        elif not self._has_more:
            return
        self._has_more = False
        for _ in range(_TURN):
            message = stream.next_message()
            if message is None:
                return
            self._received(message)
        self._has_more = True

    def _connected(self, stream: Stream) -> None:
        try:
            stream.connected()
        except LostError:
            self._refused += 1
            raise
        self._is_connecting, self._refused = False, 0
        stream.flush()

    def _received(self, message: list[bytes]) -> None:
        self._retry_s = RETRY_S
        try:
            self.conversation.received(message)
        except IntegrityError as error:
            self._garbage(f"from {self._address}: {error}")

    def _send(self, stream: Stream, now: float) -> None:
        if stream.unsent > _MAX_UNSENT:
            return
        for message in self.conversation.messages(now):
            stream.send([b"", message])

    def _lost(self, why: str, now: float) -> None:
        """Try again in a while; nobody waits where nobody listens."""
        self.close()
        self._retry_at = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
        self.conversation.interrupted()
        if self._refused >= _REFUSED:
            self._give_up(f"nobody listens at {self._address} ({why})")

    def _give_up(self, why: str) -> None:
        self.conversation.is_silent = True
        self.conversation.fail(why)
