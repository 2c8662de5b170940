"""Messages between the halves of a connector: MessagePack, typed on arrival.

Encoded with `msgpack`, validated with `msgspec.convert`: a message of another
version, with an unknown field or a wrong type never gets past `decode`. Who sent the
bytes need not be trusted.
"""

from typing import Any, Final, TypeVar

import msgpack
import msgspec

from kvplugin.errors import IntegrityError

T = TypeVar("T", bound=msgspec.Struct)

_BINARY: Final = (bytes, bytearray)
"""Bytes are bytes: a text is not taken for their base64."""


def encode(message: msgspec.Struct) -> bytes:
    """The bytes of a message."""
    packed: bytes = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)))
    return packed


def decode(data: bytes, kind: type[T]) -> T:
    """The message of type `kind` in `data`.

    Raises:
        IntegrityError: the bytes are not such a message; says where they differ.
    """
    try:
        message: T = convert(unpack(data), kind)
    except (IntegrityError, msgspec.ValidationError) as error:
        raise IntegrityError(
            f"not a valid {kind.__name__}: {error}. Messages differ between versions: "
            "install one version of kvplugin everywhere"
        ) from error
    return message


def convert(unpacked: Any, kind: Any) -> Any:
    """What was unpacked, as an object of type `kind`.

    Raises:
        msgspec.ValidationError: it is none; says where it differs.
    """
    return msgspec.convert(unpacked, kind, builtin_types=_BINARY)


def unpack(data: bytes, max_bytes: int | None = None) -> Any:
    """The object that a stranger's MessagePack describes.

    A list's length is announced before its entries, and memory for it is taken at once:
    some bytes of nested announcements would take all memory there is. So the bytes are
    walked through once before anything is made of them; whatever is announced must be
    there.

    Args:
        max_bytes: that may be there; None where the length is bounded elsewhere.

    Raises:
        IntegrityError: too large, too deep, incomplete, or followed by more.
    """
    if max_bytes is not None and len(data) > max_bytes:
        raise IntegrityError(f"{len(data)} bytes are more than {max_bytes}")
    try:
        walker = msgpack.Unpacker(max_buffer_size=max(len(data), 1))
        walker.feed(data)
        walker.skip()
        return msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as error:
        why = str(error).rstrip(".") or type(error).__name__
        raise IntegrityError(f"no valid MessagePack: {why}") from error
