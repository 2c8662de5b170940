"""KV in host memory, moved into huge pages.

Where one process reads another's memory, the kernel looks up and pins it page by page.
torch does not ask for huge pages, and most kernels (``transparent_hugepage/enabled`` is
``madvise``) give them to nobody who does not ask.

Pages that are written already stay as they are. The kernel could gather them
(``MADV_COLLAPSE``), but each such call waits for every core of the machine
(``lru_add_drain_all``), on busy cores for minutes. So bytes are copied into new memory,
which gets huge pages, and that is put in the old one's place (``mremap``), a piece at a
time: whoever looks finds the bytes, before and after.
"""

import ctypes
import logging
import mmap
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvplugin.connectors.nixl.agent import HOST, Area
from kvplugin.connectors.nixl.libc import bind

logger = logging.getLogger("vllm.kvplugin.nixl")

KERNEL: Final = Path("/sys/kernel/mm/transparent_hugepage")
PROCESS: Final = Path("/proc/self")
PIECE_BYTES: Final = 32 << 20
"""Moved at once, some 20 ms, and had twice meanwhile; at least a huge page, which is
512 MiB on some machines."""
_MAPPING: Final = re.compile(
    rb"(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) (?P<rights>\S+) \S+ \S+ (?P<inode>\d+)"
)
_OUR_RIGHTS: Final = b"rw-p"
_FLAGS_OF_OTHERS: Final = frozenset(b"lo io pf ht um uw wf dc".split())
"""Of a mapping that is locked, a device's, watched, or not for children: new memory
would not be."""


def move(
    areas: Iterable[Area],
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    kernel: Path = KERNEL,
    process: Path = PROCESS,
) -> int:
    """Move what is in host memory into huge pages; its bytes and addresses stay.

    Nobody may write to the memory meanwhile, and it must come before NIXL's
    registration: a device that has pinned pages would go on with the old ones. Where a
    device has pinned some of this process (``VmPin``), or some of these areas are a
    device's, nothing is moved. What goes wrong is logged, and the memory stays.

    Args:
        areas: that neither overlap nor touch. What is shared with other processes is
            passed over.
        seconds: after so long no further piece is begun; 0 leaves everything as it is.
        clock: monotonic seconds.
        kernel: the folder that says whether there are huge pages for programs.
        process: the folder that says how this process' memory lies.

    Returns:
        Bytes of these areas that are in huge pages now: at most, where other memory
        lies in one mapping with them.
    """
    some = list(areas)
    size = _huge_page(kernel)

    def is_large(area: Area) -> bool:
        return bool(_whole(_addresses(area), size))

    if not (size and seconds > 0 and any(map(is_large, some))):
        return 0
    if any(area.device != HOST for area in some):
        return 0
    started = clock()
    try:
        why = _move_all(some, size, lambda: clock() - started >= seconds, process)
    except (OSError, ValueError, MemoryError) as error:
        why = str(error) or type(error).__name__
    found = in_huge_pages(some, process)
    logger.info(
        "%d of %d MiB of KV memory are in huge pages, after %.1f s%s",
        found >> 20,
        sum(area.nbytes for area in some) >> 20,
        clock() - started,
        f": {why}" if why else "",
    )
    return found


def in_huge_pages(areas: Sequence[Area], process: Path = PROCESS) -> int:
    """Bytes of these areas that are in such, by the kernel's own account: at most,
    where other memory lies in one mapping with them."""
    found = 0
    for mapping in _mappings(process):
        shares = (_common(_addresses(area), mapping.addresses) for area in areas)
        found += min(mapping.huge, sum(map(len, shares)))
    return found


def _huge_page(kernel: Path) -> int:
    """Bytes of a huge page; 0 if no program gets one."""
    try:
        is_never = "[never]" in (kernel / "enabled").read_text()
        size = int((kernel / "hpage_pmd_size").read_text())
    except (OSError, ValueError):  # not Linux, or built without them
        return 0
    if is_never:
        logger.info("%s is 'never': reads of KV take longer", kernel / "enabled")
    return 0 if is_never else size


# -- how memory lies ---------------------------------------------------------------


class _Mapping(NamedTuple):
    """A part of this process' memory."""

    addresses: range
    is_ours: bool
    """Nobody else has it, and nobody would miss anything about it."""
    huge: int
    """Bytes of it that are in huge pages."""


def _mappings(process: Path) -> list[_Mapping]:
    found: list[_Mapping] = []
    for line in _lines(process / "smaps"):
        if match := _MAPPING.match(line):
            addresses = range(int(match["start"], 16), int(match["end"], 16))
            is_ours = match["rights"] == _OUR_RIGHTS and match["inode"] == b"0"
            found.append(_Mapping(addresses, is_ours, 0))
        elif line.startswith((b"AnonHugePages:", b"ShmemPmdMapped:")):
            huge = found[-1].huge + (int(line.split()[1]) << 10)
            found[-1] = found[-1]._replace(huge=huge)
        elif line.startswith(b"VmFlags:") and _FLAGS_OF_OTHERS & {*line.split()}:
            found[-1] = found[-1]._replace(is_ours=False)
    return found


def _are_pinned(process: Path) -> bool:
    return any(
        line.startswith(b"VmPin:") and int(line.split()[1]) > 0
        for line in _lines(process / "status")
    )


def _lines(path: Path) -> list[bytes]:
    """Names of files in it are any bytes but the end of a line."""
    try:
        return path.read_bytes().split(b"\n")
    except OSError:
        return []


def _addresses(area: Area) -> range:
    return range(area.address, area.address + area.nbytes)


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _whole(part: range, size: int) -> range:
    """The whole huge pages of a part of memory."""
    return range(-(-part.start // size) * size, part.stop // size * size)


# -- moving it ---------------------------------------------------------------------


def _move_all(
    areas: Sequence[Area], size: int, is_late: Callable[[], bool], process: Path
) -> str:
    """Why not all has been moved; empty if it has.

    Raises:
        OSError: the kernel does not do it.
    """
    if _are_pinned(process):
        return "a device has pinned memory of this process"
    is_first = True
    for piece in _pieces(areas, size, process):
        if is_late():
            return "out of time (key huge_pages_s)"
        copy = _copied(piece, size)
        try:
            if is_first and not in_huge_pages([_area(copy)], process):
                return "the kernel has none for this process"
            _put(copy, piece)
            copy = range(0)
        finally:
            _unmap(copy)
        is_first = False
    return ""


def _pieces(areas: Sequence[Area], size: int, process: Path) -> Iterator[range]:
    """The whole huge pages of these areas, without mappings that are such already."""
    most = max(PIECE_BYTES // size, 1) * size
    for mapping in _mappings(process):
        if mapping.is_ours and mapping.huge < len(_whole(mapping.addresses, size)):
            for area in areas:
                share = _common(_addresses(area), mapping.addresses)
                whole = _whole(share, size)
                for start in whole[::most]:
                    yield range(start, min(start + most, whole.stop))


def _copied(piece: range, size: int) -> range:
    """Its bytes, in new memory that begins where a huge page may."""
    nbytes = len(piece)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    rights = mmap.PROT_READ | mmap.PROT_WRITE
    at = _done(_LIBC.mmap(None, nbytes + size, rights, flags, -1, 0))
    start = -(-at // size) * size
    _unmap(range(at, start))
    _unmap(range(start + nbytes, at + nbytes + size))
    copy = range(start, start + nbytes)
    try:
        _done(_LIBC.madvise(start, nbytes, mmap.MADV_HUGEPAGE))
        _memory(copy)[:] = _memory(piece)
    except BaseException:
        _unmap(copy)
        raise
    return copy


def _put(copy: range, piece: range) -> None:
    """In the piece's place, as one change of this process' memory."""
    nbytes = len(piece)
    how = _MREMAP_MAYMOVE | _MREMAP_FIXED
    _done(_LIBC.mremap(copy.start, nbytes, nbytes, how, piece.start))


def _unmap(part: range) -> None:
    if part:
        _done(_LIBC.munmap(part.start, len(part)))


def _memory(part: range) -> npt.NDArray[np.uint8]:
    array = (ctypes.c_uint8 * len(part)).from_address(part.start)
    return np.ctypeslib.as_array(array)


def _area(part: range) -> Area:
    return Area(part.start, len(part), HOST)


def _done(result: int) -> int:
    """What a call of the kernel came to.

    Raises:
        OSError: it failed.
    """
    if result in (-1, _MAP_FAILED):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


_MREMAP_MAYMOVE: Final = 1
_MREMAP_FIXED: Final = 2
_MAP_FAILED: Final = ctypes.c_void_p(-1).value or 0


class _Libc:
    """The kernel's calls on this process' memory, by libc, whose own users (UCX) may
    watch them."""

    def __init__(self) -> None:
        size, number, place = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
        self.mmap = bind(
            "mmap", place, place, size, number, number, number, ctypes.c_long
        )
        self.mremap = bind("mremap", place, place, size, size, number, place)
        self.madvise = bind("madvise", number, place, size, number)
        self.munmap = bind("munmap", number, place, size)


_LIBC: Final = _Libc()
