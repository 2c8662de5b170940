"""Entry point of the `kvplugin` command."""

import sys

import click

from kvplugin.errors import KVPluginError
from kvplugin.hooks import registered_commands


class _Commands(click.Group):
    """A group whose commands come from plugins, loaded when first asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return sorted(command.name or "" for command in registered_commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        by_name = {command.name: command for command in registered_commands()}
        return by_name.get(cmd_name)


@click.group(cls=_Commands)
@click.version_option(package_name="kvplugin")
def cli() -> None:
    """A KV cache that vLLM-style engines can steer."""


def main() -> None:
    """Run the command line; our own errors end it with a message, not a trace."""
    try:
        cli()
    except KVPluginError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
