"""What a block's hash costs, beside both versions of vLLM.

A run measures kvplugin, each vLLM version in a process of its own, and kvplugin again;
ratios are taken within a run, so that a slow spell of the machine hits all alike.
"""

import json
import statistics
import time
from collections.abc import Callable

import click

from kvplugin.hashing import get_hash_format
from kvplugin.request import Request
from tests.oracles import V019, V032, ask

BLOCK_SIZE = 16
PROMPT_TOKENS = 100_000
APPEND = "kv_sha256, append a token"
Times = dict[str, float]
"""Microseconds a block (or token, where it says so) by who hashed it and how."""


@click.command("hashing")
@click.option("--runs", default=5, show_default=True, help="Rounds of processes.")
@click.option("--rounds", default=15, show_default=True, help="Timings in each.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def main(runs: int, rounds: int, as_json: bool) -> None:
    """Hashes of a prompt of 100,000 tokens in blocks of 16; median [least to most]."""
    found = [_run(rounds) for _ in range(runs)]
    if as_json:
        click.echo(json.dumps(found))
        return
    for name in found[0]:
        click.echo(f"{name:36} {_spread([run[name] for run in found])} us")
    for theirs in found[0]:
        if theirs.startswith("vLLM"):
            ours = APPEND if theirs.endswith("token") else "kv_sha256"
            ratios = [run[theirs] / run[ours] for run in found]
            click.echo(f"{theirs:36} {_spread(ratios)} times {ours}")
    click.echo()


def _run(rounds: int) -> Times:
    """Medians of one run; half of ours is taken before vLLM's, half after."""
    ours = _measure(rounds)
    question = {"rounds": rounds, "tokens": PROMPT_TOKENS, "block_size": BLOCK_SIZE}
    theirs: Times = {}
    for version in (V019, V032):
        for algorithm, taken in ask(version, "hashes", question).items():
            theirs[f"vLLM {version} {algorithm}"] = statistics.median(taken)
    for name, taken in _measure(rounds).items():
        ours[name] += taken
    return {name: statistics.median(taken) for name, taken in ours.items()} | theirs


def _measure(rounds: int) -> dict[str, list[float]]:
    names = ("kv_sha256", "xxh3_128", "vllm032_sha256_cbor")
    request = Request("r", range(1000, 1000 + PROMPT_TOKENS))
    works = {name: _hashing(name, request) for name in names}
    works[APPEND] = _append
    taken: dict[str, list[float]] = {name: [] for name in works}
    # One after the other, as vLLM's are measured: none finds another's data in cache.
    for name, work in works.items():
        for _ in range(rounds):
            start = time.perf_counter()
            count = work()
            taken[name].append((time.perf_counter() - start) / count * 1e6)
    return taken


def _hashing(name: str, request: Request) -> Callable[[], int]:
    hash_format = get_hash_format(name)

    def work() -> int:
        hashes: list[bytes] = []
        hash_format.extend(hashes, request, BLOCK_SIZE)
        return len(hashes)

    return work


def _append() -> int:
    """Tokens one by one; every 16th completes a block."""
    request = Request("r", [0], hash_format=get_hash_format())
    for token in range(10_000):
        request.append_output_token_ids(token)
    return 10_000


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):6.2f} [{min(values):.2f} to {max(values):.2f}]"
