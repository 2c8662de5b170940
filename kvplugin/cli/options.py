"""Options that several commands take, and what their values are read as."""

import json
import re
from collections.abc import Callable
from math import isfinite
from typing import Any, Final

import click

from kvplugin.replay.settings import FORMATS, PARTIALS

_UNITS: Final = {"": 1, "k": 1_000, "m": 1_000_000}
_BLOCKS: Final = re.compile(r"([0-9]{1,12})([kKmM]?)")

_Callback = Callable[[click.Context, click.Parameter, str], Any]


def one(kind: Callable[[str], Any]) -> _Callback:
    """Callback of an option whose value `kind` reads, raising `ValueError`."""

    def convert(ctx: click.Context, param: click.Parameter, value: str) -> Any:
        try:
            return kind(value.strip())
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from error

    return convert


def listed(kind: Callable[[str], Any]) -> _Callback:
    """Callback of an option whose value is a list between commas: a tuple, without
    repetitions.

    Args:
        kind: what each part is turned into.
    """
    return one(
        lambda value: tuple(
            dict.fromkeys(kind(part.strip()) for part in value.split(","))
        )
    )


def name(text: str) -> str:
    """Some name.

    Raises:
        ValueError: it is empty.
    """
    if not text:
        raise ValueError("a name is empty: is there a comma too many?")
    return text


def blocks_or_none(text: str) -> int:
    """A number of blocks, such as ``500``, ``2k`` (thousand) or ``1M`` (million).

    Raises:
        ValueError: it is no such number.
    """
    found = _BLOCKS.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no number of blocks, such as 500, 2k or 1M")
    return int(found[1]) * _UNITS[found[2].lower()]


def blocks(text: str) -> int:
    """`blocks_or_none`, at least 1."""
    if not (count := blocks_or_none(text)):
        raise ValueError(f"{text!r}: at least 1 block is needed")
    return count


def finite(ctx: click.Context, param: click.Parameter, value: float) -> float:
    """Callback that refuses what no range refuses."""
    if not isfinite(value):
        raise click.BadParameter(f"{value} is no number", ctx, param)
    return value


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
