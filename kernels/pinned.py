"""Host memory that a GPU may read and write at full speed: pages pinned in place.

`torch.empty(pin_memory=True)` rounds up to a power of two (100 GB take 128) and fails
as a whole. So the pool is plain memory (an anonymous mapping), which is registered
with the driver afterwards, piece by piece. Registering gives every page physical
memory at once: from then on the pool takes its full size.
"""

import logging
import math
import mmap
from collections.abc import Iterator
from typing import Any, Final, Protocol

from kvplugin.errors import CapacityError

logger = logging.getLogger("vllm.kvplugin.kernels")

PIECE_BYTES: Final = 16 << 30
"""Most bytes registered in one call. A call holds the process's memory map while it
pins, and fails as a whole; each piece costs a fixed amount of time. Not tuned (vLLM
0.32 takes 64 GiB)."""


class Registrar(Protocol):
    """Pins memory. Both answer the driver's reason; empty if it did as told."""

    def register(self, address: int, nbytes: int) -> str:
        """Pin pages that are mapped and not pinned yet."""

    def unregister(self, address: int) -> str:
        """Undo the `register` of this address."""


class PinnedMemory:
    """Keeps memory that others own pinned until `close`.

    Pieces begin at pages and, for `unit_bytes`, between units: one copy by the
    driver must not span two pieces, so no unit does.

    Args:
        address: of the first byte, page-aligned.
        nbytes: to be pinned, positive; the memory outlives this object.
        registrar: who pins.
        unit_bytes: largest run that is copied at once, such as a host slot; units
            start at `address` and lie side by side.
        piece_bytes: as `PIECE_BYTES`; a piece is larger where pages and units meet
            only farther apart.

    Raises:
        CapacityError: the driver refused a piece; nothing is left pinned.
        ValueError: `address` is not page-aligned, or a number is not positive.
    """

    def __init__(
        self,
        address: int,
        nbytes: int,
        registrar: Registrar,
        *,
        unit_bytes: int = 1,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        _check(address, nbytes, unit_bytes, piece_bytes)
        self._registrar = registrar
        self._pinned: list[int] = []
        pieces = list(_pieces(nbytes, unit_bytes, piece_bytes))
        for number, (offset, size) in enumerate(pieces, 1):
            reason = registrar.register(address + offset, size)
            if reason:
                self.close()
                raise CapacityError(
                    f"cannot pin {nbytes} bytes of host memory: piece {number} of "
                    f"{len(pieces)} ({size} bytes, at byte {offset}) is refused "
                    f"({reason}). Lower cpu_bytes_to_use, or raise the limit of locked "
                    "memory (ulimit -l; --ulimit memlock=-1 for a container) and the "
                    "container's memory limit"
                )
            self._pinned.append(address + offset)

    @property
    def cuts(self) -> list[int]:
        """Addresses where one piece ends and the next begins, see `DmaBlockCopier`."""
        return self._pinned[1:]

    def close(self) -> None:
        """Unpin; no copy may be under way. Again: does nothing."""
        while self._pinned:
            address = self._pinned.pop()
            reason = self._registrar.unregister(address)
            if reason:
                logger.error("cannot unpin host memory at %#x (%s)", address, reason)


def _check(address: int, nbytes: int, unit_bytes: int, piece_bytes: int) -> None:
    if address % mmap.PAGESIZE:
        raise ValueError(
            f"address {address:#x} is not at a page of {mmap.PAGESIZE} bytes"
        )
    if min(nbytes, unit_bytes, piece_bytes) < 1:
        raise ValueError(
            f"nbytes {nbytes}, unit_bytes {unit_bytes} and piece_bytes {piece_bytes} "
            "must be positive"
        )


def _pieces(nbytes: int, unit: int, limit: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes): all but the last whole pages and whole units."""
    step = math.lcm(mmap.PAGESIZE, unit)
    size = max(limit // step, 1) * step
    for offset in range(0, nbytes, size):
        yield offset, min(size, nbytes - offset)


class CudaRegistrar:
    """`cudaHostRegister` of the CUDA runtime that torch has loaded (or HIP's).

    Args:
        device: index of the GPU; the memory is pinned for all of them.
    """

    def __init__(self, device: int) -> None:
        import torch

        self._torch = torch
        self._device = device
        self._runtime: Any = torch.cuda.cudart()

    def register(self, address: int, nbytes: int) -> str:
        """For every context, and for kernels too."""
        return self._reason(
            self._runtime.cudaHostRegister(address, nbytes, _PORTABLE | _MAPPED)
        )

    def unregister(self, address: int) -> str:
        """The pages stay where they are, as ordinary memory."""
        return self._reason(self._runtime.cudaHostUnregister(address))

    def _reason(self, code: Any) -> str:
        if code == self._runtime.cudaError.success:
            return ""
        self._forget()
        return str(self._runtime.cudaGetErrorString(code))

    def _forget(self) -> None:
        """Let torch raise the runtime's last error here and not in a later launch
        that has nothing to do with it."""
        try:
            self._torch.zeros(1, device=f"cuda:{self._device}")
        except RuntimeError as error:
            logger.debug("after a refused registration: %s", error)


_PORTABLE: Final = 1
_MAPPED: Final = 2
"""cudaHostRegisterPortable and cudaHostRegisterMapped of driver_types.h."""
