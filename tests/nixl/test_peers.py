"""What is known of other engines: asked once, remembered, asked again when it helps."""

import logging
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from kvplugin.connectors.metrics import Counters
from kvplugin.connectors.nixl import descriptions
from kvplugin.connectors.nixl import peers as peers_module
from kvplugin.connectors.nixl.channel import Reply
from kvplugin.connectors.nixl.config import NixlConfig
from kvplugin.connectors.nixl.describe import (
    decode_rank,
    describe_engine,
    encode_engine,
)
from kvplugin.connectors.nixl.descriptor import EngineDescriptor
from kvplugin.connectors.nixl.metrics import METRICS
from kvplugin.connectors.nixl.peers import Outlook, Peer, Peers
from kvplugin.connectors.nixl.questions import Questions
from kvplugin.connectors.nixl.wire import Answer, Describe, Description, Question
from tests.nixl.lab import DEAD_TTL, TIMEOUT, Clock, FakeChannel, Network, introduction
from tests.nixl.lab import spec as spec_of
from tests.nixl.ranks import GroupSpec, RankSpec

CONFIG = NixlConfig(handshake_timeout_s=TIMEOUT, dead_peer_ttl_s=DEAD_TTL)


def descriptor(spec: RankSpec, incarnation: int = 1) -> EngineDescriptor:
    rank = decode_rank(introduction(spec, incarnation))
    return describe_engine(spec.info(), CONFIG, [rank])


class Lab:
    """`Peers` of one engine, and others that answer what a test says."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.network = Network(self.clock)
        self.network.script = self._answer
        self.channel = FakeChannel(self.network)
        self.questions = Questions(self.channel)
        self.counters = Counters(METRICS)
        self.peers = Peers(
            descriptor(spec_of("D", 16), 99),
            CONFIG,
            self.questions,
            self.counters,
            self.clock,
        )
        self.answers: dict[str, Answer | Reply | None] = {}

    def _answer(self, address: str, question: Question) -> Answer | Reply | None:
        assert isinstance(question, Describe)
        return self.answers.get(address)

    def is_at(self, address: str, spec: RankSpec, incarnation: int = 1) -> None:
        found = descriptor(spec, incarnation)
        self.answers[address] = Description(descriptor=encode_engine(found))

    def look(self, address: str, engine_id: str = "P", **more: Any) -> Outlook:
        """What a request that comes now may expect, once answers are there."""
        came = more.pop("came", self.clock.now)
        self.peers.look(address, engine_id, came, **more)
        self.peers._descriptions.next_step()  # others have their steps
        self.questions.hear()
        return self.peers.look(address, engine_id, came, **more)

    def ready(self, address: str, engine_id: str = "P", **more: Any) -> Peer:
        outlook = self.look(address, engine_id, **more)
        assert outlook.peer is not None, outlook.reason
        return outlook.peer

    @property
    def asked(self) -> list[str]:
        return [asked.address for asked in self.channel.history]


def test_a_peer_describes_itself_once() -> None:
    lab = Lab()
    lab.is_at("p:1", spec_of("P", 16))
    peer = lab.ready("p:1")
    assert peer.block_sizes == [16]
    assert lab.ready("p:1") is peer
    assert lab.asked == ["p:1"]
    assert lab.peers.states == {"p:1": "ready"}
    news = lab.peers.take_news()
    assert [(new.peer_id, new.descriptor) for new in news.new] == [
        (peer.peer_id, peer.encoded)
    ]
    assert lab.peers.take_news() == ([], [])


def test_many_requests_wait_for_one_answer() -> None:
    lab = Lab()
    lab.network.holds = True
    lab.is_at("p:1", spec_of("P", 16))
    for _ in range(5):
        assert lab.look("p:1") == Outlook()
    (asked,) = lab.channel.asked
    lab.channel.deliver(asked)
    assert lab.look("p:1").peer is not None


def test_a_refusal_is_remembered_and_looked_at_again_without_waiting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lab = Lab()
    lab.is_at("p:1", spec_of("P", 16, 16, window=8))
    with caplog.at_level(logging.WARNING, "vllm.kvplugin.nixl"):
        first = lab.look("p:1")
        assert first.reason
        assert first.answers, "its leases can be given back"
        assert all(lab.look("p:1") == first for _ in range(5))
        assert lab.asked == ["p:1"]
        assert lab.peers.states["p:1"].startswith("refused: ")
        lab.clock.now += DEAD_TTL
        assert lab.look("p:1") == first
        assert lab.asked == ["p:1"] * 2
    assert len(caplog.messages) == 1, "said once"
    assert lab.peers.take_news() == ([], [])
    lab.is_at("p:1", spec_of("P", 16), 2)
    lab.clock.now += DEAD_TTL
    assert lab.peers.look("p:1", "P", lab.clock.now).reason, "nobody waits"
    lab.questions.hear()
    assert lab.look("p:1").peer is not None


def test_a_request_that_names_another_engine_has_a_refused_one_asked_again() -> None:
    lab = Lab()
    lab.is_at("p:1", spec_of("P", 16, 16, window=8))
    assert lab.look("p:1").reason
    lab.clock.now += 2
    lab.is_at("p:1", spec_of("Q", 16))
    assert lab.ready("p:1", "Q").descriptor.engine_id == "Q"


@pytest.mark.parametrize(
    ("reply", "answers"),
    [
        (Reply(0, None, "it speaks another protocol", final=True), False),
        (Description(descriptor=b"\xc1"), True),
        (Description(descriptor=b"\x80"), True),
    ],
)
def test_what_makes_no_sense_is_refused(reply: Answer | Reply, answers: bool) -> None:
    lab = Lab()
    lab.answers["p:1"] = reply
    outlook = lab.look("p:1")
    assert outlook.reason
    assert outlook.answers is answers
    assert lab.look("p:1") == outlook
    assert lab.asked == ["p:1"]


class Looked:
    """Counts descriptions that are decoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        decode = descriptions.decode_engine

        def counting(data: bytes) -> EngineDescriptor:
            self.count += 1
            return decode(data)

        monkeypatch.setattr(descriptions, "decode_engine", counting)


def test_one_description_a_step_is_looked_into(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = Looked(monkeypatch)
    lab = Lab()
    for i in range(3):
        lab.is_at(f"p:{i}", spec_of(f"P{i}", 16), i + 1)
        lab.peers.look(f"p:{i}", f"P{i}", lab.clock.now)
    lab.questions.hear()
    for step in (1, 2, 3):
        found = [lab.peers.look(f"p:{i}", f"P{i}", lab.clock.now) for i in range(3)]
        assert [outlook.peer is not None for outlook in found] == [
            i < step for i in range(3)
        ]
        assert not any(outlook.reason for outlook in found)
        assert looked.count == step
        assert not lab.peers.take_in()
        lab.clock.now += 10 * TIMEOUT  # it has answered: nobody calls it dead
        assert len(lab.peers.take_news().new) == 1
        assert lab.peers.take_in() is (step < 3)
    assert lab.asked == ["p:0", "p:1", "p:2"]


def test_more_descriptions_than_may_wait_are_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(descriptions, "_MOST_WAITING", 2)
    lab = Lab()
    late = {f"p:{i}": f"P{i}" for i in range(6)}
    for i, (address, name) in enumerate(late.items()):
        lab.is_at(address, spec_of(name, 16), i + 1)
    for _ in range(6):
        for address, name in list(late.items()):
            if lab.peers.look(address, name, lab.clock.now).peer is not None:
                del late[address]
        lab.questions.hear()
        lab.peers.take_news()
        lab.peers.take_in()
        assert len(lab.peers._descriptions._waiting) <= 2
    late = {a: n for a, n in late.items() if not lab.peers.look(a, n, 0).peer}
    assert not late


def test_a_peer_that_dies_while_its_description_waits_stays_dead() -> None:
    lab = Lab()
    lab.is_at("p:1", spec_of("P", 16), 1)
    old = lab.ready("p:1")
    lab.is_at("p:1", spec_of("P", 16), 2)
    lab.clock.now += 2
    assert lab.peers.look("p:1", "P", 0, doubted=lab.clock.now) == Outlook()
    lab.questions.hear()
    lab.peers.died(old, "silence")
    lab.peers.take_news()
    assert lab.peers.take_in()
    assert "silence" in lab.look("p:1").reason
    lab.clock.now += DEAD_TTL
    assert lab.ready("p:1").peer_id != old.peer_id


def test_a_refused_description_is_looked_into_once_wherever_it_comes_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients make addresses up."""
    looked = Looked(monkeypatch)
    lab = Lab()
    for i in range(20):
        lab.is_at(f"misfit:{i}", spec_of("P", 16, 16, window=8))
        lab.answers[f"garbage:{i}"] = Description(descriptor=b"\x80")
        assert "group" in lab.look(f"misfit:{i}").reason
        assert lab.look(f"garbage:{i}").reason
    assert looked.count == 2
    monkeypatch.setattr(descriptions, "_MOST_REFUSED", 2)
    for i in range(5):
        lab.answers[f"other:{i}"] = Description(descriptor=b"\x80" * i)
        assert lab.look(f"other:{i}").reason
    assert len(lab.peers._descriptions._refused) <= 3


def test_other_names_of_a_peer_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = Looked(monkeypatch)
    lab = Lab()
    for i in range(20):
        lab.is_at(f"alias-{i}:1", spec_of("P", 16))
        assert lab.ready(f"alias-{i}:1").address == f"alias-{i}:1"
    assert looked.count == 1


def test_a_description_that_is_too_large_is_not_looked_into(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = Looked(monkeypatch)
    lab = Lab()
    most = lab.peers._descriptions._most_bytes
    for size in (most + 1, 16 << 20):
        lab.answers["p:1"] = Description(descriptor=bytes(size))
        assert f"{size} bytes, more than the {most}" in lab.look("p:1").reason
        lab.clock.now += DEAD_TTL
    assert not looked.count
    lab.answers["p:1"] = Description(descriptor=bytes(most))
    lab.clock.now += DEAD_TTL
    lab.look("p:1")
    assert looked.count == 1


def large(name: str, ranks: int, layers: int, order: str) -> EngineDescriptor:
    """An engine of a large model, with what NIXL says of a machine with many NICs."""
    group = GroupSpec(block_size=64, layers=layers, heads=1, head_size=128, order=order)
    spec = RankSpec(name, (group,), 20_000, tp_size=ranks)
    made = [
        structs.replace(
            decode_rank(introduction(replace(spec, rank=rank), rank + 1)),
            agent_metadata=bytes(2000),
        )
        for rank in range(ranks)
    ]
    return describe_engine(spec.info(), CONFIG, made)


@pytest.mark.parametrize("ours", ["NHD", "HND"])
@pytest.mark.parametrize("theirs", ["NHD", "HND"])
def test_engines_of_other_sizes_are_not_too_large(ours: str, theirs: str) -> None:
    for mine, peer in ((1, 16), (8, 32)):
        known = descriptions.Descriptions(large("D", mine, 80, ours))
        assert not known.refusal(encode_engine(large("P", peer, 80, theirs)))


def test_who_does_not_answer_is_dead_for_a_while() -> None:
    lab = Lab()
    assert lab.look("p:1") == Outlook()
    lab.clock.now += TIMEOUT
    dead = lab.look("p:1")
    assert "p:1" in dead.reason
    lab.clock.now += DEAD_TTL - 0.1
    assert lab.look("p:1") == dead
    assert lab.asked == ["p:1"]
    lab.is_at("p:1", spec_of("P", 16))
    lab.clock.now += 0.1
    assert lab.look("p:1").peer is not None


def test_a_question_that_is_lost_in_the_channel_is_not_waited_for() -> None:
    lab = Lab()
    lab.channel.take = lambda wait: []  # type: ignore[method-assign]
    assert lab.look("p:1") == Outlook()
    lab.clock.now += 2 * TIMEOUT
    assert lab.look("p:1").reason


def test_an_answer_that_comes_after_all_is_ignored() -> None:
    lab = Lab()
    lab.network.holds = True
    lab.look("p:1")
    (asked,) = lab.channel.asked
    lab.clock.now += 2 * TIMEOUT
    assert lab.peers.look("p:1", "P", lab.clock.now).reason
    lab.is_at("p:1", spec_of("P", 16))
    lab.channel.deliver(asked)
    lab.questions.hear()
    assert lab.peers.states["p:1"].startswith("dead")


def test_a_restarted_peer_takes_the_old_one_s_place_when_its_reads_have_ended() -> None:
    lab = Lab()
    lab.is_at("p:1", spec_of("P", 16), 1)
    lab.is_at("p:2", spec_of("Q", 16), 5)
    old, other = lab.ready("p:1"), lab.ready("p:2", "Q")
    lab.peers.take_news()
    lab.peers.begins(old)
    lab.is_at("p:1", spec_of("R", 16), 2)
    lab.clock.now += 2
    new = lab.ready("p:1", "R")
    news = lab.peers.take_news()
    assert [peer.peer_id for peer in news.new] == [new.peer_id]
    assert not news.gone, "it is read"
    assert not lab.peers.knows(old)
    lab.peers.ended(old)
    assert lab.peers.take_news().gone == [old.peer_id]
    assert lab.ready("p:2", "Q") is other
    assert lab.asked.count("p:2") == 1


def test_the_same_name_after_a_restart_is_found_out_by_doubt() -> None:
    lab = Lab()
    lab.is_at("p:1", spec_of("P", 16), 1)
    old = lab.ready("p:1")
    lab.is_at("p:1", spec_of("P", 16), 2)
    lab.clock.now += 2
    assert lab.ready("p:1") is old, "nobody doubts"
    new = lab.ready("p:1", doubted=lab.clock.now)
    assert new.peer_id != old.peer_id
    assert lab.asked == ["p:1"] * 2


def test_names_that_clients_make_up_do_not_have_a_peer_asked_for_ever() -> None:
    lab = Lab()
    lab.is_at("p:1", spec_of("P", 16))
    peer = lab.ready("p:1")
    lab.clock.now += 10
    for i in range(50):
        assert "is engine P" in lab.look("p:1", f"made up {i}").reason
        assert lab.ready("p:1") is peer
    assert len(lab.asked) == 2
    assert lab.peers.states == {"p:1": "ready"}


def test_one_process_at_two_addresses_is_one_peer() -> None:
    lab = Lab()
    for address in ("p:1", "alias:1"):
        lab.is_at(address, spec_of("P", 16))
        lab.ready(address)
    assert len(lab.peers.take_news().new) == 1
    lab.peers.died(lab.ready("p:1"), "silence")
    assert lab.peers.take_news().gone == []
    lab.peers.died(lab.ready("alias:1"), "silence")
    assert len(lab.peers.take_news().gone) == 1


def test_nobody_passes_for_another_process() -> None:
    """Its memory would be read with the other's addresses."""
    lab = Lab()
    lab.is_at("p:1", spec_of("P", 16))
    lab.is_at("liar:1", replace(spec_of("P", 16), num_blocks=65))
    honest = lab.ready("p:1")
    assert "this very process" in lab.look("liar:1").reason
    assert lab.ready("p:1") is honest


def test_a_peer_that_died_before_anybody_heard_of_it_is_not_announced() -> None:
    lab = Lab()
    lab.is_at("p:1", spec_of("P", 16))
    lab.peers.died(lab.ready("p:1"), "silence")
    assert lab.peers.take_news() == ([], [])
    lab.clock.now += DEAD_TTL
    peer = lab.ready("p:1")
    assert [new.peer_id for new in lab.peers.take_news().new] == [peer.peer_id]


def test_reads_that_fail_in_a_row_make_a_peer_dead() -> None:
    lab = Lab()
    lab.is_at("p:1", spec_of("P", 16))
    peer = lab.ready("p:1")
    for error in ("a cable", "", "a cable"):
        lab.peers.begins(peer)
        lab.peers.ended(peer, error)
        assert lab.ready("p:1") is peer
    lab.peers.begins(peer)
    lab.peers.ended(peer, "a cable")
    assert "a cable" in lab.look("p:1").reason
    stats = lab.counters.take()
    assert stats is not None
    assert stats.gauges["dead_peers"] == 1


def test_addresses_are_forgotten_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers_module, "MOST_PEERS", 4)
    lab = Lab()
    lab.is_at("p:1", spec_of("P", 16))
    lab.is_at("p:2", spec_of("Q", 16), 2)
    read, idle = lab.ready("p:1"), lab.ready("p:2", "Q")
    lab.peers.begins(read)
    for i in range(20):
        lab.answers[f"made up {i}"] = Reply(0, None, "no such host")
        assert lab.look(f"made up {i}").reason
        assert len(lab.peers._entries) <= 4
    assert lab.peers.knows(read)
    assert lab.peers.knows(idle), "dead ones go first"
    lab.network.holds = True
    for i in range(20):
        lab.look(f"silent {i}")
    assert len(lab.peers._entries) == 4
    assert lab.peers.knows(read)
    assert not lab.peers.knows(idle)
    assert "in use" in lab.look("one more").reason


def test_a_limit_of_ours_does_not_make_a_peer_dead() -> None:
    lab = Lab()
    lab.answers["p:1"] = Reply(0, None, "no room", local=True)
    for _ in range(3):
        assert lab.look("p:1") == Outlook()
    assert lab.asked == ["p:1"], "not without a pause"
    lab.clock.now += 0.2
    lab.is_at("p:1", spec_of("P", 16))
    peer = lab.ready("p:1")
    lab.clock.now += 2.0
    lab.answers["p:1"] = Reply(0, None, "no room", local=True)
    assert lab.look("p:1", doubted=lab.clock.now) == Outlook()
    assert lab.ready("p:1", came=lab.clock.now) is peer
    assert lab.peers.states == {"p:1": "ready"}


def test_addresses_that_clients_make_up_do_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lab = Lab()
    lab.is_at("p:1", spec_of("P", 16))
    lab.ready("p:1")
    with caplog.at_level(logging.WARNING, "vllm.kvplugin.nixl"):
        for kind in (False, True):
            for i in range(40):
                lab.answers[f"h{i}:{kind:d}"] = Reply(0, None, "nobody", final=kind)
                assert lab.look(f"h{i}:{kind:d}").reason
        assert len(caplog.messages) == 2, "one of each kind"
        lab.clock.now += 61
        lab.answers["last:1"] = Reply(0, None, "nobody")
        lab.look("last:1")
        assert "(40 since the last such line)" in caplog.messages[2]
        lab.answers["p:1"] = Reply(0, None, "it is gone")
        lab.look("p:1", doubted=lab.clock.now)
    assert "engine at p:1" in caplog.messages[3], "one that was there is named"
