"""Reads what `kvplugin.replay.TraceWriter` wrote."""

from pathlib import Path

from kvplugin.errors import ConfigError
from kvplugin.replay.formats.lines import decoded, numbered_lines
from kvplugin.replay.record import Header, RequestLine
from kvplugin.replay.trace import Trace, TraceEntry, TraceError


def read_recorded(path: Path, block_size: int | None, limit: int | None) -> Trace:
    """A trace of our own format, in the order of arrival: a recorder writes requests
    as they end.

    Args:
        path: the file.
        block_size: None, or what the header says.
        limit: the first so many to arrive; all lines are read to find them.

    Raises:
        TraceError: naming the line that is wrong.
    """
    lines = numbered_lines(path)
    for _, header in decoded(path, iter([next(lines, (1, b""))]), Header):
        size = header.block_size
    if block_size not in (None, size):
        raise TraceError(f"{path} has blocks of {size} tokens, not of {block_size}")
    entries = [
        _entry(path, number, line, size)
        for number, line in decoded(path, lines, RequestLine)
    ]
    entries.sort(key=lambda entry: entry.timestamp)
    return Trace(
        path.name,
        "kvplugin",
        size,
        tuple(entries[:limit]),
        full_blocks_only=True,
        notes=("requests are in the order of arrival, not of the file",),
    )


def _entry(path: Path, number: int, line: RequestLine, size: int) -> TraceEntry:
    try:
        line.check_hashes(size)
    except ConfigError as error:
        raise TraceError(f"{path}, line {number}: {error}") from error
    return TraceEntry(
        timestamp=line.timestamp,
        input_length=line.input_length,
        output_length=line.output_length,
        ids=line.block_hashes,
        session=line.session,
        turn=line.turn,
        priority=line.priority,
        ttl_s=line.ttl_s,
        ends_session=line.ends_session,
        cached_tokens=line.cached_tokens,
    )
