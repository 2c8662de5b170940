"""The comparison as a table and, where answers differ, as text."""

from collections.abc import Callable, Iterator
from statistics import median
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvplugin.integration.demo.results import Answer, Case, Comparison, EngineRun

Cell = Callable[[EngineRun], str]
NOTHING: Final = "-"


def comparison_table(comparison: Comparison) -> RenderableType:
    """The whole comparison, ready to print; differing answers follow the table."""
    table = Table(title=comparison.title, title_justify="left", title_style="bold")
    table.add_column()
    table.add_column("without kvplugin", justify="right")
    table.add_column("with kvplugin", justify="right")
    for heading, rows in ENGINE_ROWS.items():
        table.add_row(f"[bold]{heading}")
        for label, cell in rows.items():
            without, with_kvplugin = comparison.without, comparison.with_kvplugin
            table.add_row(f"  {label}", cell(without), cell(with_kvplugin))
        table.add_section()
    table.add_row("[bold]With against without")
    table.add_row("  same answers", "", _same(comparison))
    gap = f"{comparison.largest_logprob_gap:.2g}"
    table.add_row("  largest logprob gap", "", gap)
    conclusion = Text(
        verdict(comparison), style="bold" if comparison.succeeded else "bold red"
    )
    return Group(table, conclusion, *_remarks(comparison))


def verdict(comparison: Comparison) -> str:
    """One sentence for whoever reads nothing else."""
    if comparison.speedup is None:
        return "No document was loaded from CPU memory: nothing to compare."
    return (
        f"Loaded from CPU memory, the first token comes {comparison.speedup:.0f} times "
        f"sooner than recomputed. Same answers: {_same(comparison)}."
    )


def _remarks(comparison: Comparison) -> Iterator[Text]:
    if not comparison.steady:
        yield Text(
            "Equal work took more than twice as long at times: something else uses "
            "this machine's cores.",
            style="yellow",
        )
    for without, with_kvplugin in comparison.differing:
        yield _difference(without, with_kvplugin)


def _same(comparison: Comparison) -> str:
    total = len(comparison.pairs)
    return f"{total - len(comparison.differing)} of {total}"


def _difference(without: Answer, with_kvplugin: Answer) -> Text:
    return Text(
        f"\n{without.document}: {without.question}\n"
        f"  without: {without.text}\n"
        f"  with:    {with_kvplugin.text}"
    )


def _times(case: Case) -> Cell:
    def cell(run: EngineRun) -> str:
        times = run.ttft_s(case)
        if not times:
            return NOTHING
        spread = f"{min(times) * 1e3:,.0f}-{max(times) * 1e3:,.0f}"
        return f"{milliseconds(median(times))} ({spread})"

    return cell


def milliseconds(seconds: float) -> str:
    """Seconds as readers of latencies like them."""
    return f"{seconds * 1e3:,.0f} ms"


def _offload(name: str, unit: str, scale: float = 1.0) -> Cell:
    """The total of a metric of kvplugin's, divided by `scale` to be in `unit`."""

    def cell(run: EngineRun) -> str:
        value = run.offload(name)
        return f"{value / scale:,.1f} {unit}" if value else NOTHING

    return cell


def _load_rate(run: EngineRun) -> str:
    """Bytes over the time that requests waited for them."""
    seconds = run.offload("load_seconds")
    if not seconds:
        return NOTHING
    return f"{run.offload('loaded_bytes') / seconds / 1e9:.2f} GB/s"


ENGINE_ROWS: Final[dict[str, dict[str, Cell]]] = {
    "Time to first token": {
        "cold": _times(Case.COLD),
        "recomputed (evicted)": _times(Case.RECOMPUTED),
        "loaded from CPU memory": _times(Case.LOADED),
        "hit in vLLM's cache": _times(Case.LOCAL),
        "all questions": lambda run: f"{run.waiting_s:.1f} s",
    },
    "Prompt tokens": {
        "computed": lambda run: f"{run.computed_tokens:,}",
        "loaded from CPU memory": lambda run: f"{run.loaded_tokens:,}",
        "hit in vLLM's cache": lambda run: f"{run.local_tokens:,}",
        "hit rate": lambda run: f"{run.hit_rate:.1%}",
    },
    "CPU memory": {
        "stored": _offload("stored_bytes", "MB", 1e6),
        "loaded": _offload("loaded_bytes", "MB", 1e6),
        "load rate": _load_rate,
        "recompute saved (est.)": _offload("recompute_seconds_saved", "s"),
    },
}
"""Sections of the table: a heading, and labelled words about one engine each."""
