"""What `Reuse` keeps of releases: runs of blocks, and whose they go on to be."""

from collections import deque
from dataclasses import dataclass, field

from kvplugin.policies.eviction.base import BlockContext
from kvplugin.policies.eviction.hazard import NUM_CLASSES, SHARED


@dataclass(slots=True, eq=False)
class Run:
    """Blocks of one release with one fate."""

    birth: int
    """Epoch of the release."""
    cls: int
    traits: int | None
    turn: int
    """Requests before that its request continues."""
    end: int
    """Blocks of the request up to the end of the run."""
    shared: int
    """Leading blocks of the request that others begin with too."""
    blocks: list[int]
    """The next victim last; some may have left."""
    size: int
    live: int
    """Blocks that are evictable and of this run."""
    at_risk: float = 1.0
    """Share that was not hit yet, evicted or not."""


@dataclass(frozen=True, slots=True)
class Line:
    """What a request in use continues."""

    turn: int
    shared: int
    hit: int
    """Leading blocks that were known before."""
    ended: bool = False


@dataclass(slots=True)
class Cohort:
    """The runs of a span of time by class, the oldest first."""

    runs: dict[int, deque[Run]] = field(default_factory=dict)
    at_risk: dict[int, float] = field(default_factory=dict)

    def absorb(self, later: "Cohort") -> None:
        for cls, runs in later.runs.items():
            self.runs.setdefault(cls, deque()).extend(runs)
        for cls, runs_at_risk in later.at_risk.items():
            self.at_risk[cls] = self.at_risk.get(cls, 0.0) + runs_at_risk


def continue_run(run: Run, hit: int, ctx: BlockContext) -> Line:
    """What a request is that hits `hit` blocks, the last of them of this run."""
    if run.cls % NUM_CLASSES == SHARED or 2 * hit <= run.end:
        return Line(ctx.turn, hit, hit, ctx.ends_session)
    turn = ctx.turn or run.turn + 1
    return Line(turn, run.shared, hit, ctx.ends_session)
