"""`kvplugin trace`: traces to be replayed."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvplugin.cli import options
from kvplugin.cli.tables import show_facts
from kvplugin.errors import ConfigError
from kvplugin.replay.generate import (
    DEFAULT_BLOCK,
    KINDS,
    write_generated,
)
from kvplugin.replay.settings import Partial
from kvplugin.replay.write import (
    full_blocks,
    in_order,
    times_going_back,
    write_entries,
)

if TYPE_CHECKING:
    from kvplugin.replay.summary import Summary


@click.group()
def trace() -> None:
    """Make, describe and convert request traces."""


@trace.command()
@click.option(
    "--kind",
    type=click.Choice([*KINDS]),
    required=True,
    help="Chats of many turns, agents that call tools, or both.",
)
@click.option("--requests", type=click.IntRange(1), default=10_000, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "--block-size",
    type=click.IntRange(1),
    default=DEFAULT_BLOCK,
    show_default=True,
    help="Tokens that an id covers.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="The file, in the format of kvplugin's recorder; gzipped if it ends in .gz.",
)
def generate(
    kind: str, requests: int, seed: int, block_size: int, output: Path
) -> None:
    """Write a seeded trace, the same for the same arguments."""
    try:
        write_generated(output, kind, requests, seed, block_size)
    except OSError as error:
        raise ConfigError(f"--output: {error}") from error


@trace.command()
@click.argument("file", type=click.Path(path_type=Path))
@options.format_option
@options.trace_block_option
@options.limit_option
@options.block_size_option
@options.partial_option
@options.json_option
def info(
    file: Path,
    format_: str,
    trace_block_size: int | None,
    limit: int | None,
    block_size: int | None,
    partial: Partial,
    as_json: bool,
) -> None:
    """Print what FILE holds, and how much of it a cache could hit."""
    from kvplugin.replay.formats import read_trace
    from kvplugin.replay.summary import summarize

    read = read_trace(file, format_, block_size=trace_block_size, limit=limit)
    summary = summarize(read, block_size=block_size, partial=partial)
    if as_json:
        click.echo(json.dumps(summary.as_dict(), indent=2))
    else:
        show_facts(_facts(summary))


@trace.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(dir_okay=False, path_type=Path))
@options.format_option
@options.trace_block_option
@options.limit_option
def convert(
    source: Path,
    target: Path,
    format_: str,
    trace_block_size: int | None,
    limit: int | None,
) -> None:
    """Write SOURCE as TARGET in the format of kvplugin's recorder.

    That format names full blocks: the partial block at the end of a prompt is lost. It
    is sorted by time: timestamps that go back are raised to the latest before.
    """
    from kvplugin.replay.formats import read_trace

    read = read_trace(source, format_, block_size=trace_block_size, limit=limit)
    if back := times_going_back(read):
        click.echo(
            f"{back} timestamps go back and are written as the latest before them, "
            f"so that the order stays",
            err=True,
        )
    try:
        write_entries(target, in_order(full_blocks(read)), read.block_size)
    except OSError as error:
        raise ConfigError(f"{target}: {error}") from error


def _facts(summary: "Summary") -> dict[str, str]:
    facts = {
        "trace": f"{summary.trace} ({summary.format})",
        "requests": f"{summary.requests} in {summary.seconds:.0f} s",
        "sessions": f"{summary.sessions}" if summary.sessions else "not named",
        "tokens": f"{summary.input_tokens} in, {summary.output_tokens} out",
        "blocks": f"{summary.blocks} of {summary.block_size} tokens looked up, "
        f"{summary.unique_blocks} different ones",
        "can be hit": f"{summary.ceiling:.2%} of blocks, by an unbounded cache",
    }
    if summary.observed is not None:
        facts["was hit"] = f"{summary.observed:.2%} of prompt tokens, when recorded"
    for reuse in summary.reuse:
        facts[f"reuse, {reuse.percentile} %"] = (
            f"within {reuse.blocks} blocks looked up, within {reuse.seconds:.0f} s"
        )
    if summary.notes:
        facts["rules"] = "; ".join(summary.notes)
    return facts
