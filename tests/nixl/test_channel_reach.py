"""Where a client's parameters may have an engine connect to."""

import socket
from ipaddress import ip_address

import pytest

from kvplugin.connectors.nixl import wire
from kvplugin.connectors.nixl.config import NixlConfig
from kvplugin.connectors.nixl.scheduler import make_client
from kvplugin.connectors.nixl.server import ChannelServer
from tests.nixl.channel_lab import (
    PATIENCE_S,
    SECRET,
    Answers,
    Clock,
    ask,
    asking,
    serving,
)

ELSEWHERE = ["192.0.2.1", "10.0.0.1", "[::ffff:10.0.0.1]", "[2001:db8::1]"]
NOWHERE = [
    "169.254.169.254",
    "[::ffff:169.254.169.254]",
    "224.0.0.1",
    "0.0.0.0",  # noqa: S104
    "0",
    "[::]",
    "[::ffff:0.0.0.0]",
    "[ff02::1]",
    "[fe80::1%lo]",
]


@pytest.mark.parametrize("host", ELSEWHERE)
def test_without_a_secret_nobody_elsewhere_is_asked(host: str) -> None:
    with asking(secret=b"") as client:
        reply = ask(client, f"{host}:5600", timeout=1e6)
    assert reply.final
    assert "secret_file" in reply.error
    assert "insecure" in reply.error


@pytest.mark.parametrize("host", NOWHERE)
@pytest.mark.parametrize("secret", [SECRET, b""])
def test_some_addresses_are_no_engine_s(host: str, secret: bytes) -> None:
    with asking(secret=secret, insecure=True) as client:
        reply = ask(client, f"{host}:5600", timeout=1e6)
    assert reply.final
    assert "unspecified" in reply.error


def test_a_name_counts_as_what_it_stands_for_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stands for this machine at first, and for another after a restart there."""
    found = ["127.0.0.1"]
    monkeypatch.setattr(
        "kvplugin.connectors.nixl.names.resolve", lambda _: [ip_address(found[0])]
    )
    with asking(secret=b"") as client:
        with serving(secret=b"") as server:
            address = server.address.replace("127.0.0.1", "rebound.test")
            assert ask(client, address).answer is not None
        assert ask(client, address, timeout=1e6).answer is None
        found[0] = "192.0.2.1"
        reply = ask(client, address, timeout=1e6)
        assert reply.final
        assert "192.0.2.1 is not this machine" in reply.error


def _own_address() -> str:
    """One of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no network")
        return str(probe.getsockname()[0])


@pytest.mark.parametrize(
    ("settings", "is_asked"),
    [
        ({}, False),
        ({"insecure": True}, True),
        ({"secret": SECRET.decode()}, True),
    ],
)
def test_the_configuration_says_who_is_asked(
    settings: dict[str, object], is_asked: bool
) -> None:
    config = NixlConfig(**settings)  # type: ignore[arg-type]
    answers = Answers()
    server = ChannelServer(
        _own_address(), 0, answers, secret=config.secret.encode(), insecure=True
    )
    client = make_client(config, Clock())
    try:
        client.ask(server.address, wire.Describe(), PATIENCE_S)
        (reply,) = client.take(PATIENCE_S)
        assert (reply.answer is not None) == is_asked
        assert reply.final != is_asked
        assert bool(answers.asked) == is_asked
    finally:
        client.close()
        server.close()
