"""Calls of the kernel for which Python has no name."""

import ctypes
import errno
from typing import Any


def bind(
    name: str,
    result: Any,
    *arguments: Any,
    library: type[ctypes.CDLL] = ctypes.CDLL,
) -> Any:
    """A function of libc that says why it fails in `ctypes.get_errno`.

    Args:
        name: the function's; on a system without it every call fails with ENOSYS.
        result: its ctypes type.
        arguments: theirs.
        library: `ctypes.PyDLL` keeps the GIL during the call.
    """
    try:
        function = getattr(library(None, use_errno=True), name)
    except (AttributeError, OSError, TypeError):
        return _missing
    function.restype, function.argtypes = result, arguments
    return function


def _missing(*_: Any) -> int:
    ctypes.set_errno(errno.ENOSYS)
    return -1
