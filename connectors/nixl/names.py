"""Looks up the names of hosts without keeping anybody waiting.

The system's resolver may take many seconds for a name that does not exist. Every other
peer would wait for it too.
"""

import socket
import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from kvplugin.connectors.nixl.address import Address, resolve
from kvplugin.errors import CapacityError

MAX_LOOKUPS: Final = 8
"""At a time: names come with requests, from anybody."""


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
        self._under_way = threading.Semaphore(MAX_LOOKUPS)

    def look_up(self, key: str, address: Address) -> None:
        """Find it; `found` gets `key` back.

        Raises:
            CapacityError: too many are being looked up.
        """
        if not self._under_way.acquire(blocking=False):
            raise CapacityError(f"{MAX_LOOKUPS} names of hosts are being looked up")
        threading.Thread(
            target=self._look_up,
            args=(key, address),
            name="kvplugin-names",
            daemon=True,
        ).start()

    def _look_up(self, key: str, address: Address) -> None:
        result: Endpoint | str
        try:
            ip = resolve(address.host)[0]
            family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
            result = Endpoint(family, (str(ip), address.port))
        except Exception as error:  # a thread that dies tells nobody
            result = str(error)
        finally:
            self._under_way.release()
        self._found(key, result)
