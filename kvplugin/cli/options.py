"""Options that several commands take, and what their values are read as."""

import json
from collections.abc import Callable
from typing import Any

import click

from kvplugin.replay.settings import FORMATS, PARTIALS

_Callback = Callable[[click.Context, click.Parameter, str], Any]


def listed(kind: Callable[[str], Any]) -> _Callback:
    """Callback of an option whose value is a list between commas: a tuple.

    Args:
        kind: what each part is turned into.
    """

    def convert(ctx: click.Context, param: click.Parameter, value: str) -> Any:
        try:
            return tuple(kind(part) for part in value.split(","))
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from error

    return convert


def json_tables(
    ctx: click.Context, param: click.Parameter, value: str
) -> dict[str, dict[str, Any]]:
    """Callback of an option whose value is a JSON object of objects."""
    try:
        table = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"not JSON: {error}", ctx, param) from error
    tables = isinstance(table, dict) and all(
        isinstance(each, dict) for each in table.values()
    )
    if not tables:
        hint = 'must be like {"POLICY": {"OPTION": 1}}'
        raise click.BadParameter(hint, ctx, param)
    return dict(table)


format_option = click.option(
    "--format",
    "format_",
    type=click.Choice(["auto", *FORMATS]),
    default="auto",
    show_default=True,
    help="Format of the trace.",
)
trace_block_option = click.option(
    "--trace-block-size",
    type=click.IntRange(1),
    help="Tokens that an id of the trace covers, if not the format's own.",
)
limit_option = click.option(
    "--limit", type=click.IntRange(1), help="Read no more requests than these."
)
block_size_option = click.option(
    "--block-size",
    type=click.IntRange(1),
    help="Tokens of a block; ids of the trace are split. Default: the trace's.",
)
partial_option = click.option(
    "--partial",
    type=click.Choice(PARTIALS),
    default="count",
    show_default=True,
    help="Whether the partial block at the end of a prompt is a block.",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Machine-readable output."
)
