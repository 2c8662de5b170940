"""How near copies of KV blocks come to one contiguous copy of as many bytes."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec

import click

from benchmarks._copy_cases import CASES, Case
from benchmarks._copy_memory import Memory, contiguous, memory_of
from benchmarks._timing import speeds
from kvplugin.kernels.engines import Engine

ENGINES: tuple[Engine, ...] = ("numba", "numpy") if find_spec("numba") else ("numpy",)
THREADS = (1, 2)


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    engine: Engine
    threads: int
    bytes_per_second: float
    share: float
    """Of contiguous copies by as many threads."""
    bar: float | None
    """The least share that is good enough."""


@click.command("copy")
@click.option("--mib", default=1024, help="Memory a side; far beyond the caches.")
@click.option("--repeats", default=7, help="Timings of each case.")
@click.option("--huge-pages/--small-pages", default=True, help="Of both sides.")
@click.option("--engine", "engines", multiple=True, type=click.Choice(ENGINES))
@click.option("--only", default="", help="Cases whose name holds this.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def main(
    mib: int,
    repeats: int,
    huge_pages: bool,
    engines: tuple[Engine, ...],
    only: str,
    as_json: bool,
) -> None:
    """Copies of KV blocks in host memory, by one thread and by two."""
    memories = tuple(memory_of(mib << 20, huge_pages) for _ in range(2))
    cases = [case for case in CASES if only in case.name]
    rows = [
        row
        for threads in THREADS
        for row in _measure(cases, engines or ENGINES, memories, threads, repeats)
    ]
    text = "\n".join(_table(rows))
    print(json.dumps([asdict(row) for row in rows]) if as_json else text)


def _measure(
    cases: list[Case],
    engines: tuple[Engine, ...],
    memories: tuple[Memory, ...],
    threads: int,
    repeats: int,
) -> Iterator[Row]:
    keys = [(case, engine) for case in cases for engine in engines]
    works = {
        f"{case.name} {engine}": case.work(engine, *memories, threads)
        for case, engine in keys
    }
    found = speeds(contiguous(*memories, threads), works, repeats)
    for (case, engine), speed in zip(keys, found.values(), strict=True):
        bar = case.bar if engine == "numba" else None
        yield Row(case.name, engine, threads, *speed, bar)


def _table(rows: list[Row]) -> Iterator[str]:
    yield f"{'copy':34} engine threads  GB/s  of a contiguous copy   bar"
    for row in rows:
        speed = f"{row.bytes_per_second / 1e9:5.1f} {row.share:22.0%}"
        bar = "" if row.bar is None else f"{row.bar:6.0%}"
        yield f"{row.name:34} {row.engine:6} {row.threads:7} {speed} {bar}".rstrip()
