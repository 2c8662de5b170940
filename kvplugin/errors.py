"""The one error tree: catch `KVPluginError` and nothing of ours slips through."""

import difflib
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

_LONGEST_NAME: Final = 64


class KVPluginError(Exception):
    """Base of every error that kvplugin raises on purpose."""


class ConfigError(KVPluginError, ValueError):
    """A setting is wrong; the message names the key to change."""


class CapacityError(KVPluginError):
    """Something does not fit; the message says what is needed and what there is."""


class IntegrityError(KVPluginError):
    """An invariant is broken: a defect of the code, never of the input."""


class LayoutMismatchError(KVPluginError):
    """Two page layouts do not agree; the message shows both."""


class PluginError(KVPluginError):
    """A plugin failed or answered something impossible; the message names it."""


class TransferError(KVPluginError):
    """Bytes did not arrive. `retryable` says whether trying again can help."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


def unknown_name(what: str, name: str, known: Iterable[str], key: str) -> ConfigError:
    """A `ConfigError` for a name that does not exist.

    Args:
        what: the kind of thing, e.g. ``"eviction policy"``.
        name: what the user wrote.
        known: the names that exist.
        key: the setting where it stands.
    """
    names = sorted(known)
    if len(name) > _LONGEST_NAME:  # a stranger's: looking for the nearest takes long
        name = f"{name[:_LONGEST_NAME]}..."
    close = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return ConfigError(
        f"unknown {what} {name!r} in {key}.{hint} Known: {', '.join(names)}."
    )


def check_count(
    name: str, value: object, least: int, *, error: type[KVPluginError] = ConfigError
) -> None:
    """Refuse what is no integer of at least `least`, nor of 63 bits.

    Raises:
        ConfigError: or what `error` says, naming the value and what is allowed.
    """
    if type(value) is not int or not least <= value < 2**63:
        raise error(f"{name}={value!r} must be an integer, at least {least}")


def check_choice(setting: str, name: object, options: object) -> None:
    """Refuse what does not name a policy, or tells it nothing.

    Args:
        setting: where the user names one; its options stand in ``<setting>_options``.
        name: what stands there.
        options: what stands in the other.

    Raises:
        ConfigError: the name is no text, or the options are no table.
    """
    if not isinstance(name, str):
        raise ConfigError(f"{setting}={name!r} must be the name of a policy")
    if not isinstance(options, Mapping):
        raise ConfigError(f"{setting}_options={options!r} must be a table")


def check_ranges(settings: object, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Refuse settings that are not of their type or out of their range.

    For classes that do not look at types when they are made, as msgspec's. An integer
    is a fine float; None is no setting where the type has it.

    Args:
        settings: an object whose class annotates all of its settings.
        ranges: least and most of numbers, by setting.

    Raises:
        ConfigError: naming the key, its value and what is allowed.
    """
    for key, hint in get_type_hints(type(settings)).items():
        _check_type(key, getattr(settings, key), hint)
    for key, (least, most) in ranges.items():
        value = getattr(settings, key)
        if value is not None and not least <= value <= most:
            raise ConfigError(f"{key}={value} must be from {least} to {most}")


def _check_type(key: str, value: object, hint: Any) -> None:
    origin = get_origin(hint)
    options = get_args(hint) if origin in (Literal, Union, UnionType) else (hint,)
    if origin is Literal:
        if value not in options:
            raise unknown_name("value", str(value), options, key)
        return
    types = {get_origin(option) or option for option in options}
    names = " or ".join(sorted(kind.__name__ for kind in types))
    if float in types:
        types.add(int)
    wrong = not isinstance(value, tuple(types))
    if wrong or (isinstance(value, bool) and bool not in types):
        raise ConfigError(f"{key}={value!r} must be of type {names}")
