"""Halves that do nothing: of a connector that is switched off or could not start."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from kvplugin.contract import (
    MISS,
    NOTHING_HAPPENED,
    EngineBlocks,
    KVTensor,
    Lookup,
    RequestView,
    Stats,
    Step,
    WorkerOutcome,
)
from kvplugin.events import KVCacheEvent


class IdleScheduler:
    """A scheduler half that never hits and never stores."""

    watched: Collection[str] = ()

    def bind_blocks(self, blocks: EngineBlocks) -> None:
        del blocks

    def lookup(self, request: RequestView, num_local_tokens: int) -> Lookup:
        del request, num_local_tokens
        return MISS

    def allocated(
        self,
        request: RequestView,
        block_ids: tuple[Sequence[int], ...],
        num_external_tokens: int,
    ) -> None:
        del request, block_ids, num_external_tokens

    def plan_step(self, step: Step) -> bytes:
        del step
        return b""

    def apply(self, reports: Iterable[bytes]) -> None:
        del reports

    def distrust(self, block_ids: AbstractSet[int]) -> None:
        del block_ids

    def finished(self, request: RequestView) -> bool:
        del request
        return False

    def reset(self) -> bool:
        return True

    def has_pending_work(self) -> bool:
        return False

    def has_pending_frees(self) -> bool:
        return False

    def take_events(self) -> list[KVCacheEvent]:
        return []

    def take_stats(self) -> Stats | None:
        return None

    def check(self) -> None:
        """There is nothing that could be wrong."""

    def close(self) -> None:
        """There is nothing to stop."""


class IdleWorker:
    """A worker half that does nothing."""

    def register(self, tensors: Mapping[str, KVTensor]) -> None:
        del tensors

    def begin_step(self, plan: bytes) -> None:
        del plan

    def end_step(self) -> None:
        """Nothing is stored."""

    def poll(self) -> WorkerOutcome:
        return NOTHING_HAPPENED

    def drain(self) -> bytes:
        return b""

    def close(self) -> None:
        """There is nothing to stop."""
