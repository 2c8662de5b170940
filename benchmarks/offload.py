"""Offload on stock vLLM and SmolLM2: first tokens, idle steps, stores, memory.

Engines with and without kvplugin run at the same time in processes of their own and
are asked in turn, one at work at a time, so that a slow spell of the machine hits all
alike. Ratios are taken within a turn.
"""

import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any, Final

import click

from benchmarks import _offload_work as work
from benchmarks._ratios import (
    LEAST_PAIRS,
    Interval,
    median_interval,
    paired_ratios,
    verdict,
)
from kvplugin.integration.demo.model import (
    KV_BYTES_PER_TOKEN,
    cache_folder,
    prepare_smollm2,
)
from tests.engine.host import EngineHost, offload
from tests.engine.prompts import tokens

GIB: Final = 2**30
HOST_BYTES: Final = GIB // 4
"""Room for one batch of stores and a little more. It is full after the first one, so
that later ones evict, and do not touch memory for the first time, which can cost many
times as much as the copy, on virtual machines above all."""
BLOCK: Final = 128
"""Tokens of a block: vLLM's default on a CPU."""
PROMPTS: Final = (1030, 2055, 3975)
"""Tokens of the prompts whose first token is timed: whole blocks and a few more."""
SOURCES: Final = ("recomputed", "local hit", "host memory", "ExampleConnector")
COMPARED: Final = (
    ("recomputed", "host memory"),
    ("host memory", "local hit"),
    ("ExampleConnector", "host memory"),
)
REQUESTS: Final = 64
STORED_TOKENS: Final = 132
"""Of each of these requests: one block of 128, which is stored, and a rest."""
DECODING: Final = (8, 60)
"""Requests of a decode step, and steps of a turn."""
IDLE_BAR: Final = 1.05
STORE_BAR: Final = 1.08
NARROW: Final = 0.04
"""Width of an interval below which no pairs are added."""
STEADY_HEAP: Final = {
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
}
"""glibc keeps what torch gives back. By default it depends on the layout of the heap,
and so on chance, whether an engine's memory goes back to the system and is faulted in
again at every step: with or without a connector, 20 % of the CPU time."""
SECTIONS: Final = ("first-tokens", "idle", "stores", "memory")

Engines = Mapping[str, EngineHost]


@click.command("offload")
@click.option(
    "--pairs",
    default=10,
    show_default=True,
    type=click.IntRange(LEAST_PAIRS),
    help="Interleaved pairs of measurements, at least.",
)
@click.option(
    "--max-pairs",
    default=60,
    show_default=True,
    type=click.IntRange(LEAST_PAIRS),
    help="At most, however wide the intervals are by then.",
)
@click.option(
    "--sections",
    default=",".join(SECTIONS),
    show_default=True,
    help="Parts to run, separated by commas.",
)
def main(pairs: int, max_pairs: int, sections: str) -> None:
    """Time to first token by source of the KV; cost of idle steps and of stores."""
    wanted = _parse(sections)
    os.environ.update(STEADY_HEAP)  # read when the engines' processes begin
    with tempfile.TemporaryDirectory() as name, _engines(Path(name), wanted) as engines:
        started = _memory(engines)
        if "first-tokens" in wanted:
            _first_tokens(engines, pairs, Path(name))
        if "idle" in wanted:
            _idle_steps(engines, pairs, max_pairs)
        if "stores" in wanted:
            _stores(engines, pairs, max_pairs)
        if "memory" in wanted:
            _print_memory("started", started)
            _print_memory("at the end", _memory(engines))


def _parse(sections: str) -> list[str]:
    wanted = sections.split(",")
    if unknown := [name for name in wanted if name not in SECTIONS]:
        raise click.BadParameter(
            f"{', '.join(unknown)}: there are {', '.join(SECTIONS)}",
            param_hint="--sections",
        )
    return wanted


# -- engines -----------------------------------------------------------------------


@contextmanager
def _engines(folder: Path, sections: Sequence[str]) -> Iterator[Engines]:
    """By name: ``without`` a connector, ``offload``, and ``example`` where a section
    asks for it."""
    configs = {"without": None, "offload": offload(cpu_bytes=HOST_BYTES)}
    if "first-tokens" in sections:
        configs["example"] = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(_files(folder))},
        }
    engines: dict[str, EngineHost] = {}
    try:
        for name, config in configs.items():
            engines[name] = _start(folder / f"{name}.log", config)
        yield engines
    finally:
        for engine in engines.values():
            engine.close()


def _start(log: Path, kv_transfer_config: Any) -> EngineHost:
    return EngineHost(
        log,
        model=str(prepare_smollm2(cache_folder())),
        # All requests of a batch fit at once, and so does a prompt in one chunk.
        kv_cache_memory_bytes=3 * REQUESTS * STORED_TOKENS * KV_BYTES_PER_TOKEN,
        max_num_batched_tokens=4096,
        block_size=BLOCK,
        max_num_seqs=REQUESTS,
        max_model_len=4096,
        kv_transfer_config=kv_transfer_config,
    )


def _files(folder: Path) -> Path:
    """Where ExampleConnector keeps what it stores."""
    return folder / "stored"


# -- first tokens ------------------------------------------------------------------


def _first_tokens(engines: Engines, repeats: int, folder: Path) -> None:
    """One prompt from each source in turn; each repeat has a new one."""
    click.echo("time to first token in ms, medians, and ratios with their 95 % range")
    click.echo(f"{'tokens':>8}" + "".join(f"{source:>18}" for source in SOURCES))
    comparisons = []
    for count in PROMPTS:
        seconds: dict[str, list[float]] = {source: [] for source in SOURCES}
        for repeat in range(repeats + 1):
            prompt = tokens(f"first {count} {repeat}", count)
            taken = _turn(engines, prompt, repeat)
            rmtree(_files(folder), ignore_errors=True)
            if repeat:
                for source, value in taken.items():
                    seconds[source].append(value)
        medians = [statistics.median(seconds[source]) * 1e3 for source in SOURCES]
        click.echo(f"{count:>8}" + "".join(f"{median:>18.1f}" for median in medians))
        comparisons += [_comparison(count, seconds, *pair) for pair in COMPARED]
    click.echo("\n".join(comparisons))
    loaded = engines["offload"].run(work.counter, "vllm:kvplugin_offload_loaded_bytes")
    waited = engines["offload"].run(work.counter, "vllm:kvplugin_offload_load_seconds")
    click.echo(f"loads: {loaded / waited / 1e9:.1f} GB/s, order to completion\n")


def _comparison(
    count: int, seconds: Mapping[str, Sequence[float]], one: str, other: str
) -> str:
    ratios = [a / b for a, b in zip(seconds[one], seconds[other], strict=True)]
    low, median, high, _ = median_interval(ratios)
    return f"{count:>8}  {one} / {other}: {median:.2f} ({low:.2f} to {high:.2f})"


def _turn(engines: Engines, prompt: list[int], repeat: int) -> dict[str, float]:
    """Seconds by source; each of them is the first in some repeat."""
    for name in ("offload", "example"):
        engines[name].run(work.first_token, prompt, True)  # computed, and stored
    asked = {
        "recomputed": ("without", True),
        "local hit": ("offload", False),
        "host memory": ("offload", True),
        "ExampleConnector": ("example", True),
    }
    first = repeat % len(SOURCES)
    seconds = {}
    for source in SOURCES[first:] + SOURCES[:first]:
        engine, reset = asked[source]
        answer = engines[engine].run(work.first_token, prompt, reset)
        least = 0 if source == "recomputed" else len(prompt) - BLOCK
        assert least <= answer.cached_tokens <= least + BLOCK, source
        seconds[source] = answer.seconds
    return seconds


# -- idle steps, stores ------------------------------------------------------------


def _idle_steps(engines: Engines, pairs: int, max_pairs: int) -> None:
    """Nothing to store or load: the connector should cost nothing."""

    def measure(engine: str, pair: int) -> Mapping[str, float]:
        del pair
        return {"seconds": engines[engine].run(work.decode_step, *DECODING).seconds}

    found = _paired(measure, pairs, max_pairs)
    click.echo(
        verdict(
            "an idle connector on a decode step", found["seconds"], IDLE_BAR, NARROW
        )
        + "\n"
    )


def _stores(engines: Engines, pairs: int, max_pairs: int) -> None:
    """All prompts are new and all their blocks are stored."""
    counted = partial(
        engines["offload"].run, work.counter, "vllm:kvplugin_offload_stored_blocks"
    )
    before = counted()

    def measure(engine: str, pair: int) -> Mapping[str, float]:
        prompts = [
            tokens(f"stored {pair} {request}", STORED_TOKENS)
            for request in range(REQUESTS)
        ]
        cost = engines[engine].run(work.requests_at_once, prompts)
        return {"seconds": cost.seconds, "CPU-seconds": cost.cpu_seconds}

    found = _paired(measure, pairs, max_pairs)
    blocks = (found["seconds"].pairs + 1) * REQUESTS * (STORED_TOKENS // BLOCK)
    assert counted() - before == blocks, "not everything was stored"
    for what, ratio in found.items():
        name = f"{REQUESTS} requests that store all, {what} a request"
        click.echo(verdict(name, ratio, STORE_BAR, NARROW))
    click.echo("")


def _paired(measure: Any, pairs: int, max_pairs: int) -> dict[str, Interval]:
    return paired_ratios(
        partial(measure, "without"),
        partial(measure, "offload"),
        least=pairs,
        most=max(pairs, max_pairs),
        narrow=NARROW,
    )


# -- memory ------------------------------------------------------------------------


def _memory(engines: Engines) -> dict[str, int]:
    return {name: engine.run(work.resident_bytes) for name, engine in engines.items()}


def _print_memory(when: str, memory: Mapping[str, int]) -> None:
    sizes = ", ".join(f"{name} {size / GIB:.2f}" for name, size in memory.items())
    click.echo(f"GiB of memory {when}: {sizes}")
