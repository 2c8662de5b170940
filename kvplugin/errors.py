"""The one error tree: catch `KVPluginError` and nothing of ours slips through."""

import difflib
from collections.abc import Iterable, Mapping


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
    close = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return ConfigError(
        f"unknown {what} {name!r} in {key}.{hint} Known: {', '.join(names)}."
    )


def check_ranges(settings: object, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Refuse settings that are out of their range; None is no setting.

    Raises:
        ConfigError: naming the key, its value and the range.
    """
    for key, (least, most) in ranges.items():
        value = getattr(settings, key)
        if value is not None and not least <= value <= most:
            raise ConfigError(f"{key}={value} must be from {least} to {most}")
