"""Memory that blocks pass through on their way into another layout.

A rank has one area, registered once and cut into a few slices: a read that stages
holds one until it ends, so that one which hangs leaves others for the rest.
"""

import threading
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from kvplugin.connectors.nixl.agent import HOST, Area
from kvplugin.kernels.host_convert import warm_up

SLICES: Final = 4
ALIGNMENT: Final = 4096
"""Of slices, in bytes."""


class Slice(NamedTuple):
    """Part of the area, for one read at a time."""

    number: int
    address: int
    nbytes: int


class Staging:
    """The area of one rank.

    Args:
        nbytes: of all slices together.
        device: as torch names it: where the rank's KV is.
    """

    def __init__(self, nbytes: int, device: str) -> None:
        each = nbytes // SLICES // ALIGNMENT * ALIGNMENT
        self.device = device
        self._memory, address = _allocate(SLICES * each + ALIGNMENT, device)
        address = -(-address // ALIGNMENT) * ALIGNMENT
        self.area = Area(address, SLICES * each, device)
        if device == HOST:
            warm_up()  # while the engine starts, not at its first read
        self._lock = threading.Lock()
        self._free = [Slice(i, address + i * each, each) for i in range(SLICES)][::-1]
        self.first = self._free[-1]
        """For plans that are made to see whether they need one."""

    def take(self) -> Slice | None:
        """A slice, for `give_back`; None while all are held."""
        with self._lock:
            return self._free.pop() if self._free else None

    def give_back(self, taken: Slice) -> None:
        """Let others have it."""
        with self._lock:
            self._free.append(taken)

    def on_device(self, work: Callable[[], Any]) -> None:
        """Do work of converters, which on a GPU only launch theirs, to its end."""
        if self.device == HOST:
            work()
            return
        import torch

        with torch.cuda.device(self.device):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                work()
            stream.synchronize()

    def fence(self) -> Callable[[], None]:
        """Waits for what the calling thread has launched by now; to be called from
        another thread."""
        if self.device == HOST:
            return _nothing
        import torch

        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(torch.device(self.device)))
        synchronize: Callable[[], None] = event.synchronize
        return synchronize


def _nothing() -> None:
    """What was done in host memory is done."""


def _allocate(nbytes: int, device: str) -> tuple[Any, int]:
    """Memory, and its address. Host memory takes no room before it is used."""
    if device == HOST:
        array = np.empty(nbytes, np.uint8)
        return array, array.ctypes.data
    import torch

    tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return tensor, tensor.data_ptr()
