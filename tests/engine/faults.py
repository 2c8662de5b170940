"""Faults, arranged in the engine's process before the engine starts."""

from typing import Any

from kvplugin.connectors.offload.host_copies import HostCopies


class _FailingCopies:
    """Copies that fail while `failing` says so."""

    failing: str = ""


def copies_can_fail() -> None:
    """From now on `fail_copies` decides whether copies of this process work."""
    execute = HostCopies.execute

    def maybe(self: HostCopies, job: Any) -> int:
        if _FailingCopies.failing == ("store" if job.store else "load"):
            raise OSError("made to fail by the test")
        return execute(self, job)

    HostCopies.execute = maybe  # type: ignore[method-assign]


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
