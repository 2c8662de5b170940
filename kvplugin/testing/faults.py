"""Transfers that go wrong by script, and a tier for the content model.

`FakeTransport` ends a job when a test says so. For long runs and for enumerated orders
`FaultyTransport` asks a function what is to become of each job:

    tier = ContentTier(memory)
    transport = FaultyTransport(tier.execute, lambda job: FAILS if job.id % 3 else LATE)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvplugin.contract import CopyJob, CopyResult
from kvplugin.testing.content import ContentModel
from kvplugin.testing.slots import BlockContent
from kvplugin.testing.transport import FakeTransport

BLOCK_BYTES: Final = 64
"""What a block is said to weigh."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a job; the usual ones are constants of this module."""

    polls: int = 0
    """Polls that say nothing of it first; -1: it never ends."""
    moves_at_once: bool = False
    """The bytes move at the first poll, however late the report."""
    error: str = ""
    """Not empty: it fails, ..."""
    moved_blocks: int = 0
    """... after so many of its blocks have moved."""
    reports: int = 1
    """How often its end is told."""


COMPLETES: Final = Fate()
"""At the first poll, all is well."""
LATE: Final = Fate(polls=2)
"""At the third poll; the bytes move then, from what the source holds by then."""
REPORTED_LATE: Final = Fate(polls=2, moves_at_once=True)
"""The bytes move at the first poll, told at the third."""
TWICE: Final = Fate(reports=2)
"""Its end is told twice, in one poll."""
FAILS: Final = Fate(error="failed by the script")
"""Nothing moves."""
TORN: Final = Fate(error="torn by the script", moved_blocks=1)
"""One block moves, then it fails."""
NEVER_ENDS: Final = Fate(polls=-1)
"""Until the test says `complete`, `fail`, `tear` or `release`."""


class FaultyTransport(FakeTransport):
    """A `FakeTransport` whose jobs end by script; its methods work on them as well.

    Args:
        execute: see `FakeTransport`.
        fate_of: asked once a job, when it is submitted.
    """

    def __init__(
        self,
        execute: Callable[[CopyJob], int],
        fate_of: Callable[[CopyJob], Fate] = lambda job: COMPLETES,
    ) -> None:
        super().__init__(execute, held=True)
        self.fate_of = fate_of
        self._fates: dict[int, Fate] = {}
        self._polls: dict[int, int] = {}
        self._released = False

    def submit(self, job: CopyJob) -> None:
        """See `FakeTransport`."""
        super().submit(job)
        self._fates[job.id] = self.fate_of(job)
        self._polls[job.id] = 0

    def poll(self, wait: float) -> list[CopyResult]:
        """End the jobs whose time has come, oldest first; then as `FakeTransport`."""
        for job in self.pending:
            fate, polls = self._fates[job.id], self._polls[job.id]
            self._polls[job.id] += 1
            if fate.moves_at_once:
                self.move(job.id)
            if polls == fate.polls or (fate.polls < 0 and self._released):
                self._meet(job.id, fate)
        return super().poll(wait)

    def release(self) -> None:
        """From now on a job that would never end does, at the next `poll`; the others
        keep their fates."""
        self._released = True

    def state(self) -> object:
        """See `FakeTransport`."""
        left = [self._fates[job.id].polls - self._polls[job.id] for job in self.pending]
        return super().state(), [n if n >= 0 else "held" for n in left]

    def _meet(self, job_id: int, fate: Fate) -> None:
        if not fate.error:
            self.complete(job_id)
        elif fate.moved_blocks and not fate.moves_at_once:
            self.tear(job_id, fate.moved_blocks, fate.error)
        else:
            self.fail(job_id, fate.error)
        for _ in range(fate.reports - 1):
            self.repeat(job_id)


class ContentTier:
    """Memory below a content model's: what stores copied, by tier block.

    Args:
        memory: the engine's blocks on this rank.
    """

    def __init__(self, memory: ContentModel) -> None:
        self.memory = memory
        self.blocks: dict[int, BlockContent] = {}

    def execute(self, job: CopyJob, num_slots: int | None = None) -> int:
        """Move the blocks of a job, as they are now (see `FakeTransport`).

        Args:
            job: whose ids are those of `memory` and of `blocks`.
            num_slots: slots that a load fills in each block, None for all: a copy torn
                inside blocks.

        Returns:
            Bytes moved.

        Raises:
            ContentError: an engine block is null or free.
            LookupError: a tier block to load was never stored.
        """
        moved = 0
        for _, engine_ids, tier_ids in job.parts:
            if job.store:
                copies = self.memory.store(engine_ids)
                self.blocks.update(zip(tier_ids, copies, strict=True))
            else:
                payload = [self.blocks[block] for block in tier_ids]
                self.memory.load(payload, engine_ids, num_slots=num_slots)
            moved += BLOCK_BYTES * len(engine_ids)
        return moved
