"""What tests of real reads share: waiting, comparing, readers with faults."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvplugin.connectors.nixl.descriptor import EngineDescriptor, RankDescriptor
from kvplugin.connectors.nixl.messages import Completion, GroupRead
from kvplugin.connectors.nixl.read_thread import ReadThreads
from kvplugin.connectors.nixl.readers import MakeReaders, Read, Reader, ReaderChoice
from kvplugin.connectors.nixl.reads import Transfer
from kvplugin.contract import WorkerOutcome
from tests.nixl.ranks import Rank, RankSpec, ends, rows_of

LIMIT_SECONDS = 240.0
WAYS = ("auto", "off")
"""Of `same_host`: by the kernel, and by NIXL."""


def consumer(spec: RankSpec, same_host: str = "auto", **seams: Any) -> Rank:
    """An engine like another one, with zeroes in its memory."""
    config = {"read_wait_ms": 50.0, "same_host": same_host, **spec.config}
    return Rank(replace(spec, engine_id="reader", seed=0, config=config), **seams)


def wait_until(is_true: Callable[[], Any], what: str = "it") -> None:
    """A liveness limit far beyond any deadline."""
    limit = time.monotonic() + LIMIT_SECONDS
    while not is_true():
        assert time.monotonic() < limit, f"{what} does not happen"
        time.sleep(0.005)


def outcome_of(rank: Rank, order_id: int) -> tuple[Completion, WorkerOutcome]:
    """How an order ended, and what the engine was told with it."""
    found: list[tuple[Completion, WorkerOutcome]] = []

    def has_ended() -> bool:
        outcome = rank.worker.poll()
        end = ends(outcome).get(order_id)
        if end is not None:
            found.append((end, outcome))
        return end is not None

    wait_until(has_ended, f"the end of order {order_id}")
    return found[0]


def ends_of(rank: Rank, order_ids: Sequence[int]) -> list[Completion]:
    """How several orders ended."""
    found: dict[int, Completion] = {}

    def have_ended() -> bool:
        found.update(ends(rank.worker.poll()))
        return found.keys() >= set(order_ids)

    wait_until(have_ended, f"the end of orders {order_ids}")
    return [found[order_id] for order_id in order_ids]


def end_of(rank: Rank, order_id: int) -> Completion:
    """How an order ended."""
    return outcome_of(rank, order_id)[0]


def assert_pages_equal(
    rank: Rank, source: "dict[str, np.ndarray[Any, Any]]", part: GroupRead
) -> None:
    """Pages of two engines, block by block."""
    for layer in range(rank.spec.groups[part.group].layers):
        name = f"{part.group}.{layer}"
        ours, theirs = rank.memory[name], source[name]
        assert np.array_equal(ours[part.local_ids], theirs[part.remote_ids]), name


def assert_rows_equal(
    rank: Rank,
    source_spec: RankSpec,
    source: "dict[str, np.ndarray[Any, Any]]",
    part: GroupRead,
) -> None:
    """Rows of two engines, token by token, whatever their layouts."""
    here, there = rank.spec.groups[part.group], source_spec.groups[part.group]
    for layer in range(here.layers):
        name = f"{part.group}.{layer}"
        seen = [
            rows_of(
                group,
                memory[name],
                ids,
                range(
                    part.first_token - part.first_token // size * size,
                    part.end_token - part.first_token // size * size,
                ),
            )
            for group, memory, ids, size in (
                (here, rank.memory, part.local_ids, here.block_size),
                (there, source, part.remote_ids, there.block_size),
            )
        ]
        assert seen[0] == seen[1], name


def read_threads() -> list[str]:
    """Threads that read from peers."""
    return [t.name for t in threading.enumerate() if t.name.startswith("kvplugin-read")]


class Gate:
    """Where reads wait for the test: `make` is for `NixlWorker(make_readers=...)`.

    Args:
        holds: how many reads of a rank go through before one is held.
    """

    def __init__(self, holds: Callable[[int], bool]) -> None:
        self.holds = holds
        self.is_held = threading.Event()
        self.may_go = threading.Event()
        self.begun = 0
        self.choice: MakeReaders | None = None

    def make(
        self, ours: RankDescriptor, engine: EngineDescriptor, ranks: Sequence[int]
    ) -> dict[int, Reader]:
        """Readers that wait at the gate."""
        assert self.choice is not None
        inner = self.choice(ours, engine, ranks)
        return {rank: GatedReader(self, reader) for rank, reader in inner.items()}


class GatedReader:
    """A reader whose reads may be held before their first byte moves."""

    def __init__(self, gate: Gate, inner: Reader) -> None:
        self._gate = gate
        self._inner = inner
        self.minds_pieces = inner.minds_pieces

    def begin(self, transfer: Transfer) -> Read:
        """A read that may be held."""
        self._gate.begun += 1
        return GatedRead(
            self._gate,
            self._gate.holds(self._gate.begun),
            lambda: self._inner.begin(transfer),
        )

    def close(self) -> None:
        """Of the reader within."""
        self._inner.close()


class GatedRead:
    """A read that begins when it may go."""

    def __init__(self, gate: Gate, is_held: bool, begin: Callable[[], Read]) -> None:
        self._gate = gate
        self._is_held = is_held
        self._begin = begin
        self._inner: Read | None = None

    @property
    def is_prompt(self) -> bool:
        """As the read within."""
        return self._inner is not None and self._inner.is_prompt

    def stop(self) -> None:
        """As the read within."""
        if self._inner is not None:
            self._inner.stop()

    def poll(self) -> bool:
        """Hold, then as the read within."""
        if self._is_held and not self._gate.may_go.is_set():
            self._gate.is_held.set()
            return False
        if self._inner is None:
            self._inner = self._begin()
        return self._inner.poll()


def gated(spec: RankSpec, same_host: str, gate: Gate) -> Rank:
    """A consumer whose reads go through a gate."""
    rank = consumer(spec, same_host, make_readers=gate.make)
    memory = rank.worker._memory
    assert memory is not None
    gate.choice = ReaderChoice(rank.config, memory.agent)
    assert isinstance(rank.worker._reads, ReadThreads)
    return rank
