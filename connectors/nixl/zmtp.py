"""ZMTP 3.0, the protocol of ZeroMQ's sockets, as far as the side channel needs it.

The peers are vLLM's NixlConnectors too, so the side channel looks like their ROUTER and
DEALER sockets. It is spoken here instead of by libzmq because libzmq bounds the size of
a frame, and not the number of frames of a message: it collects them all before anybody
sees the first, so whoever reaches a port could fill the memory of an engine. Here a
connection takes no more than one message of the largest size allowed.

Source: https://rfc.zeromq.org/spec/23 (greeting, NULL mechanism, framing) and
https://rfc.zeromq.org/spec/37 (PING).
"""

import struct
from collections.abc import Sequence
from typing import Final

from kvplugin.errors import IntegrityError

_SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
_MECHANISM: Final = b"NULL".ljust(20, b"\0")
_GREETING: Final = _SIGNATURE + b"\x03\x00" + _MECHANISM + b"\0" + bytes(31)
_MORE: Final = 1
_LONG: Final = 2
_COMMAND: Final = 4
_LENGTH: Final = struct.Struct(">Q")
_VALUE: Final = struct.Struct(">I")
_MAX_COMMAND: Final = 512
"""Bytes of a command."""
_MAX_FRAMES: Final = 4
"""Of a message; nobody here sends more than three."""
_OURS: Final = b"X-KVPlugin"
"""Of READY: names beginning so are free for applications. It says who is there before
anything is asked."""
_NAMES: Final = {"ROUTER": b"ROUTER", "DEALER": b"DEALER"}


class Zmtp:
    """One connection's state, without the connection.

    Args:
        kind: of socket that it claims to be, ``ROUTER`` or ``DEALER``.
        max_bytes: of a message, over its frames.
    """

    def __init__(self, kind: str, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kind = _NAMES[kind]
        self._received = bytearray()
        self._parts: list[bytes] = []
        self._part_bytes = 0
        self._greeted = False
        self.is_ready = False
        """Messages may be sent."""
        self.is_ours = False
        """The peer is one of kvplugin; known when it is ready."""
        self.output = bytearray(_GREETING)
        """To be sent, in this order; whoever sends it takes it away."""

    def feed(self, data: bytes) -> None:
        """Bytes from the peer."""
        self._received += data

    def next_message(self) -> list[bytes] | None:
        """The frames of the next whole message; None if there is none yet.

        Raises:
            IntegrityError: the peer speaks something else, or too much.
        """
        if not self._greeted and not self._take_greeting():
            return None
        while (frame := self._take_frame()) is not None:
            flags, body = frame
            if flags & _COMMAND:
                self._obey(body)
                continue
            if not self.is_ready:
                raise IntegrityError("a message before READY")
            self._parts.append(body)
            self._part_bytes += len(body)
            if not flags & _MORE:
                message, self._parts, self._part_bytes = self._parts, [], 0
                return message
            if len(self._parts) >= _MAX_FRAMES:
                raise IntegrityError(f"a message of more than {_MAX_FRAMES} frames")
        return None

    def send(self, parts: Sequence[bytes]) -> None:
        """Put a message into `output`."""
        for index, part in enumerate(parts):
            flags = _MORE if index < len(parts) - 1 else 0
            self._put(flags, part)

    def _put(self, flags: int, body: bytes) -> None:
        if len(body) > 255:
            self.output += bytes((flags | _LONG,)) + _LENGTH.pack(len(body))
        else:
            self.output += bytes((flags, len(body)))
        self.output += body

    def _take_greeting(self) -> bool:
        received = self._received
        begins = bytes(received[:16])
        if begins[:1] not in (b"", b"\xff") or begins[9:10] not in (b"", b"\x7f"):
            raise IntegrityError(f"not ZMTP: {begins!r}")
        if len(received) < len(_GREETING):
            return False
        if received[10] < 3 or received[12:32] != _MECHANISM:
            raise IntegrityError(
                f"ZMTP {received[10]} with {bytes(received[12:32])!r}, not 3 with NULL"
            )
        del received[: len(_GREETING)]
        self._greeted = True
        said = {b"Socket-Type": self._kind, b"Identity": b"", _OURS: b""}
        properties = b"".join(
            bytes((len(name),)) + name + _VALUE.pack(len(value)) + value
            for name, value in said.items()
        )
        self._put(_COMMAND, b"\x05READY" + properties)
        return True

    def _take_frame(self) -> tuple[int, bytes] | None:
        """Flags and body of the next whole frame; None if there is none yet."""
        received = self._received
        if len(received) < 2:
            return None
        flags = received[0]
        if flags & ~(_MORE | _LONG | _COMMAND):
            raise IntegrityError(f"a frame with flags {flags:#04x}")
        start, size = 2, received[1]
        if flags & _LONG:
            start = 1 + _LENGTH.size
            if len(received) < start:
                return None
            (size,) = _LENGTH.unpack_from(received, 1)
        room = self._max_bytes - self._part_bytes
        if size > (_MAX_COMMAND if flags & _COMMAND else room):
            raise IntegrityError(f"a frame of {size} bytes is too large")
        if len(received) < start + size:
            return None
        body = bytes(received[start : start + size])
        del received[: start + size]
        return flags, body

    def _obey(self, body: bytes) -> None:
        """Do what a command says; ones that are not known say nothing."""
        end = 1 + body[0] if body else 0
        name, rest = body[1:end], body[end:]
        if name == b"READY":
            self.is_ready = True
            self.is_ours = _OURS in _properties(rest)
        elif name == b"PING":
            self._put(_COMMAND, b"\x04PONG" + rest[2:18])
        elif name == b"ERROR":
            raise IntegrityError(f"the peer says {rest[1:200]!r}")


def _properties(body: bytes) -> dict[bytes, bytes]:
    """What a READY says; the whole ones of one that is cut off."""
    properties: dict[bytes, bytes] = {}
    at = 0
    while at < len(body):
        start = at + 1 + body[at] + _VALUE.size
        if start > len(body):
            break
        name = body[at + 1 : start - _VALUE.size]
        (size,) = _VALUE.unpack_from(body, start - _VALUE.size)
        properties[name] = body[start : start + size]
        at = start + size
    return properties
