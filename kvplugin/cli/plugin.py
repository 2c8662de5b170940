"""The built-in plugin that adds the core's commands."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvplugin.hooks import hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def kvp_register_commands() -> "Sequence[click.Command]":
    """`kvplugin plugins`, `kvplugin replay` and `kvplugin trace`."""
    from kvplugin.cli.plugins import plugins
    from kvplugin.cli.replay import replay
    from kvplugin.cli.trace import trace

    return [plugins, replay, trace]
