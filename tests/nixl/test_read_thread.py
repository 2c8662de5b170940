"""Threads that read, with readers that fail, hang and lie, in one process."""

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from kvplugin.connectors.nixl.connection import CHECK_ENTRIES
from kvplugin.connectors.nixl.descriptor import EngineDescriptor, RankDescriptor
from kvplugin.connectors.nixl.messages import GroupRead, Peer
from kvplugin.connectors.nixl.read_thread import ReadThreads
from kvplugin.connectors.nixl.readers import Read, Reader
from kvplugin.connectors.nixl.reads import Transfer
from kvplugin.connectors.nixl.staging import SLICES
from kvplugin.errors import TransferError
from tests.nixl.ranks import GroupSpec, Rank, RankSpec, order, peer_of
from tests.nixl.reading import (
    assert_pages_equal,
    assert_rows_equal,
    end_of,
    outcome_of,
    read_threads,
    wait_until,
)

OFFLINE = {"backends": [], "read_wait_ms": 20.0, "staging_bytes": 1 << 18}
SPEC = RankSpec("producer", (GroupSpec(),), 512, config=OFFLINE)
PART = GroupRead(0, 0, 64, [3, 9, 5, 6], [7, 8, 1, 2])


class World:
    """Engines of one process, and what becomes of reads between them.

    A read of a peer in `hung` waits until it is taken out; one in `broken` fails, or
    raises what no reader should; bytes move when a read ends.
    """

    def __init__(self) -> None:
        self.hung: set[str] = set()
        self.broken: dict[str, Exception] = {}
        self.pieces: dict[str, int] = {}
        """Polls that a read takes, by peer."""
        self.before: Callable[[Transfer], None] = lambda transfer: None
        self.begun: list[Transfer] = []
        self.open: list[str] = []
        self.polls = 0

    def make(
        self, ours: RankDescriptor, engine: EngineDescriptor, ranks: Sequence[int]
    ) -> dict[int, Reader]:
        """Readers of one peer."""
        if engine.engine_id in self.broken and not ranks:
            raise TransferError("no way there")
        self.open.append(engine.engine_id)
        return {rank: MemoryReader(self, engine.engine_id) for rank in ranks}

    def producer(self, name: str = "producer", **changes: object) -> "Producer":
        """An engine to read from."""
        return Producer(replace(SPEC, engine_id=name, **changes))  # type: ignore[arg-type]

    def consumer(self, **changes: object) -> Rank:
        """An engine that reads."""
        spec = replace(SPEC, engine_id="reader", seed=0)
        return Rank(replace(spec, **changes), make_readers=self.make)  # type: ignore[arg-type]


class Producer(Rank):
    """A rank in this process, as a peer."""

    def __init__(self, spec: RankSpec) -> None:
        super().__init__(spec)
        self.peer: Peer = peer_of(spec, [self.introduction()])


class MemoryReader:
    """Reads by memmove."""

    minds_pieces = False

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name

    def begin(self, transfer: Transfer) -> Read:
        error = self._world.broken.get(self._name)
        self._world.begun.append(transfer)
        if error is not None and str(error) == "at the start":
            raise error
        return MemoryRead(self._world, self._name, transfer)

    def close(self) -> None:
        self._world.open.remove(self._name)


class MemoryRead:
    """A read whose bytes move at its end."""

    def __init__(self, world: World, name: str, transfer: Transfer) -> None:
        self._world = world
        self._name = name
        self._transfer = transfer
        self._left = world.pieces.get(name, 1)
        self._is_stopped = False

    @property
    def is_prompt(self) -> bool:
        return self._name not in self._world.hung

    def stop(self) -> None:
        self._is_stopped = True

    def poll(self) -> bool:
        self._world.polls += 1
        if self._name in self._world.hung:
            return False
        if self._is_stopped:
            raise TransferError("stopped")
        if error := self._world.broken.get(self._name):
            raise error
        self._left -= 1
        if self._left > 0:
            return False
        self._world.before(self._transfer)
        t = self._transfer
        for remote, local, nbytes in zip(t.remote, t.local, t.nbytes, strict=True):
            ctypes.memmove(int(local), int(remote), int(nbytes))
        return True


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.hung.clear()
    wait_until(lambda: not read_threads(), "the end of all threads")
    assert not world.open, "every reader is closed"


def staging_of(rank: Rank) -> int:
    """Free slices."""
    assert rank.worker._memory is not None
    return len(rank.worker._memory.staging._free)


class TestManyPeers:
    def test_one_that_hangs_holds_up_nobody_else(self, world: World) -> None:
        one, other = world.producer("one"), world.producer("other")
        rank = world.consumer()
        world.hung = {"one"}
        rank.step(
            peers=[one.peer, other.peer],
            reads=[order(n, one.peer, [PART]) for n in range(1, 9)],
        )
        part = GroupRead(0, 0, 16, [30], [40])
        rank.step(reads=[order(9, other.peer, [part])])
        assert end_of(rank, 9).error == ""
        assert_pages_equal(rank, other.memory, part)

        assert rank.worker.poll().finished_loads == frozenset()
        world.hung.clear()
        seen = {end_of(rank, 8).error}
        assert seen == {""}
        rank.worker.close()

    def test_nor_does_one_that_hangs_with_staging(self, world: World) -> None:
        """Each peer's orders may hold every slice but what the others need is there
        again when they end."""
        group = replace(SPEC.groups[0], order="HND")
        producers = [world.producer(f"p{n}") for n in range(SLICES)]
        last = world.producer("last")
        rank = world.consumer(groups=(group,))
        world.hung = {producer.info.engine_id for producer in producers}
        rank.step(peers=[*(p.peer for p in producers), last.peer])
        for number, producer in enumerate(producers):
            rank.step(reads=[order(number, producer.peer, [PART])])
        wait_until(lambda: staging_of(rank) == 0)
        part = GroupRead(0, 0, 64, [33, 39, 35, 36], [47, 48, 41, 42])
        rank.step(reads=[order(9, last.peer, [part])])
        assert not rank.worker.poll().finished_loads
        world.hung.pop()
        assert end_of(rank, 9).error == ""
        assert_rows_equal(rank, SPEC, last.memory, part)
        world.hung.clear()
        wait_until(lambda: rank.worker.poll() and staging_of(rank) == SLICES)
        rank.worker.close()

    def test_a_peer_comes_again_while_an_old_read_of_it_hangs(
        self, world: World
    ) -> None:
        producer = world.producer()
        rank = world.consumer()
        world.hung = {"producer"}
        rank.step(peers=[producer.peer], reads=[order(1, producer.peer, [PART])])
        wait_until(lambda: world.begun)
        rank.step(gone=[producer.peer.peer_id])
        part = GroupRead(0, 0, 16, [30], [40])
        rank.step(peers=[producer.peer], reads=[order(2, producer.peer, [part])])
        assert not rank.worker.poll().finished_loads
        world.hung.clear()
        assert end_of(rank, 2).error == ""
        wait_until(lambda: len(read_threads()) == 1)
        rank.worker.close()


class TestEnds:
    def test_given_up_on_the_way_it_stops_early(self, world: World) -> None:
        producer = world.producer()
        rank = world.consumer()
        world.pieces["producer"] = 1 << 30
        rank.step(peers=[producer.peer], reads=[order(1, producer.peer, [PART])])
        wait_until(lambda: world.polls > 10)
        rank.step(given_up=[1])
        assert "stopped" in end_of(rank, 1).error
        assert not rank.memory["0.0"].any()
        rank.worker.close()

    def test_its_end_is_not_said_while_another_rank_still_writes(
        self, world: World
    ) -> None:
        """One of two ranks fails at once, the other one's read is still active."""
        half = replace(SPEC.groups[0], heads=1, total_heads=2)
        specs = [
            replace(SPEC, groups=(half,), tp_size=2, rank=rank, seed=rank + 1)
            for rank in (0, 1)
        ]
        ranks = [Rank(spec) for spec in specs]
        peer = peer_of(specs[0], [rank.introduction() for rank in ranks])
        consumer = world.consumer()
        reader_of = world.make

        def make(
            ours: RankDescriptor, engine: EngineDescriptor, ranks: Sequence[int]
        ) -> dict[int, Reader]:
            reader_of(ours, engine, ())
            return {rank: MemoryReader(world, f"rank {rank}") for rank in ranks}

        world.hung = {"rank 0"}
        world.broken = {"rank 1": TransferError("cable")}
        consumer.worker.close()
        consumer = Rank(replace(SPEC, engine_id="reader", seed=0), make_readers=make)
        world.open += ["rank 0", "rank 1"]
        consumer.step(peers=[peer], reads=[order(1, peer, [PART])])
        wait_until(lambda: world.polls > 10)
        assert not consumer.worker.poll().finished_loads
        world.hung.clear()
        assert "cable" in end_of(consumer, 1).error
        consumer.worker.close()
        world.open.remove("producer")

    @pytest.mark.parametrize(
        "error",
        [TransferError("at the start"), TransferError("cable"), ValueError("a defect")],
    )
    def test_what_a_reader_raises_is_the_error(
        self, world: World, error: Exception
    ) -> None:
        producer = world.producer()
        rank = world.consumer()
        world.broken["producer"] = error
        rank.step(peers=[producer.peer], reads=[order(1, producer.peer, [PART])])
        end, outcome = outcome_of(rank, 1)
        assert end.error == str(error)
        assert not end.discarded
        assert outcome.failed_loads == {"r1": PART.local_ids}
        del world.broken["producer"]
        rank.step(reads=[order(2, producer.peer, [PART])])
        assert end_of(rank, 2).error == ""
        rank.worker.close()

    def test_seconds_and_bytes(self, world: World) -> None:
        producer = world.producer()
        now = [100.0]
        rank = Rank(
            replace(SPEC, engine_id="reader", seed=0),
            make_readers=world.make,
            clock=lambda: now[0],
        )

        def later(transfer: Transfer) -> None:
            now[0] += 0.25

        world.before = later
        rank.step(peers=[producer.peer], reads=[order(1, producer.peer, [PART])])
        end = end_of(rank, 1)
        assert end.nbytes == 4 * 2 * SPEC.groups[0].page_bytes
        assert end.seconds == 0.5, "the bytes, then the generations"
        rank.worker.close()


class TestGenerations:
    def test_are_read_after_all_bytes(self, world: World) -> None:
        producer = world.producer()
        rank = world.consumer()
        rank.step(peers=[producer.peer], reads=[order(1, producer.peer, [PART])])
        assert end_of(rank, 1).error == ""
        address = producer.worker._registered.generations.ctypes.data
        data, check = world.begun
        assert set(check.remote.tolist()) == {
            address + 8 * start for start in (0, 3, 5, 9)
        }
        assert check.nbytes.tolist() == [8, 8, 16, 8]
        assert not set(data.remote.tolist()) & set(check.remote.tolist())
        rank.worker.close()

    @pytest.mark.parametrize("count", [1, CHECK_ENTRIES - 1, CHECK_ENTRIES + 500])
    @pytest.mark.parametrize("which", [0, -1])
    def test_each_of_many_counts(self, world: World, count: int, which: int) -> None:
        tiny = GroupSpec(layers=1, block_size=1, heads=1, head_size=2)
        changes = {"groups": (tiny,), "num_blocks": CHECK_ENTRIES + 600}
        producer = world.producer(**changes)
        rank = world.consumer(**changes)
        ids = list(range(1, 2 * count, 2)) if count == 1 else list(range(1, count + 1))
        part = GroupRead(0, 0, count, ids, ids)
        rank.step(peers=[producer.peer], reads=[order(1, producer.peer, [part])])
        assert end_of(rank, 1).error == ""
        producer.step(generations=[(ids[which], 1)])
        rank.step(reads=[order(2, producer.peer, [part])])
        end = end_of(rank, 2)
        assert end.discarded
        assert f"block {ids[which]} is in generation 1, not 0" in end.error
        rank.step(reads=[order(3, producer.peer, [part], {ids[which]: 1})])
        assert end_of(rank, 3).error == ""
        rank.worker.close()

    def test_another_process_is_noticed(self, world: World) -> None:
        producer = world.producer()
        rank = world.consumer()
        rank.step(peers=[producer.peer])
        producer.worker._registered.generations[0] += 1
        rank.step(reads=[order(1, producer.peer, [PART])])
        end = end_of(rank, 1)
        assert end.discarded
        assert "has been replaced" in end.error
        rank.worker.close()

    def test_a_reader_that_moves_nothing_is_noticed(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not what an earlier order left in the same place."""
        producer = world.producer()
        rank = world.consumer()
        rank.step(peers=[producer.peer], reads=[order(1, producer.peer, [PART])])
        assert end_of(rank, 1).error == ""
        monkeypatch.setattr(MemoryRead, "poll", lambda self: True)
        rank.step(reads=[order(2, producer.peer, [PART])])
        assert end_of(rank, 2).discarded
        rank.worker.close()


class TestOrdersThatNameWhatThereIsNot:
    @pytest.mark.parametrize(
        ("part", "why"),
        [
            (GroupRead(0, 0, 16, [512], [1]), "block 512"),
            (GroupRead(0, 0, 16, [-1], [1]), "block -1"),
            (GroupRead(0, 0, 16, [0], [1]), "block 0"),
            (GroupRead(0, 0, 16, [3], [0]), "block 0"),
            (GroupRead(0, 0, 16, [3], [512]), "block 512"),
            (GroupRead(0, 0, 32, [3, 4], [5, 5]), "twice"),
            (GroupRead(0, 0, 160, [3], [5]), "do not hold tokens 0 to 160"),
            (GroupRead(0, 0, 16, [3], [5, 6]), "2 blocks of 16 tokens"),
            (GroupRead(0, -16, 16, [3], [5]), "tokens -16 to 16"),
            (GroupRead(0, 16, 16, [], []), "tokens 16 to 16"),
            (GroupRead(7, 0, 16, [3], [5]), "no group 7"),
        ],
    )
    def test_fail(self, world: World, part: GroupRead, why: str) -> None:
        producer = world.producer()
        rank = world.consumer()
        rank.step(peers=[producer.peer], reads=[order(1, producer.peer, [part])])
        end, outcome = outcome_of(rank, 1)
        assert end.error
        assert why in end.error
        assert outcome.finished_loads == {"r1"}
        assert outcome.failed_loads == {"r1": part.local_ids}
        assert not rank.memory["0.0"].any()
        rank.worker.close()

    def test_no_generation(self, world: World) -> None:
        from msgspec import structs

        producer = world.producer()
        rank = world.consumer()
        wanted = structs.replace(order(1, producer.peer, [PART]), generations=[(3, 0)])
        rank.step(peers=[producer.peer], reads=[wanted])
        assert "no generation was named for block 5" in end_of(rank, 1).error
        rank.worker.close()

    @pytest.mark.parametrize("descriptor", [b"", b"\x93\x01\x02\x03"])
    def test_a_peer_that_is_none(self, world: World, descriptor: bytes) -> None:
        rank = world.consumer()
        peer = Peer("stranger", descriptor)
        rank.step(peers=[peer], reads=[order(1, peer, [PART])])
        assert "EngineDescriptor" in end_of(rank, 1).error
        rank.worker.close()

    def test_a_peer_with_other_kv(self, world: World) -> None:
        producer = world.producer(groups=(GroupSpec(head_size=16),))
        rank = world.consumer()
        rank.step(peers=[producer.peer])
        for number in (1, 2):
            rank.step(reads=[order(number, producer.peer, [PART])])
            assert end_of(rank, number).error
        rank.worker.close()


class TestEndOfLife:
    def test_close_is_bounded_and_says_what_it_leaves(
        self, world: World, caplog: pytest.LogCaptureFixture
    ) -> None:
        producer = world.producer()
        rank = world.consumer()
        reads = rank.worker._reads
        assert isinstance(reads, ReadThreads)
        reads._close_seconds = 0.05
        world.hung = {"producer"}
        rank.step(peers=[producer.peer], reads=[order(1, producer.peer, [PART])])
        wait_until(lambda: world.begun)
        with caplog.at_level(logging.ERROR, "vllm.kvplugin.nixl"):
            rank.worker.close()
        assert f"reads from {producer.peer.peer_id} do not end" in caplog.text
        rank.step(reads=[order(2, producer.peer, [PART])])
        assert "closed" in end_of(rank, 2).error
        world.hung.clear()
        assert "stopped" in end_of(rank, 1).error
        rank.worker.close()

    def test_close_before_anything(self) -> None:
        rank = Rank(SPEC)
        rank.worker.close()
        rank.worker.close()

    def test_a_system_without_threads(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        producer = world.producer()
        rank = world.consumer()

        def no_more(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_more)
            rank.step(peers=[producer.peer], reads=[order(1, producer.peer, [PART])])
            assert "can't start new thread" in end_of(rank, 1).error
        rank.step(reads=[order(2, producer.peer, [PART])])
        assert end_of(rank, 2).error == ""
        rank.worker.close()
