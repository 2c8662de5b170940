"""What a trace holds: counts, how much can be hit at all, and after how long."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvplugin.replay.requests import make_requests
from kvplugin.replay.settings import Partial
from kvplugin.replay.trace import Trace
from kvplugin.spec import cdiv

PERCENTILES: Final = (50, 90, 99)


@dataclass(frozen=True)
class Reuse:
    """After how long blocks that could be hit are wanted again."""

    percentile: int
    blocks: int
    """Blocks looked up since the last time, itself included, equal ones counted each
    time; a cache that keeps the last so many would hit."""
    seconds: float


@dataclass(frozen=True)
class Summary:
    """Figures of a trace."""

    trace: str
    format: str
    block_size: int
    requests: int
    sessions: int
    """Named ones."""
    seconds: float
    """From the first request to the last."""
    input_tokens: int
    output_tokens: int
    blocks: int
    """Looked up by prompts."""
    unique_blocks: int
    """Different ones, of prompts and named answers."""
    ceiling: float
    """Share of `blocks` that a cache which never evicts would hit."""
    observed: float | None
    """Share of prompt tokens that were cached when it was recorded, where noted."""
    reuse: tuple[Reuse, ...]
    """At `PERCENTILES` of the hits of such a cache; empty without hits."""
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def summarize(
    trace: Trace, *, block_size: int | None = None, partial: Partial = "count"
) -> Summary:
    """Figures of a trace, in blocks of a size.

    Args:
        trace: the requests.
        block_size: tokens of a block; None takes the trace's.
        partial: whether the partial block at the end of a prompt is a block.

    Raises:
        ConfigError: its ids cannot be split into such blocks.
    """
    size = block_size or trace.block_size
    last: dict[bytes, tuple[int, float]] = {}
    blocks = 0
    distances: list[int] = []
    waits: list[float] = []
    for request in make_requests(trace, size, partial):
        now = request.arrival_time
        for block_hash in request.block_hashes[: request.lookup_blocks]:
            if block_hash not in last:
                break  # a prefix: what follows is new too
            place, then = last[block_hash]
            distances.append(blocks - place)
            waits.append(now - then)
        for i, block_hash in enumerate(request.block_hashes):
            last[block_hash] = (blocks + min(i, request.lookup_blocks), now)
        blocks += request.lookup_blocks
    times = [entry.timestamp for entry in trace.entries]
    return Summary(
        trace=trace.source,
        format=trace.format,
        block_size=size,
        requests=len(trace.entries),
        sessions=len({entry.session for entry in trace.entries} - {None}),
        seconds=max(times) - min(times),
        input_tokens=sum(entry.input_length for entry in trace.entries),
        output_tokens=sum(entry.output_length for entry in trace.entries),
        blocks=blocks,
        unique_blocks=len(last),
        ceiling=len(distances) / blocks if blocks else 0.0,
        observed=_observed(trace),
        reuse=_percentiles(distances, waits),
        notes=trace.notes,
    )


def _observed(trace: Trace) -> float | None:
    noted = [entry for entry in trace.entries if entry.cached_tokens is not None]
    tokens = sum(entry.input_length for entry in noted)
    cached = sum(entry.cached_tokens or 0 for entry in noted)
    return cached / tokens if tokens else None


def _percentiles(distances: Sequence[int], waits: Sequence[float]) -> tuple[Reuse, ...]:
    if not distances:
        return ()
    by_distance, by_wait = sorted(distances), sorted(waits)
    # Nearest rank: the least value that so many percent do not exceed.
    places = {p: cdiv(len(waits) * p, 100) - 1 for p in PERCENTILES}
    return tuple(
        Reuse(p, by_distance[i], round(by_wait[i], 3)) for p, i in places.items()
    )
