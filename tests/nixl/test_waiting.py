"""Who waits, and how long: a lookup for its grant, so that no step is lost, and a step
that computes nothing for its reads."""

import numpy as np

from kvplugin.connectors.nixl.channel import Reply
from kvplugin.connectors.nixl.messages import Completion, GroupRead, Peer, Plan
from kvplugin.contract import LATER, Step
from kvplugin.wire import decode
from tests.nixl.channel_lab import Answers, asking, open_lease, serving
from tests.nixl.lab import Engine, FakeChannel, Request, pair
from tests.nixl.ranks import GroupSpec, Rank, RankSpec, order


class Patient:
    """Counts who waits; what was asked is answered to who does, after some time."""

    def __init__(self, channel: FakeChannel, seconds: float = 0.0) -> None:
        self._channel = channel
        self._take = channel.take
        self._seconds = seconds
        self.waits: list[float] = []
        self.is_silent = False
        channel.network.holds = True
        channel.take = self.take  # type: ignore[method-assign]

    def take(self, wait: float = 0.0) -> list[Reply]:
        if wait > 0:
            self.waits.append(wait)
            self._channel.network.clock.now += self._seconds
            for asked in [] if self.is_silent else list(self._channel.asked):
                self._channel.deliver(asked)
        return self._take()


def arrive(producer: Engine, consumer: Engine, name: str, first: int) -> Request:
    prompt = range(first, first + 30)
    request = Request(name, list(prompt), producer.prefill(f"p-{name}", prompt))
    consumer.half.arrived(request)
    return request


def test_the_first_step_knows_what_a_peer_answers_at_once() -> None:
    _network, producer, consumer = pair()
    patient = Patient(consumer.channel)
    request = arrive(producer, consumer, "a", 100)
    assert consumer.half.lookup(request, 0).tokens == 29
    assert patient.waits
    assert max(patient.waits) <= 0.002


def test_a_request_holds_one_step_once() -> None:
    _network, producer, consumer = pair()
    patient = Patient(consumer.channel)
    patient.is_silent = True
    request = arrive(producer, consumer, "a", 100)
    for _ in range(5):
        assert consumer.half.lookup(request, 0) == LATER
        consumer.half.plan_step(Step())
    assert len(patient.waits) == 1


def test_all_requests_together_hold_a_step_no_longer_than_one() -> None:
    _network, producer, consumer = pair()
    patient = Patient(consumer.channel, seconds=0.0015)
    patient.is_silent = True
    requests = [arrive(producer, consumer, str(i), 100 * i) for i in range(1, 6)]
    for request in requests:
        assert consumer.half.lookup(request, 0) == LATER
    assert [round(wait, 6) for wait in patient.waits] == [0.002, 0.0005]
    consumer.half.plan_step(Step())
    patient.is_silent = False
    assert consumer.half.lookup(requests[-1], 0).tokens == 29, "a new step, a new wait"


def test_nobody_waits_where_that_is_switched_off() -> None:
    _network, producer, consumer = pair(grant_wait_ms=0.0)
    patient = Patient(consumer.channel)
    request = arrive(producer, consumer, "a", 100)
    assert consumer.half.lookup(request, 0) == LATER
    assert not patient.waits


def test_who_waits_is_woken_by_the_answer() -> None:
    """The limit is a minute: without the waking this test is killed by its timeout."""
    with serving(Answers()) as server, asking() as client:
        ticket = client.ask(server.address, open_lease(), 300.0)
        replies = client.take(300.0)
        assert [reply.ticket for reply in replies] == [ticket]
        assert client.take() == []


class Waits:
    """Implements `Reads`; notes how long it was to wait."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def meet(self, peer_id: str, descriptor: bytes) -> None: ...
    def leave(self, peer_id: str) -> None: ...
    def submit(self, order: object, after: object) -> None: ...
    def stop(self, ids: object) -> None: ...
    def close(self) -> bool:
        return True

    def poll(self, wait: float) -> list[Completion]:
        self.waits.append(wait)
        return []


def test_only_a_step_that_computes_nothing_waits() -> None:
    now, reads = [10.0], Waits()
    config = {"backends": [], "read_wait_ms": 2.0}
    rank = Rank(
        RankSpec("producer", (GroupSpec(),), 512, config=config),
        make_reads=lambda memory, readers: reads,
        clock=lambda: now[0],
    )
    rank.worker.poll()
    assert reads.waits == [], "nothing is under way"
    peer = Peer("peer", b"")
    rank.step(
        peers=[peer],
        reads=[order(1, peer, [GroupRead(0, 0, 64, [3, 9, 5, 6], [7, 8, 1, 2])])],
        is_idle=False,
    )
    rank.worker.poll()
    assert reads.waits == [0.0]
    rank.step()
    for seconds in (0.0, 0.0005, 0.030):
        now[0] += seconds
        rank.worker.poll()
    assert np.allclose(reads.waits[1:], [0.002, 0.0015, 0.0]), "of one step"
    rank.worker.begin_step(b"")
    rank.worker.poll()
    assert reads.waits[-1] == 0.0
    rank.step()
    rank.worker.poll()
    assert np.allclose(reads.waits[-1], 0.002)
    rank.step(given_up=[1])
    rank.worker.poll()
    assert reads.waits[-1] == 0.0, "it may hang for ever"


def test_the_plan_says_whether_there_is_nothing_else_to_do() -> None:
    _network, producer, consumer = pair()
    prompt = range(100, 130)
    consumer.add("b", prompt, producer.prefill("a", prompt))
    consumer.run_without_reads()
    assert consumer.reads()
    assert decode(consumer.half.plan_step(Step()), Plan).is_idle
    assert consumer.half.plan_step(Step(num_tokens=7)) == b""
    consumer.run()
    assert not consumer.reads()
    assert consumer.half.plan_step(Step()) == b""
