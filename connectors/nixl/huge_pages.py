"""KV in host memory, gathered into huge pages.

Where one process reads another's memory, the kernel looks up and pins it page by page.
Between two vLLM engines on two shared cores 64 MiB in pages of 4 KiB came at 3.8 GB/s,
in pages of 2 MiB at 7.0. torch does not ask for huge pages, and most kernels
(``transparent_hugepage/enabled`` is ``madvise``) give them to nobody who does not ask.
"""

import ctypes
import logging
import mmap
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from kvplugin.connectors.nixl.agent import HOST, Area

logger = logging.getLogger("vllm.kvplugin.nixl")

KERNEL: Final = Path("/sys/kernel/mm/transparent_hugepage")
PIECE_BYTES: Final = 8 << 20
"""Gathered by one call, which cannot be broken off: 4 ms, or much longer where the
kernel has to make room. At least a huge page, which is 512 MiB on some machines."""
_COLLAPSE: Final = 25
"""``MADV_COLLAPSE`` of Linux 6.1; Python has no name for it yet."""


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
    not reach in time the kernel gathers at its leisure.

    Args:
        areas: others than in host memory are passed over.
        seconds: how long it may take; 0 leaves everything as it is.
        clock: monotonic seconds.
        kernel: the folder that says whether there are huge pages for programs.

    Returns:
        Bytes that are in huge pages now, as far as the kernel allows.
    """
    here = [area for area in areas if area.device == HOST]
    if not (here and seconds > 0 and _are_allowed(kernel)):
        return 0
    for area in here:
        _advise(area, mmap.MADV_HUGEPAGE)
    started = clock()
    gathered = 0
    for piece in _pieces(here, max(PIECE_BYTES, _page_bytes(kernel))):
        if clock() - started >= seconds:
            break
        gathered += piece.nbytes * _advise(piece, _COLLAPSE)
    total = sum(area.nbytes for area in here)
    logger.info(
        "%d of %d MiB of KV memory gathered into huge pages in %.1f s",
        gathered >> 20,
        total >> 20,
        clock() - started,
    )
    return gathered


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


def _advise(area: Area, advice: int) -> bool:
    """Of the whole pages of an area; whether the kernel has done it."""
    start = -(-area.address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (area.address + area.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    return end > start and _madvise(start, end - start, advice) == 0


def _bind() -> Any:
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    return function


_madvise: Final = _bind()
