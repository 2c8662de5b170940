"""Hookspecs and the plugin manager; the only module that knows pluggy.

Plugins come from the entry-point group ``kvplugin`` and are loaded by `load_plugins`,
never at import.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final, Protocol, cast

import pluggy

from kvplugin.errors import PluginError

if TYPE_CHECKING:
    import click

PROJECT: Final = "kvplugin"

hookimpl: Final = pluggy.HookimplMarker(PROJECT)
"""Marks an implementation of a hook in a plugin."""

_hookspec: Final = pluggy.HookspecMarker(PROJECT)


class _Specs(Protocol):
    """Every hook there is, with its contract."""

    @_hookspec
    def kvp_register_commands(self) -> "Sequence[click.Command]":
        """Commands that the plugin adds to `kvplugin`.

        Asked once a process, by the command line only. Names must be new.
        """


@cache
def load_plugins() -> pluggy.PluginManager:
    """The plugin manager with every installed plugin, loaded once a process.

    Raises:
        PluginError: a plugin cannot be imported, or implements a hook that does not
            exist.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(_Specs)
    for entry_point in entry_points(group=PROJECT):
        with _blaming(entry_point.name):
            manager.register(entry_point.load(), name=entry_point.name)
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(f"no such hook: {error}") from error
    return manager


def registered_commands() -> "list[click.Command]":
    """All commands that plugins contribute.

    Raises:
        PluginError: a plugin fails, or two contribute a command of the same name.
    """
    commands: dict[str, click.Command] = {}
    owners: dict[str, str] = {}
    for plugin in load_plugins().hook.kvp_register_commands.get_hookimpls():
        with _blaming(plugin.plugin_name):
            answer = cast("Sequence[click.Command]", plugin.function())
        for command in answer:
            name = command.name or ""
            if name in commands:
                raise PluginError(
                    f"plugins {owners[name]!r} and {plugin.plugin_name!r} both "
                    f"contribute the command {name!r}"
                )
            commands[name], owners[name] = command, plugin.plugin_name
    return list(commands.values())


@contextmanager
def _blaming(plugin: str) -> Iterator[None]:
    """Whatever fails inside is the plugin's fault, and the error says so."""
    try:
        yield
    except Exception as error:
        raise PluginError(f"plugin {plugin!r} failed: {error}") from error
