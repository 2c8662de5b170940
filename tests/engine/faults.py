"""Faults, arranged in the engine's process before the engine starts."""

import threading
from typing import Any, Final

from kvplugin.connectors.offload.host_copies import HostCopies

_LONGEST_HOLD: Final = 60.0
"""Seconds; only so that a test that fails does not hang."""


class _FailingCopies:
    """Copies that fail while `failing` says so, and loads that wait to be let go."""

    failing: str = ""
    may_load = threading.Event()


def copies_can_fail() -> None:
    """From now on `fail_copies` decides whether copies of this process work, and
    `hold_loads` when those into the engine end."""
    execute = HostCopies.execute
    _FailingCopies.may_load.set()

    def maybe(self: HostCopies, job: Any) -> int:
        if not job.store:
            _FailingCopies.may_load.wait(_LONGEST_HOLD)
        if _FailingCopies.failing == ("store" if job.store else "load"):
            raise OSError("made to fail by the test")
        return execute(self, job)

    HostCopies.execute = maybe  # type: ignore[method-assign]


def hold_loads(llm: Any, held: bool) -> None:
    """Let loads wait, or go on."""
    del llm
    if held:
        _FailingCopies.may_load.clear()
    else:
        _FailingCopies.may_load.set()


def fail_copies(llm: Any, direction: str) -> None:
    """Let copies in one direction ("store", "load", "" for none) fail."""
    del llm
    _FailingCopies.failing = direction


def no_host_memory() -> None:
    """Registration of KV tensors fails, as with an unknown page layout."""
    from kvplugin.connectors.offload.worker import OffloadWorker
    from kvplugin.errors import LayoutMismatchError

    def refuse(self: OffloadWorker, tensors: Any) -> None:
        raise LayoutMismatchError("KV layout refused: made to fail by the test")

    OffloadWorker.register = refuse  # type: ignore[method-assign]
