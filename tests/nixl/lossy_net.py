"""A link between two namespaces that loses packets.

Where the kernel has no `netem`: each end is a TAP device, whose packets a thread of the
test carries to the other one, or does not.
"""

import contextlib
import fcntl
import os
import random
import select
import struct
import threading
from typing import Final

from tests.nixl.network_lab import Net, ip

_TUNSETIFF: Final = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_LARGEST: Final = 1 << 16


class LossyNet(Net):
    """Loses nothing until it is told to.

    Raises:
        OSError: this cannot be had here; says why.
    """

    def __init__(self) -> None:
        self.loss = 0.0
        """Share of the packets, of either direction."""
        self.lost = 0
        self._random = random.Random(0)
        self._taps: list[int] = []
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        super().__init__()
        self._thread.start()

    def _connect(self) -> None:
        for end in self.ends:
            tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            self._taps.append(tap)
            name = struct.pack("16sH22x", end.encode(), _IFF_TAP | _IFF_NO_PI)
            fcntl.ioctl(tap, _TUNSETIFF, name)
            ip("link", "set", end, "netns", end)

    def _carry(self) -> None:
        other = dict(zip(self._taps, reversed(self._taps), strict=True))
        while not self._is_closed.is_set():
            for tap in select.select(self._taps, [], [], 0.1)[0]:
                with contextlib.suppress(OSError):  # an end that is down
                    packet = os.read(tap, _LARGEST)
                    if self._random.random() < self.loss:
                        self.lost += 1
                    else:
                        os.write(other[tap], packet)

    def close(self) -> None:
        self._is_closed.set()
        if self._thread.is_alive():
            self._thread.join()
        for tap in self._taps:
            os.close(tap)
        self._taps.clear()
        super().close()
