"""`kvplugin plugins`: what is loaded, where it comes from and what it does."""

import json
from collections.abc import Sequence
from typing import Any

import click

from kvplugin.hooks import Hooks, get_hooks

_COLUMNS = ("name", "version", "distribution", "hooks", "policies")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def plugins(as_json: bool) -> None:
    """List plugins, the hooks they implement and the policies they offer."""
    rows = list_plugins(get_hooks())
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        _show([[_text(row[column]) for column in _COLUMNS] for row in rows])


def list_plugins(hooks: Hooks) -> list[dict[str, Any]]:
    """One row a plugin, in the order of registration."""
    return [
        {
            "name": plugin.name,
            "version": plugin.version,
            "distribution": plugin.distribution,
            "built_in": plugin.built_in,
            "hooks": list(plugin.hooks),
            "policies": hooks.policies_of(plugin.name),
        }
        for plugin in hooks.plugins
    ]


def _text(value: Any) -> str:
    """A cell: one item a line."""
    if isinstance(value, dict):
        return "\n".join(f"{name}: {text}" for name, text in value.items())
    return "\n".join(value) if isinstance(value, list) else value or "-"


def _show(rows: Sequence[Sequence[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        _show_plain(rows)
        return
    table = Table()
    for column in _COLUMNS:
        # Names of hooks are to be copied: they stay in one piece.
        table.add_column(column, overflow="fold", no_wrap=column == "hooks")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def _show_plain(rows: Sequence[Sequence[str]]) -> None:
    """The same without rich: one paragraph a plugin."""
    for name, *cells in rows:
        click.echo(name)
        for column, cell in zip(_COLUMNS[1:], cells, strict=True):
            lines = cell.splitlines() or ["-"]
            click.echo(f"  {column}: " + f"\n  {' ' * len(column)}  ".join(lines))
