"""A trace as it was read, whatever its format: requests and the ids of their blocks."""

from dataclasses import dataclass

from kvplugin.errors import KVPluginError


class TraceError(KVPluginError, ValueError):
    """A trace cannot be read; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One request of a trace."""

    timestamp: float
    """Seconds on the trace's clock."""
    input_length: int
    """Tokens of the prompt."""
    output_length: int
    """Tokens of the answer."""
    ids: tuple[int | str, ...]
    """Ids of its blocks in order; equal ids behind equal ids are the same prefix."""
    session: str | None = None
    turn: int = 0
    """Number of the request in its session, 0 for the first."""
    priority: int = 0
    """Higher is kept longer."""
    ttl_s: float | None = None
    """Seconds from its arrival for which its blocks are worth keeping."""
    ends_session: bool = False
    cached_tokens: int | None = None
    """Tokens of the prompt that were found in the cache when it was recorded."""


@dataclass(frozen=True)
class Trace:
    """All requests of a file, in its order."""

    source: str
    """Name of the file."""
    format: str
    block_size: int
    """Tokens that an id covers."""
    entries: tuple[TraceEntry, ...]
    full_blocks_only: bool = False
    """Whether ids name full blocks, of prompt and answer; otherwise they name the
    blocks of the prompt, the last of which may be partial."""
    notes: tuple[str, ...] = ()
    """What was decided in reading, to be printed with results."""
