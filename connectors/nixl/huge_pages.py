"""KV in host memory, laid anew into huge pages.

Where one process reads another's memory, the kernel looks up and pins it page by page.
torch does not ask for huge pages, and most kernels (``transparent_hugepage/enabled`` is
``madvise``) give them to nobody who does not ask.

Pages that are written already stay as they are. The kernel could gather them
(``MADV_COLLAPSE``), but each such call waits for every core of the machine
(``lru_add_drain_all``), on busy cores for minutes. So they are given back, a piece at a
time, and written again, which takes huge ones: no call waits for anybody.
"""

import ctypes
import errno
import logging
import mmap
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvplugin.connectors.nixl.agent import HOST, Area

logger = logging.getLogger("vllm.kvplugin.nixl")

KERNEL: Final = Path("/sys/kernel/mm/transparent_hugepage")
PROCESS: Final = Path("/proc/self")
PIECE_BYTES: Final = 32 << 20
"""Laid at once, and kept beside meanwhile; some 20 ms."""
_MAPPING: Final = re.compile(
    r"(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) rw.(?P<private>.) \S+ \S+ (?P<inode>\d+)"
)


def lay_anew(
    areas: Iterable[Area],
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    kernel: Path = KERNEL,
    process: Path = PROCESS,
) -> int:
    """Put what is in host memory into huge pages; its bytes and addresses stay.

    Nobody may use the memory meanwhile, and it must come before NIXL's registration: a
    device that has pinned pages would go on with the old ones. Where a device of
    another library has (``VmPin``), nothing is moved.

    Args:
        areas: others than in host memory, and such as are shared with other processes,
            are passed over.
        seconds: after so long no further piece is begun; 0 leaves everything as it is.
        clock: monotonic seconds.
        kernel: the folder that says whether there are huge pages for programs.
        process: the folder that says how this process' memory lies.

    Returns:
        Bytes of these areas that are in huge pages now. There may be fewer than there
        could: the kernel gives small ones where memory is in small parts.
    """
    here = [area for area in areas if area.device == HOST]
    size = _huge_page(kernel)
    if not (here and seconds > 0 and size):
        return 0
    started = clock()
    why = "pages are pinned by a device" if _are_pinned(process) else ""
    for piece in () if why else _pieces(here, size, process):
        if clock() - started >= seconds:
            why = "out of time (key huge_pages_s)"
            break
        if why := _lay(piece, size):
            break
    found = sum(in_huge_pages(area, process) for area in here)
    logger.info(
        "%d of %d MiB of KV memory are in huge pages, after %.1f s%s",
        found >> 20,
        sum(area.nbytes for area in here) >> 20,
        clock() - started,
        f": {why}" if why else "",
    )
    return found


class _Mapping(NamedTuple):
    """A part of this process' memory that it may write."""

    start: int
    end: int
    is_own: bool
    """Neither a file nor shared."""
    huge: int
    """Bytes of it that are in huge pages."""


def in_huge_pages(area: Area, process: Path = PROCESS) -> int:
    """Bytes of an area that are in such, by the kernel's own account; of mappings that
    it shares with other areas as many as may be its own."""
    shares = _shares(area, _mappings(process))
    return sum(min(mapping.huge, stop - start) for mapping, start, stop in shares)


def _shares(
    area: Area, mappings: Iterable[_Mapping]
) -> Iterator[tuple[_Mapping, int, int]]:
    """The mappings that an area lies in, and from where to where."""
    for mapping in mappings:
        start = max(area.address, mapping.start)
        stop = min(area.address + area.nbytes, mapping.end)
        if start < stop:
            yield mapping, start, stop


def _mappings(process: Path) -> list[_Mapping]:
    found: list[_Mapping] = []
    for line in _lines(process / "smaps"):
        if match := _MAPPING.match(line):
            start, end = (int(match[name], 16) for name in ("start", "end"))
            is_own = match["private"] == "p" and match["inode"] == "0"
            found.append(_Mapping(start, end, is_own, 0))
        elif found and line.startswith(("AnonHugePages:", "ShmemPmdMapped:")):
            huge = found[-1].huge + (int(line.split()[1]) << 10)
            found[-1] = found[-1]._replace(huge=huge)
    return found


def _are_pinned(process: Path) -> bool:
    return any(
        line.startswith("VmPin:") and int(line.split()[1]) > 0
        for line in _lines(process / "status")
    )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _huge_page(kernel: Path) -> int:
    """Bytes of a huge page; 0 if a program gets none."""
    try:
        is_never = "[never]" in (kernel / "enabled").read_text()
        size = int((kernel / "hpage_pmd_size").read_text())
    except (OSError, ValueError):  # not Linux, or built without them
        return 0
    if is_never:
        logger.info("%s is 'never': reads of KV take longer", kernel / "enabled")
    return 0 if is_never else size


def _pieces(
    areas: Iterable[Area], size: int, process: Path
) -> Iterator[npt.NDArray[np.uint8]]:
    """The whole huge pages of these areas that are not yet such."""
    most = max(PIECE_BYTES // size, 1) * size
    mappings = _mappings(process)
    for area in areas:
        for mapping, start, stop in _shares(area, mappings):
            first, last = -(-start // size) * size, stop // size * size
            if mapping.is_own and mapping.huge < last - first:
                for at in range(first, last, most):
                    yield _memory(at, min(most, last - at))


def _memory(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _lay(piece: npt.NDArray[np.uint8], size: int) -> str:
    """Write a piece into pages of its own; why it is left, or nothing."""
    kept = piece.copy() if piece.any() else None
    why = _advise(piece, mmap.MADV_HUGEPAGE) or _advise(piece, mmap.MADV_DONTNEED)
    if kept is None:
        piece[::size] = 0  # a byte takes the whole page, which is zero
    else:
        piece[:] = kept
    return why


def _advise(piece: npt.NDArray[np.uint8], advice: int) -> str:
    """Why the kernel does not do it, or nothing."""
    if _madvise(piece.ctypes.data, piece.nbytes, advice) == 0:
        return ""
    return os.strerror(ctypes.get_errno())


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
