"""Hookspecs and the plugin manager; the only module that knows pluggy.

Plugins come from the entry-point group ``kvplugin`` and are loaded by `load_plugins`,
never at import.
"""

from collections.abc import Sequence
from functools import cache
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
    try:
        manager.load_setuptools_entrypoints(PROJECT)
        manager.check_pending()
    except Exception as error:
        raise PluginError(f"a plugin cannot be loaded: {error}") from error
    return manager


def registered_commands() -> "list[click.Command]":
    """All commands that plugins contribute.

    Raises:
        PluginError: two plugins contribute a command of the same name.
    """
    commands: dict[str, click.Command] = {}
    answers = cast(
        "list[Sequence[click.Command]]", load_plugins().hook.kvp_register_commands()
    )
    for command in (command for answer in answers for command in answer):
        name = command.name or ""
        if name in commands:
            raise PluginError(f"two plugins contribute the command {name!r}")
        commands[name] = command
    return list(commands.values())
