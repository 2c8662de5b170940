"""The hooks of installed plugins, loaded when somebody first asks for them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from kvplugin.hooks.facade import Hooks
from kvplugin.hooks.plugins import load_plugins, manager_with

if TYPE_CHECKING:
    import click


@cache
def get_hooks() -> Hooks:
    """The hooks of this process with its installed plugins, loaded at the first call.

    Raises:
        ConfigError: `KVPLUGIN_PLUGINS` names a plugin that is not installed.
        PluginError: an installed plugin is unfit.
    """
    return Hooks(load_plugins())


def hooks_with(*plugins: object) -> Hooks:
    """The hooks of installed plugins and of these, which are asked first.

    Args:
        plugins: modules, classes or objects with implementations. Their names
            (`__name__`, where there is one) must be new.

    Raises:
        ConfigError: `KVPLUGIN_PLUGINS` names a plugin that is not installed.
        PluginError: a plugin is unfit, or has the name of another one.
    """
    return Hooks(manager_with(plugins)) if plugins else get_hooks()


def registered_commands() -> list[click.Command]:
    """All commands that plugins contribute.

    Raises:
        PluginError: a plugin fails, or two contribute a command of the same name.
    """
    return get_hooks().register_commands()
