"""Messages between the halves of a connector: MessagePack, typed on arrival.

Encoded with `msgpack`, validated with `msgspec.convert`: a message of another
version, with an unknown field or a wrong type never gets past `decode`.
"""

from typing import TypeVar

import msgpack
import msgspec

from kvplugin.errors import IntegrityError

T = TypeVar("T", bound=msgspec.Struct)


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
        return msgspec.convert(msgpack.unpackb(data), kind)
    except (ValueError, msgspec.ValidationError, msgpack.UnpackException) as error:
        why = str(error) or type(error).__name__
        raise IntegrityError(
            f"not a valid {kind.__name__}: {why}. Messages differ between versions: "
            "install one version of kvplugin everywhere"
        ) from error
