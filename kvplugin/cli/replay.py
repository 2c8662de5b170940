"""`kvplugin replay`: what policies and capacities bring, from a trace."""

import json
from pathlib import Path
from typing import Any, Final

import click

from kvplugin.cli import options
from kvplugin.cli.tables import progress, show_facts, show_table
from kvplugin.replay.result import Counts, ReplayResult, Run, RunFailedError
from kvplugin.replay.settings import REFERENCES, SEMANTICS, ReplaySettings

_COLUMNS: Final = (
    "capacity", "policy", "blocks", "tokens", "closed", "evicted", "skipped", "s"
)  # fmt: skip

_LEGEND: Final = (
    "blocks, tokens: share that was hit, in the host tier too where there is one; "
    "closed: share of the distance from LRU to Belady, in blocks; evicted: keys that "
    "the pool lost; (...): for comparison"
)


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "--policy",
    "policies",
    callback=options.listed(options.name),
    default="lru",
    show_default=True,
    metavar="NAME,...",
    help="Eviction policies, by their names in eviction_policy; or belady.",
)
@click.option(
    "--capacity",
    "capacities",
    callback=options.listed(options.blocks),
    required=True,
    metavar="BLOCKS,...",
    help="Usable blocks of the pool; 2k and 1M are thousands and millions.",
)
@click.option(
    "--policy-options",
    callback=options.json_tables,
    default="{}",
    metavar="JSON",
    help="Options by policy, as in eviction_policy_options.",
)
@options.format_option
@options.trace_block_option
@options.limit_option
@options.block_size_option
@options.partial_option
@click.option(
    "--warmup",
    type=click.FloatRange(0, 1, max_open=True),
    callback=options.finite,
    default=0.0,
    show_default=True,
    help="Share of the requests that run before counting begins.",
)
@click.option(
    "--running",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Requests that keep their blocks while later ones run.",
)
@click.option(
    "--lookahead",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Waiting requests that queue-informed policies know.",
)
@click.option(
    "--model",
    metavar="NAME|FILE.json",
    help="Serve the KV cache groups of this model, or of this config.json.",
)
@click.option(
    "--host-capacity",
    callback=options.one(options.blocks_or_none),
    default="0",
    show_default=True,
    metavar="BLOCKS",
    help="Blocks of a host tier.",
)
@click.option(
    "--host-policy",
    help="Eviction policy of the host tier.  [default: lru]",
)
@click.option(
    "--semantics",
    type=click.Choice(SEMANTICS),
    default="chained",
    show_default=True,
    help="flat: ids are independent keys, for comparison with cache simulators.",
)
@click.option(
    "--references",
    type=click.Choice([*REFERENCES]),
    default="all",
    show_default=True,
    help="Run LRU, Belady and the unbounded cache too; or all but Belady; or none.",
)
@options.json_option
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw hit rate against capacity into this file (needs kvplugin[plot]).",
)
def replay(
    trace: Path,
    format_: str,
    trace_block_size: int | None,
    limit: int | None,
    as_json: bool,
    picture: Path | None,
    **settings: Any,
) -> None:
    """Replay TRACE through the core, once for each policy and capacity.

    Reads traces of Mooncake, Bailian, vLLM's KV events and kvplugin's recorder,
    gzipped or not.
    """
    from kvplugin.replay.formats import read_trace
    from kvplugin.replay.picture import check_picture, draw
    from kvplugin.replay.runner import replay as run_replay

    rules = ReplaySettings(**settings)
    if picture is not None:
        check_picture(picture)
    requests = read_trace(trace, format_, block_size=trace_block_size, limit=limit)
    failed: RunFailedError | None = None
    try:
        with progress() as tell:
            result = run_replay(requests, rules, progress=tell)
    except RunFailedError as error:
        failed, result = error, error.result
    if as_json:
        click.echo(json.dumps(result.as_dict(), indent=2))
    else:
        _show(result, with_host=rules.host_capacity > 0)
    if failed is not None:
        raise failed
    if picture is not None:
        draw(result, picture)


def _show(result: ReplayResult, *, with_host: bool) -> None:
    click.echo(f"{result.trace}, blocks of {result.block_size} tokens")
    columns = [*_COLUMNS]
    rows = [_row(run) for run in result.runs]
    if with_host:
        place = columns.index("blocks") + 1
        columns.insert(place, "host")
        for row, run in zip(rows, result.runs, strict=True):
            row.insert(place, _percent(run.counts.host_rate))
    show_table(columns, rows)
    facts = {"columns": _LEGEND, **result.rules}
    if (ceiling := result.ceiling) is not None:
        facts["unbounded"] = (
            f"{_percent(ceiling.block_rate)} of blocks, "
            f"{_tokens(ceiling)} of tokens hit"
        )
    show_facts(facts)


def _row(run: Run) -> list[str]:
    counts = run.counts
    return [
        str(run.capacity),
        f"({run.policy})" if run.is_reference else run.policy,
        _percent(counts.block_rate),
        _tokens(counts),
        "-" if run.closed is None else f"{run.closed:.1%}",
        str(counts.evictions),
        str(counts.skipped),
        f"{run.seconds:.1f}",
    ]


def _tokens(counts: Counts) -> str:
    """The token rate, where tokens were counted."""
    return _percent(counts.token_rate) if counts.tokens else "-"


def _percent(share: float) -> str:
    return f"{share:.2%}"
