"""Reads what `kvplugin.replay.TraceWriter` wrote."""

from pathlib import Path

from kvplugin.replay.formats.lines import decoded, numbered_lines
from kvplugin.replay.record import Header, RequestLine
from kvplugin.replay.trace import Trace, TraceEntry, TraceError


def read_recorded(path: Path, block_size: int | None) -> Trace:
    """A trace of our own format, in the order of arrival: a recorder writes requests
    as they end.

    Args:
        path: the file.
        block_size: None, or what the header says.

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
        tuple(entries),
        full_blocks_only=True,
        notes=("requests are in the order of arrival, not of the file",),
    )


def _entry(path: Path, number: int, line: RequestLine, size: int) -> TraceEntry:
    tokens = line.input_length + line.output_length
    if len(line.block_hashes) * size > tokens:
        raise TraceError(
            f"{path}, line {number}: {len(line.block_hashes)} block_hashes of {size} "
            f"tokens for a prompt and answer of {tokens}"
        )
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
