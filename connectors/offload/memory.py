"""Host memory for KV blocks: anonymous pages, huge where the kernel has them."""

import contextlib
import ctypes
import logging
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from kvplugin.errors import CapacityError

logger = logging.getLogger("vllm.kvplugin.offload")


def machine_memory() -> int:
    """Bytes that this process could use at most: of the machine, or of its control
    group where that is less."""
    return min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_limits())


def warn_of_shared_machine(nbytes: int, ranks: int) -> None:
    """Warn where the ranks cannot have `nbytes` bytes together if they are on one
    machine; how many share one is not known."""
    total = machine_memory()
    if ranks > 1 and nbytes > total:
        logger.warning(
            "cpu_bytes_to_use=%d is for all %d ranks together, and this machine has "
            "%d bytes of memory: if they are all on it, lower cpu_bytes_to_use",
            nbytes,
            ranks,
            total,
        )


def check_machine_memory(nbytes: int) -> None:
    """Refuse what can never fit.

    Raises:
        CapacityError: the machine, or this process's control group, has less than
            `nbytes` bytes of memory.
    """
    total = machine_memory()
    if nbytes > total:
        raise CapacityError(
            f"{nbytes} bytes of host memory wanted, the machine has {total}: "
            "lower cpu_bytes_to_use"
        )


def _limits() -> Iterator[int]:
    """Memory limits of the control group as a container sees them (v2, then v1)."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # none, or the word "max"
            yield int((_CGROUP / name).read_text())


class HostMemory:
    """A zeroed, page-aligned buffer, given physical memory only where written.

    Args:
        nbytes: size, positive.

    Raises:
        CapacityError: more than the machine has, or the kernel refuses.
    """

    def __init__(self, nbytes: int) -> None:
        check_machine_memory(nbytes)
        try:
            self._map = mmap.mmap(-1, nbytes, flags=_FLAGS)
        except OSError as error:
            raise CapacityError(
                f"no {nbytes} bytes of host memory ({error}): lower cpu_bytes_to_use"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Faults and TLB misses of 4 KiB pages cost more than the copies.
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = (ctypes.c_char * nbytes).from_buffer(self._map)
        self.nbytes = nbytes
        self.address = ctypes.addressof(self._bytes)

    @property
    def view(self) -> memoryview:
        """The bytes, for whoever wants to look at them."""
        return memoryview(self._bytes).cast("B")

    def abandon(self) -> None:
        """Never give the memory back, whoever forgets this object: a copy that cannot
        be ended may still use it."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._bytes))

    def close(self) -> None:
        """Give the memory back; no copy may be under way and no view alive."""
        del self._bytes
        self._map.close()


_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
_CGROUP = Path("/sys/fs/cgroup")
