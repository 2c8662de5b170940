"""Eviction policies behind vLLM's block pool, beside vLLM's own free queue.

All pools live in one process and take short turns. What counts is the least of a
pool's turns, in time of the thread's own: nothing but other work on the machine makes a
turn slower than another.
"""

import gc
import json
import time
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import click

from kvplugin.policies.eviction.registry import POLICIES, make_policy

_RUN = 64
"""Blocks that a request adopts, and as many that it gets new."""
_REQUESTS = 16
"""Of a turn."""
_VICTIMS = 256
_OWN = "vLLM's own"


class Measured(NamedTuple):
    """Seconds, of one pool in one turn."""

    queue: float
    """A block's `popleft_n` and `append_n`. It keeps its key meanwhile, so that to the
    policy it comes back with a new one."""
    cycle: float
    """A block of a request, through the calls of the pool."""
    victims: float
    """256 blocks from the queue when all blocks are cached and free."""


@click.command("policies")
@click.option("--blocks", default=100_000, show_default=True, help="Of each pool.")
@click.option("--runs", default=30, show_default=True, help="Turns.")
@click.option("--policy", "names", multiple=True, help="Default: all.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def main(blocks: int, runs: int, names: tuple[str, ...], as_json: bool) -> None:
    """Policies behind vLLM's block pool: requests of 128 blocks, half of them hits."""
    subjects = _subjects(names or tuple(POLICIES), blocks)
    turns: dict[str, list[Measured]] = {name: [] for name in subjects}
    gc.collect()
    gc.disable()
    try:
        for seed in range(runs):
            requests = _requests(_REQUESTS, seed)
            for name, subject in subjects.items():
                turns[name].append(subject.measure(requests))
    finally:
        gc.enable()
    for name, subject in subjects.items():
        if subject.failures:
            raise click.ClickException(f"{name} failed and LRU took over")
    found = {name: _least(rows) for name, rows in turns.items()}
    if as_json:
        click.echo(json.dumps({name: row._asdict() for name, row in found.items()}))
    else:
        _show(found, blocks)


def _least(rows: list[Measured]) -> Measured:
    return Measured(*(min(column) for column in zip(*rows, strict=True)))


def _show(found: dict[str, Measured], blocks: int) -> None:
    click.echo(
        f"{f'{blocks:,} blocks':16}{'queue':>12}{'cycle':>20}{'256 victims':>20}"
    )
    own = found[_OWN]
    for name, row in found.items():
        click.echo(
            f"{name:14} {row.queue * 1e9:6.0f} ns {row.queue / own.queue:6.2f}x"
            f" {row.cycle * 1e9:9.0f} ns {row.cycle / own.cycle:6.2f}x"
            f" {row.victims * 1e3:9.3f} ms"
        )
    click.echo()


def _subjects(names: tuple[str, ...], blocks: int) -> "dict[str, _Subject]":
    # Torch comes with them: other commands need not wait for it.
    from vllm.v1.core.block_pool import BlockPool

    from kvplugin.integration.vllm.policy_pool import policy_pool

    ranked = policy_pool(BlockPool)
    subjects = {_OWN: _Subject(BlockPool(blocks, True, 16))}
    for name in names:
        pool: Any = ranked(blocks, True, 16)
        pool.rank_by(lambda _, name=name: make_policy(name, {}))
        subjects[name] = _Subject(pool)
    return subjects


class _Subject:
    """A pool in which every new block evicts one, and a request that just ended."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._hits: list[Any] = pool.get_new_blocks(_RUN)
        first, *others = _requests(1 + 2 * pool.num_gpu_blocks // _RUN, seed=-1)
        pool.cache_full_blocks(first, self._hits, 0, _RUN, 16, 0)
        pool.free_blocks(reversed(self._hits))
        self._serve(others)

    @property
    def failures(self) -> int:
        kvp = getattr(self._pool, "kvp", None)
        return 0 if kvp is None else kvp.failures

    def measure(self, requests: list[Any]) -> Measured:
        cycle = _seconds(lambda: self._serve(requests))
        queue = self._pool.free_block_queue
        turns = _seconds(lambda: self._turn(queue))
        taken: list[Any] = []
        victims = _seconds(lambda: taken.extend(queue.popleft_n(_VICTIMS)))
        queue.append_n(taken)
        blocks = len(requests) * 2 * _RUN
        return Measured(turns / _RUN, cycle / blocks, victims)

    def _serve(self, requests: list[Any]) -> None:
        """Each request adopts the new blocks of the one before it."""
        pool, hits = self._pool, self._hits
        for request in requests:
            pool.admitting = request
            pool.touch(hits)
            pool.admitting = None
            row = hits + pool.get_new_blocks(_RUN)
            pool.cache_full_blocks(request, row, _RUN, 2 * _RUN, 16, 0)
            pool.free_blocks(reversed(row))
            hits = row[_RUN:]
        self._hits = hits

    def _turn(self, queue: Any) -> None:
        queue.append_n(queue.popleft_n(_RUN))


def _seconds(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def _requests(count: int, seed: int) -> list[Any]:
    """What the pool reads of requests; every hash is a new one."""
    random = Random(seed)
    return [
        SimpleNamespace(
            block_hashes=[random.randbytes(32) for _ in range(2 * _RUN)],
            block_context=None,
        )
        for _ in range(count)
    ]
