"""Log lines about strangers: one a minute, whatever they send."""

import logging
import threading
from collections.abc import Callable
from typing import Final

logger = logging.getLogger("vllm.kvplugin.nixl")

EVERY_S: Final = 60.0
_LONGEST: Final = 500
"""Characters of a line that come from elsewhere."""


class Grumble:
    """Counts what went wrong and says it at most once a minute."""

    def __init__(self, what: str, clock: Callable[[], float]) -> None:
        self._what = what
        self._clock = clock
        self._lock = threading.Lock()
        self._count = 0
        self._next = float("-inf")

    def __call__(self, why: str) -> None:
        """Once more."""
        with self._lock:
            self._count += 1
            now = self._clock()
            if now < self._next:
                return
            count, self._count = self._count, 0
            self._next = now + EVERY_S
        # no codec: Python would load it now, and the process may have no files left
        shown = why[:_LONGEST]
        printable = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)
        more = f" ({count} since the last such line)" if count > 1 else ""
        logger.warning("%s%s: %s", self._what, more, printable)
