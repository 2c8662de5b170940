"""The core beside those of vLLM 0.32 and 0.19.1, through the calls of a scheduler.

Each engine runs in a process of its own (`_core_runs.py`); workloads go round the
engines, so that a slow spell of the machine hits all alike, and ratios are taken
within a round.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import click

from tests.oracles import ROOT, V019, V032, environment

ENGINES = {"kvplugin": V032, f"vLLM {V032}": V032, f"vLLM {V019}": V019}
"""Name -> the vLLM that its process can import."""

_OBSERVED = {"enable_kv_cache_events": True, "log_stats": True}
_HALF = {"shared": 1008}
Workload = tuple[str, str, dict[str, Any]]
WORKLOADS: dict[str, Workload] = {
    "cycle, all new, one group": ("cycle", "us", {"groups": "full"}),
    "cycle, all new, events and statistics": (
        "cycle",
        "us",
        {"groups": "full"} | _OBSERVED,
    ),
    "cycle, half of it cached, one group": ("cycle", "us", {"groups": "full"} | _HALF),
    "cycle, all new, 1 full + 2 windows": ("cycle", "us", {"groups": "hybrid"}),
    "cycle, half of it cached, 1 full + 2 windows": (
        "cycle",
        "us",
        {"groups": "hybrid"} | _HALF,
    ),
    "decode call, 256 requests, one group": ("decode", "us", {"groups": "full"}),
    "decode call, events and statistics": (
        "decode",
        "us",
        {"groups": "full"} | _OBSERVED,
    ),
    "decode call, 256 requests, 1 full + 2 windows": (
        "decode",
        "us",
        {"groups": "hybrid"},
    ),
    "build a pool of 100,000": ("build", "ms", {"num_blocks": 100_000}),
}


@click.command("core")
@click.option("--runs", default=5, show_default=True, help="Rounds.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def main(runs: int, as_json: bool) -> None:
    """Requests of 2,000 tokens in a pool of 100,000 blocks full of cached ones."""
    with _engines() as engines:
        found = [
            {name: _round(engines, workload) for name, workload in WORKLOADS.items()}
            for _ in range(runs)
        ]
    fresh = {
        "memory": _once("memory", {"num_blocks": 100_000}),
        "size": {
            f"{blocks:,} blocks, {count:,} requests": _ask_once(
                "kvplugin", "live", {"num_blocks": blocks, "count": count}
            )
            for blocks, count in ((100_000, 1_000), (1_000_000, 10_000))
        },
    }
    if as_json:
        click.echo(json.dumps({"rounds": found} | fresh))
        return
    for name, (_, unit, _) in WORKLOADS.items():
        _show(name, unit, [run[name] for run in found])
    for name, taken in fresh["memory"].items():
        click.echo(
            f"memory a block, {name:14} {taken['new']:6.0f} B new, "
            f"{taken['total']:6.0f} B with a key"
        )
    for name, taken in fresh["size"].items():
        click.echo(f"{name}: " + ", ".join(f"{k} {v:.2f}" for k, v in taken.items()))
    click.echo()


def _show(name: str, unit: str, rounds: list[dict[str, float]]) -> None:
    ours = statistics.median(run["kvplugin"] for run in rounds)
    line = f"{name:46} {ours:8.2f} {unit}"
    for theirs in list(ENGINES)[1:]:
        ratios = [run[theirs] / run["kvplugin"] for run in rounds]
        line += (
            f"  {theirs} {statistics.median(ratios):5.2f}x "
            f"[{min(ratios):.2f}..{max(ratios):.2f}]"
        )
    click.echo(line)


def _round(
    engines: dict[str, "subprocess.Popen[str]"], workload: Workload
) -> dict[str, float]:
    name, _, options = workload
    return {
        engine: _ask(process, name, options)["total"]
        for engine, process in engines.items()
    }


def _once(name: str, options: dict[str, Any]) -> dict[str, dict[str, float]]:
    """One answer of each engine, of a process that has done nothing else."""
    return {engine: _ask_once(engine, name, options) for engine in ENGINES}


def _ask_once(engine: str, name: str, options: dict[str, Any]) -> dict[str, float]:
    with _engine(engine) as process:
        return _ask(process, name, options)


def _ask(
    process: "subprocess.Popen[str]", name: str, options: dict[str, Any]
) -> dict[str, float]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{name} {json.dumps(options)}\n")
    process.stdin.flush()
    answer: dict[str, float] = json.loads(process.stdout.readline())
    return answer


@contextmanager
def _engines() -> Iterator[dict[str, "subprocess.Popen[str]"]]:
    with ExitStack() as stack:
        yield {name: stack.enter_context(_engine(name)) for name in ENGINES}


@contextmanager
def _engine(name: str) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks._core_runs", name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        env=environment(ENGINES[name]),
        text=True,
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise click.ClickException(f"{name} does not start")
        yield process
    finally:
        process.kill()
        process.wait()
