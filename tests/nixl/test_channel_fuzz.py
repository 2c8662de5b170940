"""Random, truncated and mutated messages, to a server and to a client: after each of
them a good question is answered, and nothing else has been asked or answered."""

import contextlib
import struct
import threading
from collections.abc import Iterator

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplugin.connectors.nixl import frames, wire
from kvplugin.connectors.nixl.auth import Header, Signer, new_client
from kvplugin.connectors.nixl.channel import Reply
from kvplugin.connectors.nixl.client import ChannelClient
from kvplugin.connectors.nixl.server import ChannelServer
from kvplugin.connectors.nixl.zmtp import Zmtp
from kvplugin.errors import IntegrityError
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
    serving,
)

FUZZ = settings(
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SIGNER = Signer(SECRET)
QUESTIONS: list[wire.Question] = [
    wire.Describe(),
    open_lease(),
    wire.Renew(leases=[("a", "b"), ("c", "d")]),
    wire.Close(lease="a", reader="b"),
    wire.Status(),
]
ANSWERS: list[wire.Answer] = [
    wire.Description(descriptor=b"d" * 20),
    Answers().open(open_lease()),
    wire.Gone(reason="gone"),
    wire.Renewed(gone=["a"]),
    wire.Closed(),
    Answers().status(),
    wire.Refused(reason="no"),
]


def _asked(question: wire.Question, signer: Signer) -> bytes:
    header = Header(b"n" * 16, b"c" * 16, 7)
    body = wire.encode(question)
    return frames.asked(header, signer.question_tag(header, body), body)


FROM_CLIENTS = [
    frames.hello(),
    *(_asked(question, SIGNER) for question in QUESTIONS),
    msgpack.packb([b"get_meta_msg", 0, 0]),
    msgpack.packb([b"get_meta_msg", 0]),
]
FROM_SERVERS = [
    frames.welcome(b"n" * 16, signed=True),
    frames.welcome(b"n" * 16, signed=False),
    *(frames.answered(1, bytes(32), wire.encode(answer)) for answer in ANSWERS),
    msgpack.packb({"compatibility_hash": "x", "agent_metadata_bytes": b"y"}),
]


def _mutated(messages: list[bytes]) -> st.SearchStrategy[bytes]:
    """Real messages with a few bytes changed, cut off, inserted or repeated."""

    @st.composite
    def mutate(draw: st.DrawFn) -> bytes:
        message = bytearray(draw(st.sampled_from(messages)))
        for _ in range(draw(st.integers(1, 4))):
            at = draw(st.integers(0, len(message)))
            match draw(st.sampled_from(["set", "cut", "put", "twice", "drop"])):
                case "set":
                    message[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
                case "cut":
                    del message[at:]
                case "put":
                    message[at:at] = draw(st.binary(max_size=9))
                case "twice":
                    message[at:at] = message[: draw(st.integers(0, len(message)))]
                case "drop":
                    del message[at : at + draw(st.integers(1, 9))]
        return bytes(message)

    return mutate()


def _parts(messages: list[bytes]) -> st.SearchStrategy[list[bytes]]:
    message = st.one_of(
        st.binary(max_size=300), _mutated(messages), st.sampled_from(messages)
    )
    return st.one_of(
        message.map(lambda one: [b"", one]),
        st.lists(message, min_size=1, max_size=4),
    )


# -- bytes alone -----------------------------------------------------------------------


@FUZZ
@given(_parts(FROM_CLIENTS), _parts(FROM_SERVERS))
def test_frames_mean_something_or_are_refused(
    asked: list[bytes], answered: list[bytes]
) -> None:
    for parse, parts in ((frames.from_client, asked), (frames.from_server, answered)):
        with contextlib.suppress(IntegrityError):
            parse(parts)


@FUZZ
@given(
    st.one_of(
        st.binary(max_size=300),
        _mutated([wire.encode(message) for message in (*QUESTIONS, *ANSWERS)]),
    )
)
def test_bodies_mean_something_or_are_refused(body: bytes) -> None:
    for decode in (wire.decode_question, wire.decode_answer):
        try:
            message = decode(body)
        except IntegrityError:
            continue
        assert decode(wire.encode(message)) == message


@FUZZ
@given(st.lists(st.binary(max_size=400), max_size=8), st.integers(0, 3))
def test_zmtp_takes_any_bytes_in_any_pieces(pieces: list[bytes], start: int) -> None:
    greeting = bytes(Zmtp("DEALER", 100).output)
    ready = b"\x04\x06\x05READY"
    begin = [b"", greeting, greeting + ready, greeting + ready + b"\x01\x00"][start]
    zmtp = Zmtp("ROUTER", 100)
    with contextlib.suppress(IntegrityError):
        for piece in [begin, *pieces]:
            zmtp.feed(piece)
            while (message := zmtp.next_message()) is not None:
                assert sum(len(part) for part in message) <= 100
                assert len(message) <= 4
            zmtp.output.clear()


@FUZZ
@given(
    st.lists(st.lists(st.binary(max_size=600), min_size=1, max_size=3), max_size=5),
    st.integers(1, 50),
)
def test_zmtp_gives_back_what_was_sent_however_it_is_cut(
    messages: list[list[bytes]], size: int
) -> None:
    one, other = Zmtp("DEALER", 2000), Zmtp("ROUTER", 2000)
    for _ in range(2):  # greeting, then READY
        for sender, receiver in ((one, other), (other, one)):
            receiver.feed(bytes(sender.output))
            sender.output.clear()
            assert receiver.next_message() is None
    assert one.is_ready
    assert other.is_ready
    for message in messages:
        one.send(message)
    received = []
    for at in range(0, len(one.output), size):
        other.feed(bytes(one.output[at : at + size]))
        while (got := other.next_message()) is not None:
            received.append(got)
    assert received == messages


# -- over sockets ----------------------------------------------------------------------


@pytest.fixture(scope="module", params=[SECRET, b""], ids=["secret", "none"])
def secret(request: pytest.FixtureRequest) -> bytes:
    return request.param


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers()


@pytest.fixture(scope="module")
def server(answers: Answers, secret: bytes) -> Iterator[ChannelServer]:
    with serving(answers, secret=secret) as server:
        yield server


@pytest.fixture(scope="module")
def good(secret: bytes) -> Iterator[ChannelClient]:
    with asking(secret=secret) as client:
        yield client


@FUZZ
@given(parts=_parts(FROM_CLIENTS))
def test_a_server_answers_after_any_message(
    server: ChannelServer, good: ChannelClient, answers: Answers, parts: list[bytes]
) -> None:
    before = len(answers.asked)
    tap = Wiretap.to(server.address)
    tap.send(*parts)
    reply = ask(good, server.address, open_lease("good"), 50.0)
    assert isinstance(reply.answer, wire.Granted)
    tap.close()
    assert all(asked == open_lease("good") for asked in answers.asked[before:])


@FUZZ
@given(data=st.binary(max_size=500), start=st.booleans())
def test_a_server_answers_after_any_bytes(
    server: ChannelServer, good: ChannelClient, data: bytes, start: bool
) -> None:
    tap = Wiretap.to(server.address)
    with contextlib.suppress(OSError):
        tap.socket.sendall(data if start else b"\x02" + struct.pack(">Q", 500) + data)
    assert isinstance(ask(good, server.address, timeout=50.0).answer, wire.Description)
    tap.close()


@FUZZ
@given(body=_mutated([wire.encode(question) for question in QUESTIONS]))
def test_a_signed_question_of_any_text_is_answered(
    server: ChannelServer, secret: bytes, answers: Answers, body: bytes
) -> None:
    """By somebody who has the secret."""
    try:
        question = wire.decode_question(body)
    except IntegrityError:
        question = None
    before = len(answers.asked)
    tap, signer = Wiretap.to(server.address), Signer(secret)
    tap.send(b"", frames.hello())
    welcome = frames.from_server(tap.receive())
    assert isinstance(welcome, frames.Welcome)
    header = Header(welcome.nonce, new_client(), 1)
    tag = signer.question_tag(header, body)
    tap.send(b"", frames.asked(header, tag, body))
    said = frames.from_server(tap.receive())
    assert isinstance(said, frames.Answered)
    assert said.tag == signer.answer_tag(tag, said.body)
    answer = wire.decode_answer(said.body)
    assert isinstance(answer, wire.Refused) == (question is None)
    assert answers.asked[before:] == ([] if question is None else [question])
    tap.close()


@FUZZ
@given(
    messages=st.lists(_parts(FROM_SERVERS), max_size=4),
    data=st.binary(max_size=100),
)
def test_a_client_asks_others_after_any_answer(
    server: ChannelServer,
    secret: bytes,
    messages: list[list[bytes]],
    data: bytes,
) -> None:
    """And what it made of the answers is none of ours."""
    impostor, clock = Impostor(), Clock()

    def answer() -> None:
        with contextlib.suppress(OSError):
            peer = impostor.accept()
            for parts in messages:
                peer.send(*parts)
            peer.socket.sendall(data)
            peer.close()

    thread = threading.Thread(target=answer)
    thread.start()
    client = ChannelClient(secret=secret, clock=clock)
    try:
        ticket = client.ask(impostor.address, wire.Describe(), 5.0)
        thread.join()
        impostor.close()
        replies: list[Reply] = []
        while not any(reply.ticket == ticket for reply in replies):
            good = ask_other(client, server.address, replies)
            assert isinstance(good, wire.Description)
            clock.now += 1.0
        [reply] = [reply for reply in replies if reply.ticket == ticket]
        assert reply.answer is None
        assert reply.error
    finally:
        client.close()
        impostor.close()


def ask_other(
    client: ChannelClient, address: str, replies: list[Reply]
) -> wire.Answer | None:
    """Ask, and collect the replies to other questions."""
    ticket = client.ask(address, wire.Describe(), 1e6)
    found: list[Reply] = []

    def there() -> bool:
        for reply in client.take():
            (found if reply.ticket == ticket else replies).append(reply)
        return bool(found)

    eventually(there)
    return found[0].answer
