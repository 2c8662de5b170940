"""What a replay found, as data."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from kvplugin.errors import IntegrityError, PluginError
from kvplugin.replay.settings import BELADY, LRU, ReplaySettings

SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Counts:
    """Of the requests that count: those after the warm-up."""

    requests: int
    skipped: int
    """Requests that do not fit, not even alone; their blocks count as missed."""
    blocks: int
    """Blocks that prompts looked up."""
    device_blocks: int
    """Blocks hit in the pool."""
    host_blocks: int
    """Blocks hit behind that in the host tier."""
    tokens: int
    """Tokens of prompts."""
    device_tokens: int
    host_tokens: int
    evictions: int
    """Keys that the pool lost."""

    @property
    def hit_blocks(self) -> int:
        """Blocks that were hit anywhere."""
        return self.device_blocks + self.host_blocks

    @property
    def block_rate(self) -> float:
        """Hits a block, 0 to 1."""
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    @property
    def host_rate(self) -> float:
        """Hits of the host tier a block, 0 to 1."""
        return self.host_blocks / self.blocks if self.blocks else 0.0

    @property
    def token_rate(self) -> float:
        """Tokens hit a token, 0 to 1; 0 where no tokens are counted."""
        hits = self.device_tokens + self.host_tokens
        return hits / self.tokens if self.tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with both rates."""
        return {
            **asdict(self),
            "block_rate": self.block_rate,
            "token_rate": self.token_rate,
        }


@dataclass(frozen=True, slots=True)
class Run:
    """One policy at one capacity."""

    policy: str
    capacity: int
    counts: Counts
    seconds: float
    """How long the run took."""
    is_reference: bool = False
    """Whether it ran for comparison only."""
    closed: float | None = None
    """Share of the distance from LRU's block rate to Belady's that it closes; below 0
    where LRU is better. None without references or distance."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "policy": self.policy,
            "capacity": self.capacity,
            "reference": self.is_reference,
            "closed": self.closed,
            "seconds": round(self.seconds, 3),
            **self.counts.as_dict(),
        }


@dataclass(frozen=True)
class ReplayResult:
    """All runs over one trace."""

    trace: str
    format: str
    block_size: int
    """Tokens of a block that rates count."""
    rules: Mapping[str, str]
    """What was decided: subject -> rule in words."""
    ceiling: Counts | None
    """The unbounded cache under the same rules; None without references."""
    runs: tuple[Run, ...] = ()
    """By capacity, then by policy as asked for, references last."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `docs/replay.md` describes it."""
        return {
            "schema_version": SCHEMA_VERSION,
            "trace": self.trace,
            "format": self.format,
            "block_size": self.block_size,
            "rules": dict(self.rules),
            "ceiling": None if self.ceiling is None else self.ceiling.as_dict(),
            "runs": [run.as_dict() for run in self.runs],
        }


class RunFailedError(PluginError):
    """A policy failed in a run; `result` has the runs before it."""

    def __init__(self, message: str, result: ReplayResult) -> None:
        super().__init__(message)
        self.result = result


def with_runs(
    result: ReplayResult, settings: ReplaySettings, run: Callable[[str, int], Run]
) -> ReplayResult:
    """The result with the runs of all policies at all capacities, each held against
    LRU and Belady.

    Args:
        result: one without runs.
        settings: which ones.
        run: runs one, of a policy's name and a capacity.

    Raises:
        RunFailedError: a policy failed; has what ran before.
    """
    done: list[Run] = []
    for capacity in dict.fromkeys(settings.capacities):
        runs: list[Run] = []
        try:
            for name in dict.fromkeys(settings.policies):
                runs.append(run(name, capacity))
            for name in settings.reference_policies:
                runs.append(replace(run(name, capacity), is_reference=True))
        except (PluginError, IntegrityError) as error:
            kept = replace(result, runs=(*done, *_compared(runs)))
            raise RunFailedError(str(error), kept) from error
        done += _compared(runs)
    return replace(result, runs=tuple(done))


def _compared(runs: list[Run]) -> list[Run]:
    """The runs of one capacity, each with its share of the distance."""
    rates = {run.policy: run.counts.block_rate for run in runs}
    if not {LRU, BELADY} <= rates.keys() or rates[BELADY] <= rates[LRU]:
        return runs
    low, distance = rates[LRU], rates[BELADY] - rates[LRU]
    return [
        replace(run, closed=(run.counts.block_rate - low) / distance) for run in runs
    ]
