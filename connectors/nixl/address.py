"""Where a side channel listens, and what may listen where.

Addresses are ``host:port``, an IPv6 host in brackets.
"""

import ipaddress
import re
import socket
from typing import Final, NamedTuple, TypeAlias

from kvplugin.connectors.nixl.config import NixlConfig
from kvplugin.errors import ConfigError

_LONGEST: Final = 255
"""Characters of a host's name, as in DNS."""
_HOST: Final = re.compile(r"[A-Za-z0-9._:%-]+", re.ASCII)
_PORT: Final = re.compile(r"[0-9]{1,5}", re.ASCII)
IP: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


class Address(NamedTuple):
    """A host's name or address (without brackets), and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_address(text: str) -> Address:
    """Read ``host:port``.

    Raises:
        ConfigError: it is none; nothing of it is looked up.
    """
    host, separator, port = text[: _LONGEST + 10].rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        separator = ""  # an IPv6 address without brackets: where does it end?
    valid_host = len(host) <= _LONGEST and _HOST.fullmatch(host)
    if not (separator and valid_host and _PORT.fullmatch(port)):
        raise ConfigError(f"{text[:_LONGEST]!r} must be host:port, or [IPv6]:port")
    if not 1 <= int(port) <= 65_535:
        raise ConfigError(f"port {port} of {text[:_LONGEST]!r} must be from 1 to 65535")
    return Address(host, int(port))


def resolve(host: str) -> list[IP]:
    """The addresses that a host's name stands for, IPv4 first. May take long.

    Raises:
        OSError: nobody knows that name; says which.
    """
    if spelt := literal(host):
        return [spelt]
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # a ValueError: no name at all
        raise OSError(f"host {host!r} is not known: {error}") from error
    addresses = {ipaddress.ip_address(str(entry[4][0])) for entry in found}
    return sorted(addresses, key=lambda ip: (ip.version, int(ip)))


def is_wildcard(host: str) -> bool:
    """Whether it stands for every address of this machine."""
    spelt = literal(host)
    return host == "*" or (spelt is not None and spelt.is_unspecified)


def is_loopback(host: str) -> bool:
    """Whether it can be reached from this machine only, whatever it resolves to.

    Raises:
        OSError: nobody knows that name.
    """
    return host != "*" and all(_stays_here(ip) for ip in resolve(host))


def check_exposure(config: NixlConfig) -> None:
    """Refuse a side channel that says more than it should, or cannot be reached.

    Raises:
        ConfigError: it listens beyond this machine without a secret, `insecure` not
            being set; or on every address, without `advertise_host`; or nowhere.
    """
    check_host(
        config.side_channel_host,
        advertise_host=config.advertise_host,
        is_protected=bool(config.secret or config.secret_file or config.insecure),
    )


def check_host(host: str, *, advertise_host: str, is_protected: bool) -> None:
    """`check_exposure` without a configuration.

    Raises:
        ConfigError: as there.
    """
    try:
        loopback = is_loopback(host)
    except OSError as error:
        raise ConfigError(f"side_channel_host={host!r}: {error}") from error
    if not loopback and not is_protected:
        raise ConfigError(
            f"side_channel_host={host!r} can be reached from other machines, and the "
            "side channel tells who asks where KV lies in memory. Set secret or "
            "secret_file to the same value on all engines (docs/pd-security.md), or "
            "insecure=true where nobody else reaches that network"
        )
    if is_wildcard(host) and not advertise_host:
        raise ConfigError(
            f"side_channel_host={host!r} listens on every address of this machine, and "
            "is no address for others: set advertise_host to the one that other "
            "engines reach"
        )


def literal(host: str) -> IP | None:
    """The address that a host's name spells out, if it is one."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def out_of_reach(found: str, *, only_this_machine: bool) -> str:
    """Why an address that a client may have named is not connected to; empty if it is.

    Args:
        found: numeric, as the socket gets it: a name may stand for another by then.
        only_this_machine: whether peers elsewhere could be anybody.
    """
    ip = _plain(ipaddress.ip_address(found))
    if ip.is_link_local or ip.is_multicast or ip.is_unspecified:
        return f"{found} is link-local, multicast or unspecified: no engine is there"
    if only_this_machine and not ip.is_loopback:
        return (
            f"{found} is not this machine, and without a secret whoever is there would "
            "be believed: set secret_file (or secret) to the same value on all engines "
            "(docs/pd-security.md), or insecure=true where nobody else reaches that "
            "network"
        )
    return ""


def _stays_here(ip: IP) -> bool:
    return _plain(ip).is_loopback


def _plain(ip: IP) -> IP:
    """An IPv4 address in an IPv6 one is what it is."""
    return getattr(ip, "ipv4_mapped", None) or ip
