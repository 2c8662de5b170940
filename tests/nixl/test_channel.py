"""The side channel between two engines, over real sockets."""

import logging
import socket
import threading

import pytest

from kvplugin.connectors.nixl import wire
from kvplugin.connectors.nixl.channel import Answers as AnswersProtocol
from kvplugin.connectors.nixl.channel import Channel, Server
from kvplugin.connectors.nixl.client import ChannelClient
from kvplugin.connectors.nixl.server import ChannelServer
from kvplugin.errors import ConfigError
from tests.nixl.channel_lab import (
    SECRET,
    Answers,
    Clock,
    ask,
    asking,
    eventually,
    open_lease,
    replies_to,
    serving,
)
from tests.ports import free_port


def test_the_seams_are_met() -> None:
    """For the type checker: fails there if a signature differs."""
    answers: AnswersProtocol = Answers()
    with serving() as server, asking() as client:
        assert answers.status().engine_id
        ends: tuple[Server, Channel] = (server, client)
        assert len(ends) == 2


@pytest.mark.parametrize("secret", [SECRET, b""], ids=["secret", "none"])
def test_every_question_gets_its_answer(secret: bytes) -> None:
    with serving(secret=secret) as server, asking(secret=secret) as client:
        for question, kind in [
            (wire.Describe(), wire.Description),
            (open_lease(), wire.Granted),
            (wire.Open(peer_id="x", lease="l", reader="r"), wire.Gone),
            (wire.Renew(leases=[("gone", "r"), ("l", "r")]), wire.Renewed),
            (wire.Close(lease="l", reader="r"), wire.Closed),
            (wire.Status(), wire.Health),
        ]:
            reply = ask(client, server.address, question)
            assert isinstance(reply.answer, kind), reply
            assert not reply.error


def test_many_questions_are_under_way_at_once_and_none_is_mixed_up() -> None:
    with serving() as server, asking() as client:
        tickets = {
            client.ask(server.address, open_lease(f"lease-{i}"), 30.0): i
            for i in range(1000)
        }
        for ticket, reply in replies_to(client, list(tickets)).items():
            assert isinstance(reply.answer, wire.Granted)
            expected = f"lease-{tickets[ticket]}".encode()
            assert reply.answer.token_digests == [expected]


def test_several_servers_and_several_clients() -> None:
    many = [Answers(f"engine-{i}") for i in range(3)]
    with (
        serving(many[0]) as one,
        serving(many[1]) as two,
        serving(many[2]) as three,
        asking() as first,
        asking() as second,
    ):
        for client in (first, second):
            for i, server in enumerate((one, two, three)):
                reply = ask(client, server.address)
                assert reply.answer == wire.Description(descriptor=b"engine-%d" % i)


def test_a_large_answer_arrives_whole() -> None:
    class Large(Answers):
        def describe(self) -> wire.Description:
            return wire.Description(descriptor=bytes(range(256)) * (15 << 12))

    with serving(Large()) as server, asking() as client:
        reply = ask(client, server.address)
        assert isinstance(reply.answer, wire.Description)
        assert reply.answer.descriptor == bytes(range(256)) * (15 << 12)


def test_an_answer_that_is_too_large_is_refused() -> None:
    class TooLarge(Answers):
        def describe(self) -> wire.Description:
            return wire.Description(descriptor=bytes(wire.MAX_BYTES))

    with serving(TooLarge()) as server, asking() as client:
        reply = ask(client, server.address)
        assert reply.answer == wire.Refused(reason="the answer is too large")
        assert ask(client, server.address, open_lease()).answer is not None


def test_a_scheduler_half_that_fails_is_said_and_survived(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Fails(Answers):
        def describe(self) -> wire.Description:
            raise KeyError("a detail that is nobody's business")

    with serving(Fails()) as server, asking() as client:
        with caplog.at_level(logging.WARNING, "vllm.kvplugin.nixl"):
            reply = ask(client, server.address)
        assert reply.answer == wire.Refused(
            reason="this engine failed to answer Describe"
        )
        assert "nobody's business" in caplog.text
        assert isinstance(
            ask(client, server.address, wire.Status()).answer, wire.Health
        )


# -- secrets ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server_secret", "client_secret", "why"),
    [
        (SECRET, b"another secret, just as long", "does not answer with this engine's"),
        (SECRET, b"", "has a secret and this engine has none"),
        (b"", SECRET, "this engine has a secret and 127.0.0.1:.* has none"),
    ],
)
def test_another_secret_is_final_and_nothing_is_answered(
    server_secret: bytes, client_secret: bytes, why: str
) -> None:
    answers = Answers()
    with (
        serving(answers, secret=server_secret) as server,
        asking(secret=client_secret) as client,
    ):
        for _ in range(2):
            reply = ask(client, server.address)
            assert reply.answer is None
            assert reply.final
            with pytest.raises(AssertionError, match=why):
                raise AssertionError(reply.error)
        assert not answers.asked
        with asking(secret=server_secret) as good:
            assert ask(good, server.address).answer is not None


# -- peers that are not there, or not what they seem -----------------------------------


def test_nobody_listens() -> None:
    with asking() as client:
        reply = ask(client, f"127.0.0.1:{free_port()}", timeout=1e6)
        assert reply.answer is None
        assert "nobody listens" in reply.error
        assert not reply.final


def test_a_name_that_does_not_resolve() -> None:
    with asking() as client, serving() as server:
        reply = ask(client, "no-such-host.invalid:5600", timeout=1e6)
        assert "no-such-host.invalid" in reply.error
        assert ask(client, server.address).answer is not None


@pytest.mark.parametrize("address", ["", "nonsense", "h:0", "::1:5", "a b:1", "\0:1"])
def test_what_is_no_address(address: str) -> None:
    with asking() as client:
        assert "must be" in ask(client, address, timeout=1e6).error
        client.keep(address, "l", "r", 1.0)
        client.drop(address, "l", "r")
        assert "must be" in ask(client, address, timeout=1e6).error


def test_a_server_that_accepts_and_never_answers() -> None:
    """Neither its protocol nor an answer comes; the clock decides when it is over."""
    clock = Clock()
    with socket.create_server(("127.0.0.1", 0)) as mute, asking(clock=clock) as client:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        ticket = client.ask(address, wire.Describe(), 5.0)
        accepted, _ = mute.accept()
        assert not client.take()
        clock.now += 4.9
        with serving() as server:
            assert ask(client, server.address).answer is not None
            assert not client.take()
            clock.now += 0.2
            reply = replies_to(client, [ticket])[ticket]
        assert "has not answered within 5 s" in reply.error
        assert not reply.final
        accepted.close()


def test_the_socket_of_a_dead_peer_is_dropped() -> None:
    clock = Clock()
    with socket.create_server(("127.0.0.1", 0)) as mute, asking(clock=clock) as client:
        ticket = client.ask(f"127.0.0.1:{mute.getsockname()[1]}", wire.Describe(), 1.0)
        accepted, _ = mute.accept()
        clock.now += 1.1
        replies_to(client, [ticket])
        accepted.settimeout(50)
        received = b"x"
        while received:  # the greeting, then its end
            received = accepted.recv(1000)
        accepted.close()


# -- restarts --------------------------------------------------------------------------


def test_a_restarted_server_is_asked_anew_on_the_same_address() -> None:
    with asking() as client:
        with serving(Answers("old")) as server:
            address, port = server.address, int(server.address.rpartition(":")[2])
            assert ask(client, address).answer == wire.Description(descriptor=b"old")
        with serving(Answers("new"), port=port):
            assert ask(client, address).answer == wire.Description(descriptor=b"new")


def test_a_question_that_a_restart_swallows_is_asked_again() -> None:
    """The first server dies while it has the question, the second answers it."""
    has_it, die = threading.Event(), threading.Event()

    class Dies(Answers):
        def describe(self) -> wire.Description:
            has_it.set()
            die.wait()
            return super().describe()

    first = ChannelServer("127.0.0.1", 0, Dies("old"), secret=SECRET)
    port = int(first.address.rpartition(":")[2])
    with asking() as client:
        ticket = client.ask(first.address, wire.Describe(), 1e6)
        has_it.wait()
        closing = threading.Thread(target=first.close)
        closing.start()
        eventually(lambda: first._closing)
        die.set()  # its answer is not sent any more
        closing.join()
        with serving(Answers("new"), port=port):
            reply = replies_to(client, [ticket])[ticket]
        if reply.answer is None:  # noticed between the two: also an end
            assert "nobody listens" in reply.error
        else:
            assert reply.answer in (
                wire.Description(descriptor=b"old"),
                wire.Description(descriptor=b"new"),
            )


# -- leases ----------------------------------------------------------------------------


def test_leases_are_renewed_until_they_are_dropped_and_then_closed() -> None:
    answers, clock = Answers(), Clock()
    with serving(answers) as server, asking(clock=clock) as client:
        client.keep(server.address, "a", "r", 10.0)
        client.keep(server.address, "b", "r", 10.0)
        assert ask(client, server.address).answer is not None
        assert not answers.of(wire.Renew)
        for round_number in range(1, 4):
            clock.now += 10.0
            eventually(lambda n=round_number: len(answers.of(wire.Renew)) == n)
        assert answers.of(wire.Renew)[-1] == wire.Renew(leases=[("a", "r"), ("b", "r")])
        client.drop(server.address, "a", "r")
        eventually(
            lambda: answers.of(wire.Close) == [wire.Close(lease="a", reader="r")]
        )
        clock.now += 10.0
        eventually(lambda: len(answers.of(wire.Renew)) == 4)
        assert answers.of(wire.Renew)[-1] == wire.Renew(leases=[("b", "r")])


def test_a_lease_that_is_gone_is_not_renewed_again() -> None:
    answers, clock = Answers(), Clock()
    with serving(answers) as server, asking(clock=clock) as client:
        client.keep(server.address, "gone-1", "r", 1.0)
        client.keep(server.address, "b", "r", 1.0)
        assert ask(client, server.address).answer is not None
        for round_number in (1, 2):
            clock.now += 1.0
            eventually(lambda n=round_number: len(answers.of(wire.Renew)) == n)
            assert ask(client, server.address).answer is not None
        assert answers.of(wire.Renew)[-1] == wire.Renew(leases=[("b", "r")])


def test_a_lease_nobody_kept_is_closed_too() -> None:
    answers = Answers()
    with serving(answers) as server, asking() as client:
        assert ask(client, server.address).answer is not None
        client.drop(server.address, "l", "r")
        eventually(lambda: len(answers.of(wire.Close)) > 0)


def test_closing_the_client_closes_its_leases() -> None:
    answers = Answers()
    with serving(answers) as server:
        with asking() as client:
            assert ask(client, server.address, open_lease()).answer is not None
            client.keep(server.address, "l", "r", 100.0)
            client.drop(server.address, "m", "r")
        eventually(lambda: len(answers.of(wire.Close)) > 1)


# -- the ends ends ---------------------------------------------------------------------


def test_closing_twice_and_asking_after_the_end() -> None:
    with serving() as server:
        client = ChannelClient(secret=SECRET)
        assert ask(client, server.address).answer is not None
        client.close()
        client.close()
        ticket = client.ask(server.address, wire.Describe(), 5.0)
        client.keep(server.address, "l", "r", 1.0)
        client.drop(server.address, "l", "r")
        [reply] = client.take()
        assert reply.ticket == ticket
        assert "closed" in reply.error
        server.close()
        server.close()


def test_questions_under_way_end_when_the_client_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        client = ChannelClient(secret=SECRET)
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        tickets = [client.ask(address, wire.Describe(), 1e6) for _ in range(3)]
        client.close()
        assert len(replies_to(client, tickets)) == 3


def test_threads_and_files_are_given_back() -> None:
    def running() -> set[str]:
        return {t.name for t in threading.enumerate() if "kvplugin-nixl" in t.name}

    with serving() as server, asking() as client:
        assert ask(client, server.address).answer is not None
        assert running() >= {"kvplugin-nixl-server", "kvplugin-nixl-client"}
    assert not running()


def test_a_port_that_is_taken_names_the_key() -> None:
    with serving() as server:
        port = int(server.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=rf"side_channel_port={port}.*taken"):
            ChannelServer("127.0.0.1", port, Answers(), secret=SECRET)
        with asking() as client:
            assert ask(client, server.address).answer is not None


def test_an_address_that_is_not_of_this_machine_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r"side_channel_host='192\.0\.2\.1'"):
        ChannelServer("192.0.2.1", 0, Answers(), secret=SECRET)


def test_beyond_this_machine_a_secret_is_needed() -> None:
    with pytest.raises(ConfigError, match="secret"):
        ChannelServer("0.0.0.0", 0, Answers(), secret=b"", advertise_host="h")  # noqa: S104
    with pytest.raises(ConfigError, match="advertise_host"):
        ChannelServer("0.0.0.0", 0, Answers(), secret=SECRET)  # noqa: S104


def test_it_is_reached_under_the_address_that_it_advertises() -> None:
    server = ChannelServer(
        "0.0.0.0",  # noqa: S104
        0,
        Answers(),
        secret=SECRET,
        advertise_host="localhost",
    )
    try:
        assert server.address.startswith("localhost:")
        with asking() as client:
            assert ask(client, server.address).answer is not None
    finally:
        server.close()


def test_ipv6() -> None:
    try:
        server = ChannelServer("::1", 0, Answers(), secret=SECRET)
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    try:
        assert server.address.startswith("[::1]:")
        with asking() as client:
            assert ask(client, server.address).answer is not None
    finally:
        server.close()
