"""Peers without manners: what they send costs them their connection, and no more."""

import contextlib
import logging
import socket
import struct
import threading

import pytest

from kvplugin.connectors.nixl import frames, wire
from kvplugin.connectors.nixl.auth import Header, Signer, new_client
from kvplugin.connectors.nixl.server import ChannelServer
from kvplugin.connectors.nixl.zmtp import Zmtp
from tests.nixl.channel_lab import (
    SECRET,
    Answers,
    Clock,
    Impostor,
    Wiretap,
    ask,
    asking,
    eventually,
    open_lease,
    replies_to,
    serving,
)


def _signed(
    nonce: bytes, client: bytes, sequence: int, secret: bytes = SECRET
) -> bytes:
    header, body = Header(nonce, client, sequence), wire.encode(open_lease())
    return frames.asked(header, Signer(secret).question_tag(header, body), body)


def _nonce(tap: Wiretap) -> bytes:
    tap.send(b"", frames.hello())
    said = frames.from_server(tap.receive())
    assert isinstance(said, frames.Welcome)
    return said.nonce


def _refusal(tap: Wiretap) -> str:
    said = frames.from_server(tap.receive())
    assert isinstance(said, frames.Answered)
    answer = wire.decode_answer(said.body)
    assert isinstance(answer, wire.Refused)
    assert said.tag == bytes(32), "a signature for whom it has not convinced"
    return answer.reason


def test_a_recorded_question_is_worth_nothing() -> None:
    answers, client = Answers(), new_client()
    with serving(answers) as server:
        tap = Wiretap.to(server.address)
        nonce = _nonce(tap)
        recorded = _signed(nonce, client, 5)
        tap.send(b"", recorded)
        said = frames.from_server(tap.receive())
        assert isinstance(said, frames.Answered)
        assert isinstance(wire.decode_answer(said.body), wire.Granted)
        tap.send(b"", recorded)
        assert "came before" in _refusal(tap)
        tap.send(b"", _signed(nonce, client, 4))
        assert "came before" in _refusal(tap)
        elsewhere = Wiretap.to(server.address)
        elsewhere.send(b"", recorded)
        assert "came before" in _refusal(elsewhere)
        port = int(server.address.rpartition(":")[2])
        tap.close()
        elsewhere.close()
    with serving(answers, port=port) as server:  # a restart knows nothing of it
        tap = Wiretap.to(server.address)
        tap.send(b"", recorded)
        assert isinstance(frames.from_server(tap.receive()), frames.Welcome)
        tap.close()
    assert len(answers.asked) == 1


def test_a_forged_question_is_worth_nothing() -> None:
    answers = Answers()
    with serving(answers) as server:
        tap = Wiretap.to(server.address)
        nonce = _nonce(tap)
        tap.send(b"", _signed(nonce, new_client(), 1, b"a guess"))
        assert "signature" in _refusal(tap)
        good = bytearray(_signed(nonce, new_client(), 1))
        good[-3] ^= 1  # the end of its text
        for forged in (good, good[:-3]):
            tap.send(b"", bytes(forged))
        tap.close()
        with asking() as client:
            assert ask(client, server.address).answer is not None
    assert not answers.of(wire.Open)


def test_a_question_sent_back_is_no_answer() -> None:
    """What an engine signs as a question cannot be turned into an answer to it."""
    impostor = Impostor()
    with asking() as client:
        ticket = client.ask(impostor.address, wire.Describe(), 1e6)
        peer = impostor.accept()
        peer.receive()
        peer.send(b"", frames.welcome(b"n" * 16, signed=True))
        asked = frames.from_client(peer.receive())
        assert isinstance(asked, frames.Asked)
        peer.send(b"", frames.asked(*asked))  # as it was: means nothing
        body = wire.encode(wire.Description(descriptor=b"evil"))
        peer.send(b"", frames.answered(asked.header.sequence, asked.tag, body))
        reply = replies_to(client, [ticket])[ticket]
        assert reply.answer is None
        assert "does not answer with this engine's secret" in reply.error
        peer.close()
    impostor.close()


def test_an_answer_to_another_question_is_none_to_this_one() -> None:
    impostor, signer = Impostor(), Signer(SECRET)
    with asking() as client:
        tickets = [
            client.ask(impostor.address, open_lease(name), 1e6) for name in ("a", "b")
        ]
        peer = impostor.accept()
        peer.receive()
        peer.send(b"", frames.welcome(b"n" * 16, signed=True))
        first, second = (frames.from_client(peer.receive()) for _ in range(2))
        assert isinstance(first, frames.Asked)
        assert isinstance(second, frames.Asked)
        body = wire.encode(wire.Gone(reason="of the first"))
        tag = signer.answer_tag(first.tag, body)
        peer.send(b"", frames.answered(second.header.sequence, tag, body))
        peer.send(b"", frames.answered(first.header.sequence, tag, body))
        replies = replies_to(client, tickets)
        assert replies[tickets[0]].answer == wire.Gone(reason="of the first")
        assert replies[tickets[1]].answer is None
        peer.close()
    impostor.close()


def test_an_answer_of_the_wrong_kind_is_none() -> None:
    impostor, signer = Impostor(), Signer(SECRET)
    with asking() as client:
        ticket = client.ask(impostor.address, wire.Describe(), 1e6)
        peer = impostor.accept()
        peer.receive()
        peer.send(b"", frames.welcome(b"n" * 16, signed=True))
        asked = frames.from_client(peer.receive())
        assert isinstance(asked, frames.Asked)
        body = wire.encode(wire.Closed())
        tag = signer.answer_tag(asked.tag, body)
        peer.send(b"", frames.answered(asked.header.sequence, tag, body))
        assert "answered with a Closed" in replies_to(client, [ticket])[ticket].error
        peer.close()
    impostor.close()


def test_another_protocol_is_final_and_names_both_versions() -> None:
    impostor = Impostor()
    with asking() as client:
        ticket = client.ask(impostor.address, wire.Describe(), 1e6)
        peer = impostor.accept()
        peer.receive()
        ours = frames.welcome(b"n" * 16, signed=True)
        peer.send(b"", ours.replace(b"Connector/1 ", b"Connector/7 "))
        reply = replies_to(client, [ticket])[ticket]
        assert reply.final
        assert "protocol 7" in reply.error
        assert "protocol 1" in reply.error
        peer.close()
    impostor.close()


def test_a_server_with_a_new_nonce_for_every_question_is_given_up() -> None:
    impostor = Impostor()

    def lie() -> None:
        peer = impostor.accept()
        with contextlib.suppress(OSError):
            for number in range(1000):
                peer.receive()
                peer.send(b"", frames.welcome(b"%16d" % number, signed=True))
        peer.close()

    liar = threading.Thread(target=lie)
    liar.start()
    with asking() as client:
        reply = ask(client, impostor.address, timeout=1e6)
        assert "does not answer them" in reply.error
    liar.join()
    impostor.close()


def test_too_large_a_message_ends_the_connection_and_nothing_else() -> None:
    with serving() as server, asking() as client:
        tap = Wiretap.to(server.address)
        tap.socket.sendall(b"\x02" + struct.pack(">Q", 1 << 40))
        with pytest.raises(ConnectionResetError):
            tap.receive()
        assert ask(client, server.address).answer is not None


def test_a_message_of_endless_frames_ends_the_connection() -> None:
    with serving() as server, asking() as client:
        tap = Wiretap.to(server.address)
        with pytest.raises(ConnectionError):  # noqa: PT012 (it may be the first call)
            for _ in range(1000):
                tap.socket.sendall(
                    b"\x03" + struct.pack(">Q", 1 << 10) + bytes(1 << 10)
                )
            tap.receive()
        assert ask(client, server.address).answer is not None


def test_what_is_no_side_channel_is_given_up_at_once() -> None:
    """A request may name any port of any machine."""
    with socket.create_server(("127.0.0.1", 0)) as web, asking() as client:
        address = f"127.0.0.1:{web.getsockname()[1]}"
        ticket = client.ask(address, wire.Describe(), 1e6)
        accepted, _ = web.accept()
        accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        reply = replies_to(client, [ticket])[ticket]
        assert f"{address} is no side channel: not ZMTP: b'HTTP/1.1" in reply.error
        accepted.close()


def test_an_answer_that_is_too_large_ends_the_connection() -> None:
    impostor = Impostor()
    with asking() as client:
        ticket = client.ask(impostor.address, wire.Describe(), 1e6)
        peer = impostor.accept()
        peer.socket.sendall(b"\x02" + struct.pack(">Q", 1 << 40))
        with pytest.raises(ConnectionError):  # noqa: PT012
            while True:
                peer.receive()
        assert "too large" in replies_to(client, [ticket])[ticket].error
    impostor.close()


def test_a_flood_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    """Some peers send garbage as fast as they can, one reads no answers: a question
    from another is answered, and the log has one line."""
    over = threading.Event()

    def flood(address: str, parts: list[bytes]) -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                tap = Wiretap.to(address)
                while not over.is_set():
                    tap.send(*parts)

    with (
        caplog.at_level(logging.WARNING, "vllm.kvplugin.nixl"),
        serving() as server,
        asking() as client,
    ):
        kinds = [[b"", b"garbage" * 100], [b"", frames.hello()]]
        floods = [
            threading.Thread(target=flood, args=(server.address, parts), daemon=True)
            for parts in kinds
        ]
        for thread in floods:
            thread.start()
        for i in range(20):
            reply = ask(client, server.address, open_lease(str(i)), 50.0)
            assert isinstance(reply.answer, wire.Granted)
        over.set()
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 1, [line.getMessage() for line in lines]


def test_a_stranger_who_talks_and_asks_nothing_goes() -> None:
    with serving() as server, asking() as client:
        tap = Wiretap.to(server.address)
        with pytest.raises(ConnectionError):  # noqa: PT012
            for _ in range(1000):
                tap.send(b"", frames.hello())
                tap.receive()
        tickets = [
            client.ask(server.address, open_lease(str(i)), 50.0) for i in range(200)
        ]
        assert all(reply.answer for reply in replies_to(client, tickets).values())


def test_who_does_not_read_answers_is_not_listened_to_until_he_does() -> None:
    """A few megabytes wait for him, in the system's buffers and ours; none is lost."""

    class Large(Answers):
        def describe(self) -> wire.Description:
            super().describe()
            return wire.Description(descriptor=bytes(1 << 20))

    answers, client, body = Large(), new_client(), wire.encode(wire.Describe())
    with serving(answers) as server, asking() as good:
        tap = Wiretap.to(server.address)
        nonce, burst = _nonce(tap), Zmtp("DEALER", 1000)
        burst.output.clear()
        for sequence in range(1, 201):
            header = Header(nonce, client, sequence)
            tag = Signer(SECRET).question_tag(header, body)
            burst.send([b"", frames.asked(header, tag, body)])
        tap.socket.sendall(burst.output)  # they arrive together
        eventually(lambda: len(answers.of(wire.Describe)) > 1)
        for i in range(50):
            assert ask(good, server.address, open_lease(str(i)), 50.0).answer
        assert len(answers.of(wire.Describe)) < 100
        for sequence in range(1, 201):
            said = frames.from_server(tap.receive())
            assert isinstance(said, frames.Answered)
            assert said.sequence == sequence
        tap.close()


def test_strangers_go_first_where_there_are_too_many() -> None:
    with serving() as server, asking() as client:
        assert ask(client, server.address, open_lease()).answer is not None
        listener, port = server._listener, int(server.address.rpartition(":")[2])
        [trusted] = [c for c in listener._connections if c.is_trusted]
        taps = [socket.create_connection(("127.0.0.1", port), 50) for _ in range(600)]
        with contextlib.suppress(OSError):  # the first of them has to go
            while taps[0].recv(100):
                pass
        eventually(lambda: len(listener) == 512)
        assert ask(client, server.address, open_lease()).answer is not None
        assert trusted in listener._connections
        for tap in taps:
            tap.close()


def test_a_stranger_who_says_nothing_goes() -> None:
    clock = Clock()
    server = ChannelServer("127.0.0.1", 0, Answers(), secret=SECRET, clock=clock)
    try:
        with asking() as client:
            tap = Wiretap.to(server.address)
            assert ask(client, server.address).answer is not None
            clock.now += 20
            with pytest.raises(ConnectionError):
                tap.receive()
            assert ask(client, server.address).answer is not None
    finally:
        server.close()
