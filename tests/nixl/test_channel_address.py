"""Where a side channel may listen, and under which names it is reached."""

import socket
from typing import Any

import pytest

from kvplugin.connectors.nixl import address
from kvplugin.connectors.nixl.address import (
    Address,
    check_exposure,
    is_loopback,
    is_wildcard,
    parse_address,
    resolve,
)
from kvplugin.connectors.nixl.config import NixlConfig
from kvplugin.errors import ConfigError

EVERYWHERE = ["0.0.0.0", "::", "*"]  # noqa: S104


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1:5600", "10.0.0.1", 5600),
        ("prefill-0.prefill.ns.svc:1", "prefill-0.prefill.ns.svc", 1),
        ("prefill_1:65535", "prefill_1", 65535),
        ("[::1]:80", "::1", 80),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80),
    ],
)
def test_addresses_are_read_and_written_the_same_way(
    text: str, host: str, port: int
) -> None:
    assert parse_address(text) == Address(host, port)
    assert str(parse_address(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "host",
        "host:",
        ":80",
        "host:0",
        "host:65536",
        "host:-1",
        "host:8 0",
        "host:٣",
        "::1:80",
        "[]:80",
        "a b:80",
        "host/path:80",
        "tcp://host:80",
        "ho\0st:80",
        "höst:80",
        "h" * 300 + ":80",
        "h:" + "9" * 100_000,
    ],
)
def test_what_is_no_address_is_refused_without_a_look_up(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", None)
    with pytest.raises(ConfigError) as caught:
        parse_address(text)
    assert len(str(caught.value)) < 1000


def _knows(monkeypatch: pytest.MonkeyPatch, names: dict[str, list[str]]) -> None:
    def look_up(host: str, *_: Any, **__: Any) -> list[Any]:
        if host not in names:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", (ip, 0)) for ip in names[host]]

    monkeypatch.setattr(address.socket, "getaddrinfo", look_up)


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "127.8.9.10", "127.1", "::1"]
)
def test_this_machine_only(host: str) -> None:
    assert is_loopback(host)
    check_exposure(NixlConfig(side_channel_host=host))


@pytest.mark.parametrize(
    "host", [*EVERYWHERE, "10.0.0.1", "192.168.1.1", "2001:db8::1", "0"]
)
def test_other_machines_too(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ConfigError, match=r"side_channel_host.*secret.*insecure"):
        check_exposure(NixlConfig(side_channel_host=host))


def test_an_ipv4_address_in_an_ipv6_one_is_what_it_is() -> None:
    assert is_loopback("::ffff:127.0.0.1")
    assert not is_loopback("::ffff:10.0.0.1")


def test_a_name_is_what_all_its_addresses_are(monkeypatch: pytest.MonkeyPatch) -> None:
    _knows(
        monkeypatch,
        {"inside": ["127.0.1.1", "::1"], "both": ["127.0.0.1", "10.0.0.9"]},
    )
    check_exposure(NixlConfig(side_channel_host="inside"))
    with pytest.raises(ConfigError, match="other machines"):
        check_exposure(NixlConfig(side_channel_host="both"))


@pytest.mark.parametrize("host", ["nowhere", "", "a" * 64 + ".x", "\0"])
def test_a_name_that_nobody_knows_names_the_key(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if host == "nowhere":
        _knows(monkeypatch, {})
    with pytest.raises(ConfigError, match="side_channel_host="):
        check_exposure(NixlConfig(side_channel_host=host))


@pytest.mark.parametrize(
    "protection", [{"secret": "x" * 32}, {"secret_file": "/f"}, {"insecure": True}]
)
def test_with_protection_it_may_listen_beyond(protection: dict[str, Any]) -> None:
    check_exposure(NixlConfig(side_channel_host="10.0.0.1", **protection))


@pytest.mark.parametrize("host", EVERYWHERE)
def test_every_address_is_none_for_others(host: str) -> None:
    assert is_wildcard(host)
    with pytest.raises(ConfigError, match="advertise_host"):
        check_exposure(NixlConfig(side_channel_host=host, secret="x" * 32))
    check_exposure(
        NixlConfig(side_channel_host=host, secret="x" * 32, advertise_host="10.1.1.1")
    )


def test_ipv4_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    _knows(monkeypatch, {"both": ["::1", "127.0.0.1"]})
    assert [str(ip) for ip in resolve("both")] == ["127.0.0.1", "::1"]
