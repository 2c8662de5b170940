"""Orders given up before their first byte: they end at once, whatever hangs."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvplugin.connectors.nixl.descriptor import EngineDescriptor, RankDescriptor
from kvplugin.connectors.nixl.messages import GroupRead, ReadOrder
from kvplugin.connectors.nixl.peer_thread import IN_FLIGHT
from kvplugin.connectors.nixl.readers import Reader
from tests.nixl.ranks import Rank, order
from tests.nixl.reading import (
    assert_pages_equal,
    end_of,
    ends_of,
    outcome_of,
    read_threads,
    wait_until,
)
from tests.nixl.test_read_thread import SPEC, Producer, World

UNBEGUN = "nobody waits for it any more"


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.hung.clear()
    wait_until(lambda: not read_threads(), "the end of all threads")
    assert not world.open, "every reader is closed"


def part_of(number: int) -> GroupRead:
    """One block of each side, the order's own."""
    return GroupRead(0, 0, 16, [9], [20 + number])


def orders(producer: Producer, numbers: Sequence[int]) -> list[ReadOrder]:
    return [order(n, producer.peer, [part_of(n)]) for n in numbers]


def test_one_of_a_row_that_goes_on(world: World) -> None:
    producer, rank = world.producer(), world.consumer()
    world.hung = {"producer"}
    reads = orders(producer, range(IN_FLIGHT + 1))
    rank.step(peers=[producer.peer], reads=reads)
    wait_until(lambda: len(world.begun) == IN_FLIGHT)
    rank.step(given_up=[IN_FLIGHT])
    end, outcome = outcome_of(rank, IN_FLIGHT)
    assert end.error == UNBEGUN
    assert outcome.failed_loads == {f"r{IN_FLIGHT}": [20 + IN_FLIGHT]}
    world.hung.clear()
    assert {end.error for end in ends_of(rank, range(IN_FLIGHT))} == {""}
    assert not rank.memory["0.0"][20 + IN_FLIGHT].any()
    rank.worker.close()


def test_behind_as_many_as_hang(world: World) -> None:
    producer, rank = world.producer(), world.consumer()
    world.hung = {"producer"}
    begun, queued = range(IN_FLIGHT), range(IN_FLIGHT, IN_FLIGHT + 5)
    reads = orders(producer, [*begun, *queued])
    rank.step(peers=[producer.peer], reads=reads)
    wait_until(lambda: len(world.begun) == IN_FLIGHT)
    rank.step(given_up=[*begun, *queued])
    assert {end.error for end in ends_of(rank, queued)} == {UNBEGUN}
    rank.step(given_up=queued)
    assert not rank.worker.poll().finished_loads, "an order ends once"
    world.hung.clear()
    assert {end.error for end in ends_of(rank, begun)} == {"stopped"}
    assert len(world.begun) == IN_FLIGHT
    assert not rank.memory["0.0"].any()
    after = GroupRead(0, 0, 16, [30], [20])
    rank.step(reads=[order(99, producer.peer, [after])])
    assert end_of(rank, 99).error == ""
    assert_pages_equal(rank, producer.memory, after)
    rank.worker.close()


@pytest.mark.parametrize("fails", [False, True])
def test_while_the_thread_connects(world: World, fails: bool) -> None:
    """The one that connects, those beside it, and those behind them."""
    connects, may_connect = threading.Event(), threading.Event()

    def make(
        ours: RankDescriptor, engine: EngineDescriptor, ranks: Sequence[int]
    ) -> dict[int, Reader]:
        connects.set()
        may_connect.wait()
        if fails:
            raise OSError("no way there")
        return world.make(ours, engine, ranks)

    producer = world.producer()
    rank = Rank(replace(SPEC, engine_id="reader", seed=0), make_readers=make)
    numbers = range(IN_FLIGHT + 3)
    rank.step(peers=[producer.peer], reads=orders(producer, numbers))
    wait_until(connects.is_set)
    wanted = [1, IN_FLIGHT + 1]
    rest = [number for number in numbers if number not in wanted]
    rank.step(given_up=rest)
    try:
        assert {end.error for end in ends_of(rank, rest)} == {UNBEGUN}
    finally:
        may_connect.set()
    found = ends_of(rank, wanted)
    assert {end.error for end in found} == {"no way there" if fails else ""}
    assert not rank.worker.poll().finished_loads, "an order ends once"
    for number in numbers:
        filled = not fails and number in wanted
        assert np.any(rank.memory["0.0"][20 + number]) == filled
    rank.worker.close()


def test_behind_a_thread_that_does_not_end(world: World) -> None:
    """The peer was forgotten and met again while an old read of it hangs."""
    producer, rank = world.producer(), world.consumer()
    world.hung = {"producer"}
    rank.step(peers=[producer.peer], reads=orders(producer, [1]))
    wait_until(lambda: world.begun)
    rank.step(gone=[producer.peer.peer_id])
    rank.step(peers=[producer.peer], reads=orders(producer, [2, 3]))
    rank.step(given_up=[2])
    assert end_of(rank, 2).error == UNBEGUN
    world.hung.clear()
    assert {end.error for end in ends_of(rank, [1, 3])} == {""}
    assert not rank.memory["0.0"][22].any()
    rank.worker.close()


def test_as_the_worker_half_closes(world: World) -> None:
    """What is queued ends though the peer's thread is left to what hangs."""
    producer, rank = world.producer(), world.consumer()
    rank.worker._reads._close_seconds = 0.05  # type: ignore[union-attr]
    world.hung = {"producer"}
    numbers = range(IN_FLIGHT + 2)
    rank.step(peers=[producer.peer], reads=orders(producer, numbers))
    wait_until(lambda: len(world.begun) == IN_FLIGHT)
    rank.worker.close()
    queued = numbers[IN_FLIGHT:]
    assert {end.error for end in ends_of(rank, queued)} == {UNBEGUN}
    world.hung.clear()
    rank.worker.close()
