"""Offload on stock vLLM and SmolLM2: first tokens, memory, and an idle connector.

Both engines, with and without kvplugin, run at the same time in processes of their
own and are asked in turn, so that a slow spell of the machine hits both alike.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvplugin.integration.demo.model import (
    KV_BYTES_PER_TOKEN,
    cache_folder,
    prepare_smollm2,
)
from tests.engine import asking
from tests.engine.host import EngineHost, offload
from tests.engine.prompts import tokens

PROMPT_TOKENS = 3900
GIB = 2**30


@click.command("offload")
@click.option("--pairs", default=20, show_default=True, help="Interleaved pairs.")
def main(pairs: int) -> None:
    """Time to first token by source of the KV, memory, cost of an idle step."""
    with tempfile.TemporaryDirectory() as folder:
        without = _start(Path(folder) / "without.log")
        memory = without.run(resident_bytes)
        with_it = _start(
            Path(folder) / "with.log", kv_transfer_config=offload(cpu_bytes=GIB)
        )
        try:
            _print_memory("started", memory, with_it.run(resident_bytes))
            _first_tokens(with_it, repeats=3)
            _print_memory("after a prompt", memory, with_it.run(resident_bytes))
            _idle_steps(without, with_it, pairs)
        finally:
            without.close()
            with_it.close()


def _start(log: Path, **arguments: Any) -> EngineHost:
    return EngineHost(
        log,
        model=str(prepare_smollm2(cache_folder())),
        kv_cache_memory_bytes=6000 * KV_BYTES_PER_TOKEN,
        max_model_len=4096,
        **arguments,
    )


def _first_tokens(engine: EngineHost, repeats: int) -> None:
    """One prompt: computed, then from the local cache, then from host memory."""
    seconds: dict[str, list[float]] = {"recomputed": [], "local": [], "loaded": []}
    for repeat in range(repeats):
        prompt = tokens(f"benchmark {repeat}", PROMPT_TOKENS)
        for source in seconds:
            if source != "local":
                assert engine.run(asking.reset)
            seconds[source].append(engine.run(time_to_first_token, prompt))
    medians = {source: statistics.median(taken) for source, taken in seconds.items()}
    for source, median in medians.items():
        click.echo(f"{source:12} {median * 1e3:8.1f} ms to the first token")
    click.echo(f"recomputed / loaded {medians['recomputed'] / medians['loaded']:6.1f}")
    click.echo(f"loaded / local hit  {medians['loaded'] / medians['local']:6.2f}")
    seen = engine.run(asking.metrics)
    loaded = seen["vllm:kvplugin_offload_loaded_bytes"]
    waited = seen["vllm:kvplugin_offload_load_seconds"]
    click.echo(f"loads: {loaded / waited / 1e9:.1f} GB/s, order to completion\n")


def _idle_steps(without: EngineHost, with_it: EngineHost, pairs: int) -> None:
    """Decode steps: nothing to store or load, so the connector should cost nothing."""
    ratios = []
    for pair in range(pairs + 1):
        engines = [without, with_it] if pair % 2 else [with_it, without]
        taken = {engine: engine.run(seconds_per_step) for engine in engines}
        if pair:
            ratios.append(taken[with_it] / taken[without])
    quarter, median, three_quarters = statistics.quantiles(ratios, n=4)
    click.echo(
        f"an idle connector on a decode step: {median:.3f} of a step without it "
        f"(median of {pairs} pairs, quartiles {quarter:.3f} to {three_quarters:.3f})\n"
    )


def _print_memory(when: str, without: int, with_it: int) -> None:
    click.echo(
        f"memory {when}: {without / GIB:.2f} GiB without, {with_it / GIB:.2f} with"
    )


def time_to_first_token(llm: Any, prompt: list[int]) -> float:
    """Wall seconds of a request for one token."""
    return _timed(lambda: asking.ask_one(llm, prompt, 1))


def seconds_per_step(llm: Any) -> float:
    """Wall seconds of a step that decodes for eight requests."""
    steps = 60
    prompts = [tokens(f"idle {i}", 20) for i in range(8)]
    return _timed(lambda: asking.ask(llm, prompts, steps)) / steps


def resident_bytes(llm: Any) -> int:
    """Memory of the engine's process."""
    del llm
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
