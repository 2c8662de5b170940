"""KV in host memory, gathered into huge pages.

Where one process reads another's memory, the kernel looks up and pins it page by page.
Between two vLLM engines on two shared cores 64 MiB in pages of 4 KiB came at 3.8 GB/s,
in pages of 2 MiB at 7.0. torch does not ask for huge pages, and most kernels
(``transparent_hugepage/enabled`` is ``madvise``) give them to nobody who does not ask.
"""

import ctypes
import errno
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from kvplugin.connectors.nixl.agent import HOST, Area

logger = logging.getLogger("vllm.kvplugin.nixl")

KERNEL: Final = Path("/sys/kernel/mm/transparent_hugepage")
PIECE_BYTES: Final = 64 << 20
"""Gathered by one call, some 30 ms; at least a huge page, which is 512 MiB on some
machines. A call cannot be broken off, and each begins by waiting for every core of the
machine (``lru_add_drain_all``): hence few of them."""
_COLLAPSE: Final = 25
"""``MADV_COLLAPSE`` of Linux 6.1; Python has no name for it yet."""
_NO_ROOM: Final = (errno.ENOMEM, errno.EBUSY)
"""There is no huge page, or the control group may have no more: nor for the rest."""


def gather(
    areas: Iterable[Area],
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    kernel: Path = KERNEL,
) -> int:
    """Ask for huge pages in host memory, and move what is written there already into
    such, while it may go on being used.

    It must come before NIXL's registration: pinned pages are not moved. What it does
    not reach in time stays in small pages for long.

    Args:
        areas: others than in host memory are passed over.
        seconds: after so long no further piece is begun; 0 leaves everything as it is.
        clock: monotonic seconds.
        kernel: the folder that says whether there are huge pages for programs.

    Returns:
        Bytes of these areas that are in huge pages now. Of memory that was not written
        yet there are none, but there will be.
    """
    here = [area for area in areas if area.device == HOST]
    if not (here and seconds > 0 and _are_allowed(kernel)):
        return 0
    for area in here:
        _advise(area, mmap.MADV_HUGEPAGE)
    started, why = clock(), ""
    for piece in _pieces(here, max(PIECE_BYTES, _page_bytes(kernel))):
        if clock() - started >= seconds:
            why = "out of time (key huge_pages_s)"
            break
        if error := _advise(piece, _COLLAPSE):
            why = os.strerror(error)
        if error in _NO_ROOM:
            break
    gathered = sum(in_huge_pages(area) for area in here)
    logger.info(
        "%d of %d MiB of KV memory are in huge pages, after %.1f s%s",
        gathered >> 20,
        sum(area.nbytes for area in here) >> 20,
        clock() - started,
        f": {why}" if why else "",
    )
    return gathered


def in_huge_pages(area: Area) -> int:
    """Bytes of an area that are in such, by the kernel's own account; of mappings that
    it shares with others as many as may be its own."""
    found, shared = 0, 0
    for line in _account():
        name, *rest = line.split()
        if not name.endswith(":"):
            first, end = (int(part, 16) for part in name.split("-"))
            stop = area.address + area.nbytes
            shared = min(end, stop) - max(first, area.address)
        elif name in ("AnonHugePages:", "ShmemPmdMapped:") and shared > 0:
            found += min(int(rest[0]) << 10, shared)
    return found


def _account() -> list[str]:
    try:
        return Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return []


def _are_allowed(kernel: Path) -> bool:
    setting = kernel / "enabled"
    try:
        is_never = "[never]" in setting.read_text()
    except OSError:  # not Linux, or built without them
        return False
    if is_never:
        logger.info("%s is 'never': reads of KV take longer", setting)
    return not is_never


def _page_bytes(kernel: Path) -> int:
    try:
        return int((kernel / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0


def _pieces(areas: Iterable[Area], nbytes: int) -> Iterator[Area]:
    """Cut where huge pages may be cut."""
    for area in areas:
        start, end = area.address, area.address + area.nbytes
        while start < end:
            stop = min((start // nbytes + 1) * nbytes, end)
            yield Area(start, stop - start, area.device)
            start = stop


def _advise(area: Area, advice: int) -> int:
    """Of the whole pages of an area; the kernel's ``errno`` if it does not do it."""
    start = -(-area.address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (area.address + area.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end <= start or _madvise(start, end - start, advice) == 0:
        return 0
    return ctypes.get_errno()


def _no_madvise(*_: int) -> int:
    ctypes.set_errno(errno.ENOSYS)
    return -1


def _bind() -> Any:
    try:
        function = ctypes.CDLL(None, use_errno=True).madvise
    except (AttributeError, OSError, TypeError):  # a system without it
        return _no_madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    return function


_madvise: Final = _bind()
