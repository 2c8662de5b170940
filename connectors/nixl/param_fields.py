"""Fields of ``kv_transfer_params``, as strangers fill them in: each checked for itself.

Checks take a field's name and its value, which is not None, and return the value as it
is used, or raise `ParamsError`.
"""

import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar

from kvplugin.errors import ConfigError

T = TypeVar("T")

_MOST_GROUPS: Final = 256
_MOST_BLOCKS: Final = 1 << 17
_MOST_BLOCK_IDS: Final = 1 << 31
_MOST_NUMBER: Final = 1 << 62
_LONGEST_NAME: Final = 512
_LONGEST_HOST: Final = 253
_HOST: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")
_IPV6: Final = re.compile(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?")
_LONGEST_SHOWN: Final = 64


class ParamsError(ConfigError):
    """A client sent parameters that make no sense; the message names the field."""


Check: TypeAlias = Callable[[str, Any], T]
"""Of one field; raises `ParamsError`."""


def optional(params: Mapping[str, Any], name: str, check: Check[T]) -> T | None:
    """A field that may be missing or None."""
    value = params.get(name)
    return None if value is None else check(name, value)


def required(params: Mapping[str, Any], name: str, check: Check[T]) -> T:
    """A field that must be there."""
    value = params.get(name)
    if value is None:
        raise missing(name)
    return check(name, value)


def missing(name: str) -> ParamsError:
    """The error for a field that is not there."""
    return ParamsError(
        f"{name} is missing: pass on all of kv_transfer_params as the other engine "
        "gave them"
    )


def wrong(name: str, value: Any, must: str) -> ParamsError:
    """The error for a value that is not what it must be."""
    return ParamsError(f"{name}={shown(value)} must be {must}")


def shown(value: Any) -> str:
    """A stranger's value, in bounds: a long one is told by its type."""
    if isinstance(value, str):
        text = ascii(value[: _LONGEST_SHOWN + 1])
        return text if len(value) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
    if isinstance(value, bool | float) or value is None:
        return repr(value)
    if isinstance(value, int) and value.bit_length() <= 64:
        return repr(value)
    return f"<{type(value).__name__}>"


def flag(params: Mapping[str, Any], name: str) -> bool:
    """A field that says yes or no; no where it is missing or None."""
    value = params.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise wrong(name, value, "true or false")
    return value


def integer(least: int, most: int) -> Check[int]:
    """For a number of these, both included; a boolean is none."""

    def check(name: str, value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise wrong(name, value, f"an integer from {least} to {most}")
        return value

    return check


def number(name: str, value: Any) -> float:
    """Any that is not absurd."""
    if type(value) not in (int, float) or not -_MOST_NUMBER < value < _MOST_NUMBER:
        raise wrong(name, value, f"a number from -{_MOST_NUMBER} to {_MOST_NUMBER}")
    return float(value)


def printable(name: str, value: Any) -> str:
    """An id or a name, which may be logged and sent on."""
    if (
        not isinstance(value, str)
        or not 1 <= len(value) <= _LONGEST_NAME
        or not value.isprintable()
    ):
        raise wrong(name, value, f"1 to {_LONGEST_NAME} printable characters")
    return value


def host(name: str, value: Any) -> str:
    """A host's name or address, without brackets."""
    if isinstance(value, str) and 1 <= len(value) <= _LONGEST_HOST:
        if _HOST.fullmatch(value):
            return value
        bare = value[1:-1] if value[0] == "[" and value[-1] == "]" else value
        if _IPV6.fullmatch(bare) and _is_ipv6(bare):
            return bare
    raise wrong(name, value, "the name of a host or its IPv4 or IPv6 address")


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def has_blocks(name: str, value: Any) -> bool:
    """Whether rows of block ids, by group, name a block at all.

    Which blocks these are a reader is told again when it asks.
    """
    must = f"a list of up to {_MOST_GROUPS} lists of block ids"
    if not isinstance(value, list | tuple) or len(value) > _MOST_GROUPS:
        raise wrong(name, value, must)
    if not all(isinstance(row, list | tuple) for row in value):
        raise wrong(name, value, must)
    if sum(map(len, value)) > _MOST_BLOCKS:
        raise wrong(name, value, f"{must}, {_MOST_BLOCKS} at most")
    for row in value:
        _check_blocks(name, row)
    return any(map(any, value))


def _check_blocks(name: str, row: Sequence[Any]) -> None:
    for block in row:
        if type(block) is not int or not 0 <= block < _MOST_BLOCK_IDS:
            raise wrong(f"{name}, an entry", block, "a block id from 0 to 2**31 - 1")
