"""Wakes a thread that polls sockets."""

import contextlib
import os


class Wake:
    """A pipe whose reading end a poller watches."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        """The end to watch."""
        return self._reader

    def set(self) -> None:
        """From any thread: the poller returns, now or at its next call."""
        with contextlib.suppress(OSError):  # full: it will; closed: it has ended
            os.write(self._writer, b"\0")

    def clear(self) -> None:
        """From the polling thread, before it looks for what it was woken for."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)

    def close(self) -> None:
        """After the thread has ended."""
        os.close(self._reader)
        os.close(self._writer)
