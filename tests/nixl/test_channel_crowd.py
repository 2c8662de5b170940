"""Addresses that clients make up: what they take from peers that are there."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvplugin.connectors.nixl import wire
from kvplugin.connectors.nixl.address import resolve
from kvplugin.connectors.nixl.client import IDLE_S
from kvplugin.connectors.nixl.names import MAX_LOOKUPS
from tests.nixl.channel_lab import (
    Answers,
    Clock,
    ask,
    asking,
    eventually,
    replies_to,
    serving,
)


@contextmanager
def mute(count: int) -> Iterator[list[str]]:
    """Addresses where somebody accepts and says nothing."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        yield [f"127.0.0.1:{server.getsockname()[1]}" for server in servers]
    finally:
        for server in servers:
            server.close()


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Names that end in .test are looked up until this is called, and then unknown."""
    released = threading.Event()

    def slow(host: str) -> list[object]:
        if host.endswith(".test"):
            released.wait()
            raise OSError("too late")
        return list(resolve(host))

    monkeypatch.setattr("kvplugin.connectors.nixl.names.resolve", slow)
    yield released.set
    released.set()


def names(count: int) -> list[str]:
    return [f"slow-{i}.test:1" for i in range(count)]


def test_names_wait_for_their_turn(release: Callable[[], None]) -> None:
    with asking() as client, serving() as server:
        asked = [client.ask(a, wire.Describe(), 1e6) for a in names(3 * MAX_LOOKUPS)]
        assert ask(client, server.address).answer is not None  # literal: no look-up
        release()
        for reply in replies_to(client, asked).values():
            assert "too late" in reply.error
            assert not reply.local


def test_a_name_that_has_no_turn_in_time_is_not_to_blame(
    release: Callable[[], None],
) -> None:
    clock = Clock()
    with asking(clock=clock) as client:
        addresses = names(MAX_LOOKUPS + 1)
        tickets = [client.ask(a, wire.Describe(), 5.0) for a in addresses]
        eventually(lambda: client._waits(addresses[-1]))
        clock.now += 5.1
        replies = replies_to(client, tickets)
        assert [replies[t].local for t in tickets] == [False] * MAX_LOOKUPS + [True]
        assert "waits to be looked up" in replies[tickets[-1]].error
        eventually(lambda: not client._waits(addresses[-1]))


def test_a_name_that_is_known_does_not_wait_for_strangers(
    release: Callable[[], None],
) -> None:
    clock = Clock()
    with asking(clock=clock) as client, serving() as server:
        known = server.address.replace("127.0.0.1", "localhost")
        assert ask(client, known).answer is not None
        clock.now += IDLE_S + 1
        eventually(lambda: known not in client._links)
        for address in names(2 * MAX_LOOKUPS):
            client.ask(address, wire.Describe(), 1e6)
        assert ask(client, known).answer is not None


def test_strangers_do_not_take_the_place_of_who_is_known() -> None:
    clock = Clock()
    with (
        mute(3) as strangers,
        serving() as one,
        serving() as two,
        asking(clock=clock, max_peers=2) as client,
    ):
        for server in (one, two):
            assert ask(client, server.address).answer is not None
        links = {server.address: client._links[server.address] for server in (one, two)}
        busy = [client.ask(a, wire.Describe(), 5.0) for a in strangers]
        refused = replies_to(client, busy[2:])[busy[2]]
        assert "2 peers are busy" in refused.error
        assert refused.local
        assert not refused.final
        for address, link in links.items():
            assert client._links[address] is link
            assert ask(client, address).answer is not None
        clock.now += 5.1
        for reply in replies_to(client, busy[:2]).values():
            assert not reply.local, "these have not answered"
        again = client.ask(strangers[2], wire.Describe(), 5.0)
        assert not client.take(0.2), "now there is room"
        clock.now += 5.1
        assert "has not answered" in replies_to(client, [again])[again].error


def test_of_those_that_are_known_the_idle_ones_make_room() -> None:
    clock = Clock()
    with (
        serving() as one,
        serving() as two,
        serving() as three,
        asking(clock=clock, max_peers=1) as client,
    ):
        for server in (one, two, three, one, two, three):
            assert ask(client, server.address).answer is not None
            clock.now += 1.0
            assert len(client._links) <= 2
        client.keep(one.address, "l", "r", 1000.0)
        assert ask(client, one.address).answer is not None
        assert ask(client, two.address).local


def test_who_never_answered_is_not_told_that_a_lease_is_closed() -> None:
    answers = Answers()
    with (
        socket.create_server(("127.0.0.1", 0)) as stranger,
        serving(answers) as server,
        asking() as client,
    ):
        assert ask(client, server.address).answer is not None
        client.drop(f"127.0.0.1:{stranger.getsockname()[1]}", "lease", "reader")
        client.drop(server.address, "lease", "reader")
        eventually(lambda: bool(answers.of(wire.Close)))
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.accept()
