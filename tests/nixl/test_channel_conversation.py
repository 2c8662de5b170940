"""What a client sends to one peer and when; no sockets, and a clock that is told."""

import itertools

import pytest

from kvplugin.connectors.nixl import conversation as module
from kvplugin.connectors.nixl import frames, wire
from kvplugin.connectors.nixl.auth import Guard, Signer, StaleError
from kvplugin.connectors.nixl.channel import Reply
from kvplugin.connectors.nixl.conversation import Conversation
from kvplugin.errors import IntegrityError
from tests.nixl.channel_lab import SECRET, open_lease


class Peer:
    """A conversation, and the server at its other end."""

    def __init__(self) -> None:
        self.now = 100.0
        self.replies: list[Reply] = []
        self.talk = Conversation("peer:1", Signer(SECRET), self.replies.append)
        self.guard = Guard(SECRET)
        self.tickets = itertools.count(1)
        self.seen: list[wire.Question] = []

    def ask(self, question: wire.Question, timeout: float = 5.0) -> int:
        ticket = next(self.tickets)
        self.talk.ask(ticket, question, timeout, self.now)
        return ticket

    def sent(self) -> list[bytes]:
        self.talk.tick(self.now)
        return list(self.talk.messages(self.now))

    def serve(self, messages: list[bytes]) -> None:
        """Answer as a server does."""
        for message in messages:
            self.talk.received([b"", self.answer(message)])

    def answer(self, message: bytes) -> bytes:
        match frames.from_client([b"", message]):
            case frames.Asked(header, tag, body):
                try:
                    self.guard.admit(header, tag, body)
                except StaleError:
                    return frames.welcome(self.guard.nonce, signed=True)
                question = wire.decode_question(body)
                self.seen.append(question)
                answer = wire.encode(_answer_to(question))
                tag = self.guard.signer.answer_tag(tag, answer)
                return frames.answered(header.sequence, tag, answer)
        return frames.welcome(self.guard.nonce, signed=True)

    def run(self) -> None:
        """Until nothing is to be sent."""
        while messages := self.sent():
            self.serve(messages)


def _answer_to(question: wire.Question) -> wire.Answer:
    match question:
        case wire.Describe():
            return wire.Description(descriptor=b"d")
        case wire.Open():
            return wire.Gone(reason=question.lease)
        case wire.Renew():
            return wire.Renewed(gone=[])
        case wire.Close():
            return wire.Closed()
    raise AssertionError(question)


@pytest.fixture
def peer() -> Peer:
    return Peer()


@pytest.fixture
def known() -> Peer:
    """One whose nonce is known."""
    peer = Peer()
    peer.ask(wire.Describe())
    peer.run()
    peer.replies.clear()
    peer.seen.clear()
    return peer


def test_first_a_hello_then_every_question_at_once(peer: Peer) -> None:
    tickets = [peer.ask(open_lease(str(i))) for i in range(3)]
    [hello] = peer.sent()
    assert frames.from_client([b"", hello]) == frames.Hello(1)
    assert not peer.sent()  # one hello is enough
    peer.serve([hello])
    questions = peer.sent()
    assert len(questions) == 3
    peer.serve(questions)
    assert [reply.ticket for reply in peer.replies] == tickets


def test_a_hello_that_is_not_answered_is_repeated(peer: Peer) -> None:
    peer.ask(wire.Describe())
    assert len(peer.sent()) == 1
    assert peer.talk.next_time(peer.now) == peer.now + module.RESEND_S
    peer.now += module.RESEND_S
    assert len(peer.sent()) == 1


def test_nothing_is_due_while_a_question_waits_for_a_connection(peer: Peer) -> None:
    """Else whoever sleeps until something is due would not sleep."""
    peer.ask(wire.Describe(), timeout=5.0)
    peer.talk.tick(peer.now)
    assert peer.talk.has_something_to_send(peer.now)
    assert peer.talk.next_time(peer.now) == peer.now + 5.0


def test_answers_in_any_order_go_to_their_questions(known: Peer) -> None:
    tickets = [known.ask(open_lease(str(i))) for i in range(5)]
    answers = [known.answer(message) for message in known.sent()]
    for answer in reversed(answers):
        known.talk.received([b"", answer])
    assert [reply.ticket for reply in known.replies] == list(reversed(tickets))
    assert [reply.answer for reply in known.replies] == [
        wire.Gone(reason=str(i)) for i in reversed(range(5))
    ]


def test_a_deadline_is_kept_whatever_happens(peer: Peer) -> None:
    ticket = peer.ask(wire.Describe(), timeout=2.5)
    while peer.now < 102.5:
        assert not peer.replies
        peer.sent()
        peer.now += 0.25
    peer.sent()
    [reply] = peer.replies
    assert reply.ticket == ticket
    assert "peer:1 has not answered within 2.5 s" in reply.error
    assert not reply.final
    assert peer.talk.is_idle
    assert peer.talk.is_silent


def test_a_question_that_got_lost_is_asked_again_and_answered_once(known: Peer) -> None:
    known.ask(wire.Describe())
    lost = known.sent()
    assert len(lost) == 1
    assert not known.sent()
    known.now += module.RESEND_S
    again = known.sent()
    assert len(again) == 1
    assert again != lost  # signed anew: it is no replay
    known.serve(again)
    assert len(known.replies) == 1


def test_a_question_answered_twice_has_one_reply(known: Peer) -> None:
    known.ask(wire.Describe())
    first = known.sent()
    known.now += module.RESEND_S
    known.serve(first + known.sent())
    assert len(known.replies) == 1


def test_no_question_is_asked_for_ever(known: Peer) -> None:
    known.ask(wire.Describe(), timeout=1e6)
    count = 0
    for _ in range(1000):
        count += len(known.sent())
        known.now += module.RESEND_S
    assert count == module.MAX_TRIES
    assert not known.replies


def test_a_server_that_has_restarted_is_asked_again(known: Peer) -> None:
    tickets = [known.ask(open_lease(str(i))) for i in range(3)]
    known.guard = Guard(SECRET)
    known.serve(known.sent())  # says for each that it does not know the nonce
    assert not known.replies
    known.serve(known.sent())
    assert [reply.ticket for reply in known.replies] == tickets
    assert known.seen == [open_lease(str(i)) for i in range(3)]


def test_a_lost_connection_begins_anew(known: Peer) -> None:
    ticket = known.ask(wire.Describe())
    assert len(known.sent()) == 1
    known.talk.interrupted()
    known.guard = Guard(SECRET)
    known.run()
    [reply] = known.replies
    assert reply.ticket == ticket
    assert reply.answer is not None


def test_connections_that_are_lost_all_the_time_end(known: Peer) -> None:
    known.ask(wire.Describe(), timeout=1e6)
    for _ in range(100):
        hello = known.sent()
        known.serve(hello if len(hello) == 1 and b"? kv" in hello[0] else [])
        known.sent()
        known.talk.interrupted()
    [reply] = known.replies
    assert "does not answer" in reply.error


# -- leases ----------------------------------------------------------------------------


def test_renewals_name_every_lease_that_is_due(known: Peer) -> None:
    for i in range(600):
        known.talk.keep(f"lease-{i}", "r", 10.0, known.now)
    assert known.now < known.talk.next_time(known.now) <= known.now + 10.0
    known.now += 9.9
    assert not known.sent()
    known.now += 0.1
    known.run()
    renewals = [question for question in known.seen if isinstance(question, wire.Renew)]
    assert [len(renewal.leases) for renewal in renewals] == [256, 256, 88]
    assert sorted(pair for renewal in renewals for pair in renewal.leases) == sorted(
        (f"lease-{i}", "r") for i in range(600)
    )
    assert not known.replies


def test_a_renewal_that_got_lost_is_not_repeated_but_made_anew(known: Peer) -> None:
    known.talk.keep("a", "r", 10.0, known.now)
    known.now += 10.0
    assert len(known.sent()) == 1  # lost
    known.talk.drop("a", "r", known.now)
    for _ in range(30):
        known.now += 1.0
        known.serve(known.sent())
    assert known.seen == [wire.Close(lease="a", reader="r")]


def test_an_open_under_way_is_not_asked_again_after_its_lease_was_dropped(
    known: Peer,
) -> None:
    """It would open what is closed, for its whole duration."""
    ticket = known.ask(open_lease(), timeout=50.0)
    assert len(known.sent()) == 1  # lost
    known.talk.drop("lease", "reader", known.now)
    [reply] = known.replies
    assert reply.ticket == ticket
    assert reply.answer is None
    for _ in range(60):
        known.serve(known.sent())
        known.now += 1.0
    assert known.seen == [wire.Close(lease="lease", reader="reader")]


def test_an_open_that_waits_is_dropped_with_its_lease(known: Peer) -> None:
    known.ask(open_lease("other"))
    known.ask(open_lease())
    known.talk.drop("lease", "reader", known.now)
    known.run()
    assert known.seen == [
        open_lease("other"),
        wire.Close(lease="lease", reader="reader"),
    ]


def test_closing_is_tried_for_a_while(known: Peer) -> None:
    known.talk.drop("a", "r", known.now)
    assert not known.talk.is_idle
    for _ in range(100):
        known.sent()
        known.now += 1.0
    assert known.talk.is_idle
    assert not known.replies


def test_a_stranger_is_told_of_no_lease(peer: Peer) -> None:
    ticket = peer.ask(open_lease())
    peer.talk.drop("lease", "reader", peer.now)
    assert [reply.ticket for reply in peer.replies] == [ticket]
    assert peer.talk.is_idle
    peer.run()
    assert not peer.seen


def test_who_was_a_stranger_is_told_when_he_has_answered(peer: Peer) -> None:
    peer.ask(wire.Describe())
    peer.talk.drop("lease", "reader", peer.now)
    assert len(peer.sent()) == 1, "a hello"
    peer.talk.fail("lost")
    assert not peer.sent()
    peer.ask(wire.Describe())
    peer.run()
    closes = [question for question in peer.seen if isinstance(question, wire.Close)]
    assert closes == [wire.Close(lease="lease", reader="reader")]


# -- bounds ----------------------------------------------------------------------------


def test_only_so_many_questions_at_a_time(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ASKED", 3)
    for _ in range(4):
        peer.ask(wire.Describe())
    [reply] = peer.replies
    assert reply.ticket == 4
    assert "3 questions to peer:1 are under way" in reply.error
    assert reply.local
    peer.talk.drop("a", "r", peer.now)  # ends by itself
    peer.run()
    assert len(peer.replies) == 4
    peer.ask(wire.Describe())
    peer.run()
    assert peer.replies[-1].answer is not None


def test_nothing_is_remembered_of_what_is_over(known: Peer) -> None:
    for _ in range(50):
        known.ask(open_lease())
        known.talk.keep("k", "r", 0.5, known.now)
        known.run()
        known.ask(open_lease(), timeout=0.5)
        known.sent()
        known.now += 1.0
        known.run()
        known.talk.drop("k", "r", known.now)
        known.run()
    assert known.talk.is_idle
    for kept in vars(known.talk).values():
        if hasattr(kept, "__len__") and not isinstance(kept, bytes | str):
            assert not kept


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b""],
        [b"", b""],
        [b"x", b""],
        [b"", b"x", b"", b""],
        [b"", frames.hello()],
        [b"", frames.welcome(b"n" * 16, signed=True)[:20]],
        [b"", frames.answered(1, bytes(32), b"")[:40]],
        [b"", b"KVPluginNixlConnector/2 A" + bytes(40)],
        [b"", b"KVPluginNixlConnector/99999999999999 W" + bytes(40)],
        [b"", b"KVPluginNixlConnector/-1 W" + bytes(40)],
        [b"", b"KVPluginNixlConnector/1"],
    ],
)
def test_garbage_changes_nothing(known: Peer, parts: list[bytes]) -> None:
    known.ask(wire.Describe())
    questions = known.sent()
    with pytest.raises(IntegrityError):
        known.talk.received(parts)
    known.serve(questions)
    assert known.replies[0].answer == wire.Description(descriptor=b"d")
