"""Policies that are named by a user: where one is, and how it is made with options."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import msgspec

from kvplugin.errors import ConfigError
from kvplugin.settings import read_settings


def make_listed(
    place: str,
    options: Mapping[str, object],
    title: str,
    setting: str,
    *first: object,
) -> Any:
    """A fresh object of a listed class, with what the user told it.

    Args:
        place: module and class. Its options are the struct `<class>Options` next to
            it; without one it takes none.
        options: the user's.
        title: what it is called in messages, e.g. ``"offload policy 'all'"``.
        setting: where the options stand.
        first: what the class takes before its options.

    Raises:
        ConfigError: an option that it does not know, or a wrong value.
    """
    module_name, _, class_name = place.rpartition(".")
    module = import_module(module_name)
    make: Callable[..., Any] = getattr(module, class_name)
    struct: type[msgspec.Struct] | None = getattr(module, f"{class_name}Options", None)
    if struct is None:
        refuse_options(options, title, setting)
        return make(*first)
    return make(*first, read_settings(struct, options, setting))


def refuse_options(options: Mapping[str, object], title: str, setting: str) -> None:
    """Of a policy that takes none.

    Raises:
        ConfigError: there are some.
    """
    if options:
        raise ConfigError(
            f"{title} takes no options, got {', '.join(options)} in {setting}"
        )
