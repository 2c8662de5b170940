"""How messages of the side channel look on the wire.

Over ZMQ a client (DEALER) sends two frames, one empty and one with a message, and gets
two of the same kind from the server (ROUTER).

What a client sends is always MessagePack of ``[text, 0, 0]``, whose text begins with
our name. If one of vLLM's own NixlConnectors listens there, it unpacks three things,
logs the first, answers with its own payload, and lives on; anything else would end its
listener for good (that of vLLM 0.19 takes two: `stock.FIELDS`). After the name and the
protocol's number the text goes on with

    ``?``                                            who are you?
    ``Q`` nonce, client, sequence, signature, body   a question

and what the server sends (without MessagePack around it) with

    ``W`` flags, nonce, version                      that is who I am
    ``A`` sequence, signature, body                  an answer

Bodies are `kvplugin.connectors.nixl.wire`'s.
"""

import struct
from typing import Final, NamedTuple, TypeAlias

import msgpack

from kvplugin.connectors.nixl import stock
from kvplugin.connectors.nixl.auth import Header
from kvplugin.connectors.nixl.version import VERSION
from kvplugin.connectors.nixl.wire import MAX_BYTES, MAX_QUESTION_BYTES
from kvplugin.errors import IntegrityError
from kvplugin.wire import unpack

PROTOCOL: Final = 1
"""Raised when the same messages come to mean something else. Hello and Welcome stay:
by them each side finds out what the other speaks."""

_NAME: Final = b"KVPluginNixlConnector/"
_PREFIX: Final = b"%s%d " % (_NAME, PROTOCOL)
_QUESTION: Final = struct.Struct(">16s16sQ32s")
_ANSWER: Final = struct.Struct(">Q32s")
_WELCOME: Final = struct.Struct(">B16s")
_SIGNED: Final = 1
_MOST_DIGITS: Final = 9
_MOST_VERSION: Final = 64
_OVERHEAD: Final = 256
"""Bytes around a body, at most."""
MAX_QUESTION_FRAME: Final = MAX_QUESTION_BYTES + _OVERHEAD
MAX_ANSWER_FRAME: Final = MAX_BYTES + _OVERHEAD


class Hello(NamedTuple):
    """Who are you? From a client that speaks this protocol."""

    protocol: int


class Asked(NamedTuple):
    """A question, as it arrived; nothing of it is trusted yet."""

    header: Header
    tag: bytes
    body: bytes


class StockHello(NamedTuple):
    """The question of one of vLLM's own NixlConnectors."""

    vllm: str
    """Which versions ask so."""


class Welcome(NamedTuple):
    """Who I am. Not signed: it is worth nothing but a try."""

    protocol: int
    signed: bool
    """The server has a secret."""
    nonce: bytes
    version: str
    """Of kvplugin."""


class Answered(NamedTuple):
    """An answer, as it arrived; nothing of it is trusted yet."""

    sequence: int
    tag: bytes
    body: bytes


class StockAnswer(NamedTuple):
    """The answer of one of vLLM's own NixlConnectors."""

    vllm: str


FromClient: TypeAlias = Hello | Asked | StockHello
FromServer: TypeAlias = Welcome | Answered | StockAnswer


def hello() -> bytes:
    """The message of a client that does not know a server's nonce yet."""
    return _wrap(b"%s? kvplugin %s" % (_PREFIX, VERSION.encode()))


def asked(header: Header, tag: bytes, body: bytes) -> bytes:
    """The message of a question."""
    return _wrap(_PREFIX + b"Q" + _QUESTION.pack(*header, tag) + body)


def welcome(nonce: bytes, *, signed: bool) -> bytes:
    """The message of a server that a client does not know yet, or any more."""
    flags = _SIGNED if signed else 0
    return _PREFIX + b"W" + _WELCOME.pack(flags, nonce) + VERSION.encode()


def answered(sequence: int, tag: bytes, body: bytes) -> bytes:
    """The message of an answer."""
    return _PREFIX + b"A" + _ANSWER.pack(sequence, tag) + body


def from_client(frames: list[bytes]) -> FromClient:
    """What a client's frames say.

    Raises:
        IntegrityError: nothing that anybody of ours or vLLM's would say.
    """
    fields = unpack(_message(frames, most=2), MAX_QUESTION_FRAME)
    if vllm := stock.asks(fields):
        return StockHello(vllm)
    if not isinstance(fields, list) or len(fields) not in (2, 3):
        raise IntegrityError("not a list of two or three")
    text = fields[0]
    if not isinstance(text, bytes):
        raise IntegrityError("not a message of KVPluginNixlConnector")
    protocol, kind, rest = _split(text)
    if kind == b"?":
        return Hello(protocol)
    if protocol != PROTOCOL:
        raise IntegrityError(f"a question of protocol {protocol}, ours is {PROTOCOL}")
    if kind != b"Q" or len(rest) < _QUESTION.size:
        raise IntegrityError("neither a hello nor a whole question")
    nonce, client, sequence, tag = _QUESTION.unpack_from(rest)
    return Asked(Header(nonce, client, sequence), tag, rest[_QUESTION.size :])


def from_server(frames: list[bytes]) -> FromServer:
    """What a server's frames say.

    Raises:
        IntegrityError: nothing that anybody of ours or vLLM's would say.
    """
    message = _message(frames, most=3)
    if not message.startswith(_NAME):
        if stock.answers(message):
            return StockAnswer(stock.version_of_answer(frames))
        raise IntegrityError("not a message of KVPluginNixlConnector")
    protocol, kind, rest = _split(message)
    if kind == b"W" and len(rest) >= _WELCOME.size:
        flags, nonce = _WELCOME.unpack_from(rest)
        version = rest[_WELCOME.size :][:_MOST_VERSION].decode("ascii", "replace")
        return Welcome(protocol, bool(flags & _SIGNED), nonce, version)
    if protocol != PROTOCOL:
        raise IntegrityError(f"an answer of protocol {protocol}, ours is {PROTOCOL}")
    if kind != b"A" or len(rest) < _ANSWER.size:
        raise IntegrityError("neither a welcome nor a whole answer")
    sequence, tag = _ANSWER.unpack_from(rest)
    return Answered(sequence, tag, rest[_ANSWER.size :])


def _wrap(text: bytes) -> bytes:
    packed: bytes = msgpack.packb([text, 0, 0][: stock.FIELDS])
    return packed


def _message(frames: list[bytes], most: int) -> bytes:
    if not 2 <= len(frames) <= most or frames[0]:
        sizes = [len(frame) for frame in frames[:5]]
        raise IntegrityError(f"frames of {sizes} bytes: not an empty one and a message")
    return frames[1]


def _split(text: bytes) -> tuple[int, bytes, bytes]:
    """Protocol, kind, and what follows."""
    if not text.startswith(_NAME):
        raise IntegrityError("not a message of KVPluginNixlConnector")
    number, space, rest = text[len(_NAME) :].partition(b" ")
    if not space or not number.isdigit() or len(number) > _MOST_DIGITS:
        raise IntegrityError("no protocol's number behind the name")
    return int(number), rest[:1], rest[1:]
