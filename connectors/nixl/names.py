"""Looks up the names of hosts without keeping anybody waiting.

The system's resolver may take many seconds for a name that does not exist. Every other
peer would wait for it too.
"""

import socket
import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from kvplugin.connectors.nixl.address import IP, Address, literal, resolve

MAX_LOOKUPS: Final = 8
"""At a time: names come with requests, from anybody. The others wait."""


class Endpoint(NamedTuple):
    """Where to connect to."""

    family: socket.AddressFamily
    address: tuple[str, int]


class Names:
    """Finds the numeric address of a peer.

    Args:
        found: told, on some thread, what became of a `look_up`: where the peer is, or
            why nobody knows.
    """

    def __init__(self, found: Callable[[str, Endpoint | str], None]) -> None:
        self._found = found
        self._lock = threading.Lock()
        self._waiting: dict[str, Address] = {}
        """First come, first looked up; no more than who asks has keys."""
        self._num_threads = 0

    def look_up(self, key: str, address: Address) -> None:
        """Find it; `found` gets `key` back, at once where there is nothing to find."""
        if ip := literal(address.host):
            self._found(key, _endpoint(ip, address.port))
            return
        with self._lock:
            self._waiting[key] = address
            if self._num_threads >= MAX_LOOKUPS:
                return
            self._num_threads += 1
        try:
            threading.Thread(
                target=self._work, name="kvplugin-names", daemon=True
            ).start()
        except RuntimeError as error:  # as many threads as there may be
            with self._lock:
                self._num_threads -= 1
                self._waiting.pop(key, None)
            self._found(key, f"{address.host!r} is not looked up: {error}")

    def waits(self, key: str) -> bool:
        """Whether others are looked up first."""
        return key in self._waiting

    def forget(self, key: str) -> None:
        """Nobody wants to know any more."""
        with self._lock:
            self._waiting.pop(key, None)

    def _work(self) -> None:
        """On a thread of its own, until nothing waits."""
        while (due := self._next()) is not None:
            key, address = due
            result: Endpoint | str
            try:
                result = _endpoint(resolve(address.host)[0], address.port)
            except Exception as error:  # a thread that dies tells nobody
                result = str(error)
            self._found(key, result)

    def _next(self) -> tuple[str, Address] | None:
        with self._lock:
            if not self._waiting:
                self._num_threads -= 1
                return None
            key = next(iter(self._waiting))
            return key, self._waiting.pop(key)


def _endpoint(ip: IP, port: int) -> Endpoint:
    family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
    return Endpoint(family, (str(ip), port))
