"""Producers that are killed, stopped and restarted, and leases that end, in the middle
of real reads."""

import os
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from kvplugin.connectors.nixl import agent
from kvplugin.connectors.nixl.messages import GroupRead
from tests.nixl.peer_process import PeerProcess
from tests.nixl.ranks import GroupSpec, RankSpec, order
from tests.nixl.reading import (
    WAYS,
    Gate,
    assert_pages_equal,
    consumer,
    end_of,
    gated,
    outcome_of,
    read_threads,
    wait_until,
)

pytest.importorskip("nixl")

SPEC = RankSpec("producer", (GroupSpec(layers=2, heads=8, head_size=64),), 512)
PART = GroupRead(0, 0, 480, list(range(10, 40)), list(range(100, 160, 2)))

FEW = GroupRead(0, 0, 64, [10, 11, 30, 31], [100, 101, 110, 111])
"""Over TCP on one machine both processes have to run for every few KiB."""


@pytest.fixture(scope="module")
def producer() -> Iterator[PeerProcess]:
    with closing(PeerProcess(SPEC)) as peer:
        yield peer


@pytest.fixture(autouse=True)
def nothing_leaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads, posted transfers and registrations are counted."""
    posted: list[agent.Posted] = []
    areas: list[object] = []
    post, register = agent.NixlAgent.post, agent.NixlAgent.register
    deregister = agent.NixlAgent.deregister

    def counting(*args: object) -> agent.Posted:
        posted.append(post(*args))  # type: ignore[arg-type]
        return posted[-1]

    def adding(self: agent.NixlAgent, what: object) -> list[object]:
        handles = register(self, what)  # type: ignore[arg-type]
        areas.extend(handles)
        return handles

    def removing(self: agent.NixlAgent, what: list[object]) -> None:
        deregister(self, what)
        for handle in what:
            areas.remove(handle)

    monkeypatch.setattr(agent.NixlAgent, "post", counting)
    monkeypatch.setattr(agent.NixlAgent, "register", adding)
    monkeypatch.setattr(agent.NixlAgent, "deregister", removing)
    yield
    assert not read_threads()
    assert not any(one.is_active for one in posted)
    assert not areas


@pytest.mark.parametrize("same_host", WAYS)
class TestLeases:
    def test_over_before_the_read(self, producer: PeerProcess, same_host: str) -> None:
        rank = consumer(SPEC, same_host)
        part = GroupRead(0, 0, 16, [300], [5])
        was = len(WAYS) if same_host == "auto" else 2 * len(WAYS)
        producer.step(generations=[(300, was)])
        rank.step(
            peers=[producer.peer],
            reads=[order(1, producer.peer, [part], {300: was - 1})],
        )
        end, outcome = outcome_of(rank, 1)
        assert end.discarded
        assert f"block 300 is in generation {was}, not {was - 1}" in end.error
        assert outcome.failed_loads == {"r1": [5]}
        rank.step(reads=[order(2, producer.peer, [part], {300: was})])
        assert end_of(rank, 2).error == ""
        rank.worker.close()

    def test_over_while_it_is_read(self, producer: PeerProcess, same_host: str) -> None:
        """The bytes have come, and the blocks were given away before the look at the
        generations."""
        gate = Gate(lambda begun: begun == 2)
        rank = gated(SPEC, same_host, gate)
        block = 400 if same_host == "auto" else 401
        part = GroupRead(0, 0, 16, [block], [5])
        rank.step(peers=[producer.peer], reads=[order(1, producer.peer, [part])])
        wait_until(gate.is_held.is_set)
        assert_pages_equal(rank, producer.memory, part)
        producer.step(generations=[(block, 1)])
        gate.may_go.set()
        end = end_of(rank, 1)
        assert (end.discarded, "lease was over" in end.error) == (True, True)
        rank.worker.close()

    def test_of_another_block_is_no_concern(
        self, producer: PeerProcess, same_host: str
    ) -> None:
        rank = consumer(SPEC, same_host)
        producer.step(generations=[(499, 7), (501, 7)])
        part = GroupRead(0, 0, 16, [500], [5])
        rank.step(peers=[producer.peer], reads=[order(1, producer.peer, [part])])
        assert end_of(rank, 1).error == ""
        rank.worker.close()


def test_a_process_in_the_place_of_the_peer_is_not_believed(
    producer: PeerProcess,
) -> None:
    """The pid, the addresses and the bytes are right, the incarnation is not."""
    from msgspec import structs

    from kvplugin.connectors.nixl.describe import decode_engine, encode_engine

    gate = Gate(lambda begun: False)
    rank = gated(SPEC, "auto", gate)
    assert producer.peer is not None
    found = decode_engine(producer.peer.descriptor)
    wrong = structs.replace(found.ranks[0], incarnation=4)
    forged = structs.replace(
        producer.peer,
        peer_id="other",
        descriptor=encode_engine(structs.replace(found, ranks=[wrong])),
    )
    rank.step(peers=[forged], reads=[order(1, forged, [PART])])
    # The kernel's way is not taken, and NIXL's agent has another name.
    assert "came in the place of" in end_of(rank, 1).error
    rank.worker.close()


@pytest.mark.parametrize("same_host", WAYS)
class TestDeath:
    def test_after_a_read_and_before_the_next(self, same_host: str) -> None:
        peer = PeerProcess(SPEC)
        rank = consumer(SPEC, same_host)
        rank.step(peers=[peer.peer], reads=[order(1, peer.peer, [PART])])
        assert end_of(rank, 1).error == ""
        assert_pages_equal(rank, peer.memory, PART)
        peer.kill()
        for number in (2, 3):
            rank.step(reads=[order(number, peer.peer, [PART])])
            end, outcome = outcome_of(rank, number)
            assert end.error
            assert not end.discarded
            assert outcome.failed_loads == {f"r{number}": PART.local_ids}

        # It comes back: the same engine id, another incarnation.
        again = PeerProcess(SPEC)
        assert again.peer.peer_id != peer.peer.peer_id
        rank.memory["0.0"][:] = 0
        rank.step(
            peers=[again.peer],
            gone=[peer.peer.peer_id],
            reads=[order(4, again.peer, [PART])],
        )
        assert end_of(rank, 4).error == ""
        assert_pages_equal(rank, again.memory, PART)
        rank.step(reads=[order(5, peer.peer, [PART])])
        assert "is not known" in end_of(rank, 5).error
        wait_until(lambda: len(read_threads()) == 1)
        rank.worker.close()
        again.close()
        peer.close()

    @pytest.mark.parametrize("held", [1, 2], ids=["bytes", "generations"])
    def test_in_the_middle(self, same_host: str, held: int) -> None:
        peer = PeerProcess(SPEC)
        gate = Gate(lambda begun: begun == held)
        rank = gated(SPEC, same_host, gate)
        rank.step(peers=[peer.peer], reads=[order(1, peer.peer, [PART])])
        wait_until(gate.is_held.is_set)
        peer.kill()
        gate.may_go.set()
        end, outcome = outcome_of(rank, 1)
        assert end.error
        assert outcome.failed_loads == {"r1": PART.local_ids}
        rank.worker.close()
        peer.close()


@pytest.mark.parametrize("same_host", WAYS)
def test_a_stopped_producer_is_read_as_if_nothing_were(same_host: str) -> None:
    peer = PeerProcess(SPEC)
    rank = consumer(SPEC, same_host)
    rank.step(peers=[peer.peer], reads=[order(1, peer.peer, [PART])])
    assert end_of(rank, 1).error == ""
    peer.pause()
    rank.memory["0.0"][:] = 0
    rank.step(reads=[order(2, peer.peer, [PART])])
    end = end_of(rank, 2)
    peer.resume()
    assert end.error == ""
    assert_pages_equal(rank, peer.memory, PART)
    rank.worker.close()
    peer.close()


class TestOverTheNetwork:
    """TCP, where the producer's own process has to answer."""

    @pytest.fixture(autouse=True)
    def over_tcp(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UCX_TLS", "tcp")

    def test_a_stopped_producer_holds_up_its_own_reads_only(self) -> None:
        """One is given up: the engine hears so at once, the end is said when it comes,
        and nothing was written behind anybody's back."""
        peer, other = PeerProcess(SPEC), PeerProcess(SPEC)
        rank = consumer(SPEC, "off")
        rank.step(peers=[peer.peer, other.peer], reads=[order(1, peer.peer, [FEW])])
        assert end_of(rank, 1).error == ""
        peer.pause()
        theirs = GroupRead(0, 0, 64, [10, 11, 30, 31], [200, 202, 204, 206])
        rank.step(reads=[order(2, peer.peer, [FEW]), order(3, other.peer, [theirs])])
        assert end_of(rank, 3).error == ""
        assert_pages_equal(rank, other.memory, theirs)

        rank.step(given_up=[2])
        outcome = rank.worker.poll()
        assert outcome.finished_loads == {"r2"}
        assert outcome.failed_loads == {"r2": FEW.local_ids}
        for _ in range(3):
            assert not rank.worker.poll().finished_loads
        peer.resume()
        end, outcome = outcome_of(rank, 2)
        assert not outcome.finished_loads
        held = {name: np.copy(memory) for name, memory in rank.memory.items()}
        rank.step(reads=[order(4, other.peer, [theirs])])
        end = end_of(rank, 4)
        assert end.error == ""
        for name, memory in rank.memory.items():
            assert np.array_equal(memory, held[name])
        rank.worker.close()
        peer.close()
        other.close()

    def test_a_stopped_producer_that_dies_ends_its_reads(self) -> None:
        peer = PeerProcess(SPEC)
        rank = consumer(SPEC, "off")
        rank.step(peers=[peer.peer], reads=[order(1, peer.peer, [FEW])])
        assert end_of(rank, 1).error == ""
        peer.pause()
        rank.step(reads=[order(2, peer.peer, [FEW])])
        assert not rank.worker.poll().finished_loads
        peer.kill()
        assert "DISCONNECT" in end_of(rank, 2).error
        rank.worker.close()
        peer.close()


def test_file_descriptors_do_not_grow(producer: PeerProcess) -> None:
    """Ten consumers, one after the other."""

    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    counts = []
    for _ in range(4):
        rank = consumer(SPEC, "off")
        rank.step(peers=[producer.peer], reads=[order(1, producer.peer, [PART])])
        end_of(rank, 1)
        rank.worker.close()
        del rank
        counts.append(opened())
    assert counts[-1] <= counts[1]
