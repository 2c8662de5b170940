"""Reads from another process of this machine, by the kernel (process_vm_readv).

Where both sides' KV is host memory and the kernel allows it (one user, or the right to
trace; containers: one PID namespace, not forbidden by seccomp), one system call copies
up to 1,024 pieces straight from the peer's blocks into ours, which a stopped peer does
not notice and a dead one ends at once. Against NIXL on the same two processes:
16 KiB pages 9.5 and 2.7 GB/s, 64 KiB 15 and 6.7, one large piece 17 and 12.

A process id may come to name another process. What that one has at the same address
is not believed: every read ends with the peer's generations, whose entry 0 is a number
that only this very process has.
"""

import ctypes
import errno
import os
from typing import Any, Final

import numpy as np

from kvplugin.connectors.nixl.descriptor import HostIdentity, RankDescriptor
from kvplugin.connectors.nixl.libc import bind
from kvplugin.connectors.nixl.reads import Transfer
from kvplugin.errors import TransferError

MAX_PIECES: Final = 1024
"""Of one system call (the kernel's ``UIO_MAXIOV``)."""

CALL_BYTES: Final = 64 << 20
"""Of one system call, some 4-8 ms: between two of them a read can stop. After each the
thread needs the GIL, for which it waits up to 5 ms while the engine computes."""

HELD_BYTES: Final = 1 << 16
"""Up to so many are copied with the GIL held: sooner done than given away and back."""

_WHY: Final = {
    errno.ESRCH: "its process has ended",
    errno.EPERM: "the kernel does not allow it (another user, or a container that "
    "forbids tracing)",
    errno.EFAULT: "its memory is not there any more",
    errno.ENOSYS: "the kernel has no process_vm_readv",
}


def why_not(ours: RankDescriptor, theirs: RankDescriptor) -> str:
    """Why a rank's memory can't be read this way; empty if it can."""
    if not theirs.host.boot_id or _machine(ours.host) != _machine(theirs.host):
        return "another machine, or another PID namespace"
    if theirs.host.pid <= 0:
        return "its process is not known"
    devices = {layer.device for rank in (ours, theirs) for layer in rank.layers}
    if devices - {"cpu"}:
        return f"KV memory of {', '.join(sorted(devices))}"
    found = np.zeros(1, np.int64)
    try:
        read = HostRead(
            theirs.host.pid,
            np.array([theirs.generations_address]),
            np.array([found.ctypes.data]),
            np.array([found.nbytes]),
        )
        while not read.poll():
            pass
    except TransferError as error:
        return str(error)
    if found[0] != theirs.incarnation:
        return "its process has been replaced"
    return ""


def _machine(host: HostIdentity) -> tuple[str, int]:
    return host.boot_id, host.pid_namespace


class HostReader:
    """Implements `kvplugin.connectors.nixl.readers.Reader`.

    Args:
        theirs: the rank to read from.
    """

    minds_pieces = False

    def __init__(self, theirs: RankDescriptor) -> None:
        self._pid = theirs.host.pid

    def begin(self, transfer: Transfer) -> "HostRead":
        """A read, of which nothing is copied before it is polled."""
        return HostRead(self._pid, transfer.remote, transfer.local, transfer.nbytes)

    def close(self) -> None:
        """Nothing is open."""


class HostRead:
    """Implements `kvplugin.connectors.nixl.readers.Read`: each poll copies some MiB.

    Args:
        pid: the other process.
        remote: int64 addresses there.
        local: as many here.
        nbytes: as many, positive.
    """

    is_prompt = True

    def __init__(
        self,
        pid: int,
        remote: "np.ndarray[Any, Any]",
        local: "np.ndarray[Any, Any]",
        nbytes: "np.ndarray[Any, Any]",
    ) -> None:
        self._pid = pid
        self._theirs, self._ours, self._cuts = _calls(remote, local, nbytes)
        self._next = 0
        self._is_stopped = False

    def stop(self) -> None:
        """Copy nothing more: the next poll says that it has failed."""
        self._is_stopped = True

    def poll(self) -> bool:
        """Copy on; whether all bytes are there.

        Raises:
            TransferError: they won't come; nothing is written any more.
        """
        if self._is_stopped:
            raise TransferError("stopped")
        if self._next == len(self._cuts) - 1:
            return True
        first, last = self._cuts[self._next], self._cuts[self._next + 1]
        _copy(self._pid, self._ours[first:last], self._theirs[first:last])
        self._next += 1
        return self._next == len(self._cuts) - 1


def _calls(
    remote: "np.ndarray[Any, Any]",
    local: "np.ndarray[Any, Any]",
    nbytes: "np.ndarray[Any, Any]",
) -> tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]", list[int]]:
    """Both sides as the kernel wants them, [pieces, 2] of address and bytes, and where
    one call ends and the next one begins."""
    counts = np.maximum(-(-nbytes // CALL_BYTES), 1)
    if len(nbytes) and counts.max() > 1:
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        skipped = within * CALL_BYTES
        remote = np.repeat(remote, counts) + skipped
        local = np.repeat(local, counts) + skipped
        nbytes = np.minimum(np.repeat(nbytes, counts) - skipped, CALL_BYTES)
    theirs = np.ascontiguousarray(np.stack((remote, nbytes), 1), np.int64)
    ours = np.ascontiguousarray(np.stack((local, nbytes), 1), np.int64)
    ends = np.cumsum(nbytes)
    cuts = [0]
    while cuts[-1] < len(ends):
        first = cuts[-1]
        start = ends[first] - nbytes[first]
        last = int(np.searchsorted(ends, start + CALL_BYTES, side="right"))
        cuts.append(min(max(last, first + 1), first + MAX_PIECES))
    return theirs, ours, cuts


def _copy(
    pid: int, ours: "np.ndarray[Any, Any]", theirs: "np.ndarray[Any, Any]"
) -> None:
    """One system call, without the GIL unless it is a small one.

    Raises:
        TransferError: not all bytes came.
    """
    wanted = int(ours[:, 1].sum())
    call = _readv if wanted > HELD_BYTES else _readv_held
    copied = call(pid, ours.ctypes.data, len(ours), theirs.ctypes.data, len(theirs), 0)
    if copied == wanted:
        return
    if copied >= 0:
        raise TransferError(
            f"process {pid}: {copied} of {wanted} bytes came: its memory is not there "
            "any more"
        )
    code = ctypes.get_errno()
    raise TransferError(f"process {pid}: {_WHY.get(code, os.strerror(code))}")


def _bind(library: type[ctypes.CDLL]) -> Any:
    unsigned, pointer = ctypes.c_ulong, ctypes.c_void_p
    sides = (pointer, unsigned, pointer, unsigned)
    types = (ctypes.c_ssize_t, ctypes.c_int, *sides, unsigned)
    return bind("process_vm_readv", *types, library=library)


_readv: Final = _bind(ctypes.CDLL)
_readv_held: Final = _bind(ctypes.PyDLL)
