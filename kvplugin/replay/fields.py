"""Values of a trace's line as engines have them, made those that a reader takes."""

from numbers import Real
from operator import index
from typing import Final

from kvplugin.errors import ConfigError
from kvplugin.events import external_hash

_LEAST: Final = -(2**63)
_MOST: Final = 2**64 - 1
"""Integers that JSON readers agree on."""


def integer(name: str, value: object) -> int:
    """An integer of 64 bits, numpy's and others' too.

    Raises:
        ConfigError: naming the field.
    """
    try:
        found = index(value)  # type: ignore[arg-type]  # raises TypeError
    except TypeError:
        found = _LEAST - 1
    if isinstance(value, bool) or not _LEAST <= found <= _MOST:
        raise ConfigError(f"{name}={value!r} must be an integer of 64 bits")
    return found


def number(name: str, value: object) -> float:
    """Some real number.

    Raises:
        ConfigError: naming the field.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name}={value!r} must be a number")
    try:
        return float(value)
    except OverflowError as error:
        raise ConfigError(f"{name}={value!r}: {error}") from error


def flag(name: str, value: object) -> bool:
    """True or false.

    Raises:
        ConfigError: naming the field.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} must be true or false")
    return value


def text(name: str, value: object) -> str:
    """A string that UTF-8 can hold.

    Raises:
        ConfigError: naming the field.
    """
    if not isinstance(value, str):
        raise ConfigError(f"{name}={value!r} must be a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name}={value!r}: {error}") from error
    return value


def hashes(name: str, values: object) -> tuple[int | str, ...]:
    """Hashes of blocks; bytes are cut to their low 64 bits.

    Raises:
        ConfigError: naming the field, and the place of a hash that is none.
    """
    if isinstance(values, str | bytes | bytearray | memoryview):
        raise ConfigError(f"{name}={values!r} must be a list of hashes, not one")
    try:
        listed = list(values)  # type: ignore[call-overload]  # raises TypeError
    except TypeError:
        raise ConfigError(f"{name}={values!r} must be a list of hashes") from None
    return tuple(_hash(name, place, value) for place, value in enumerate(listed))


def _hash(name: str, place: int, value: object) -> int | str:
    if isinstance(value, bytes) and value:
        return external_hash(value)
    where = f"{name}[{place}]"
    if isinstance(value, str):
        return text(where, value)
    if not isinstance(value, bytes | bytearray | memoryview):
        return integer(where, value)
    if not value:
        raise ConfigError(f"{where} is empty")
    return external_hash(bytes(value))
