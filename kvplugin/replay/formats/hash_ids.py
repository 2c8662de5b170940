"""Traces with `hash_ids`: Mooncake's (ids of 512 tokens) and Bailian's (16 tokens).

Mooncake: Qin et al., "Mooncake: Trading More Storage for Less Computation", FAST 2025;
github.com/kvcache-ai/Mooncake. Bailian: Wang et al., "KVCache Cache in the Wild",
USENIX ATC 2025; github.com/alibaba-edu/qwen-bailian-usagetraces-anon.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Final

import msgspec

from kvplugin.replay.formats.lines import decoded, numbered_lines
from kvplugin.replay.trace import Trace, TraceEntry, TraceError
from kvplugin.spec import cdiv

MOONCAKE_BLOCK: Final = 512
BAILIAN_BLOCK: Final = 16

_Count = Annotated[int, msgspec.Meta(ge=0)]


class MooncakeLine(msgspec.Struct, frozen=True):
    """Keys that are read; others are passed over."""

    timestamp: float
    """Milliseconds."""
    input_length: _Count
    output_length: _Count
    hash_ids: tuple[int, ...]


class BailianLine(msgspec.Struct, frozen=True):
    """Keys that are read; others are passed over."""

    chat_id: int
    timestamp: float
    """Seconds."""
    input_length: _Count
    output_length: _Count
    hash_ids: tuple[int, ...]
    parent_chat_id: int | None = None
    """-1, null or missing for the first request of a session."""
    turn: int = 1


def read_mooncake(path: Path, block_size: int | None, limit: int | None) -> Trace:
    """A trace of Mooncake's format.

    Args:
        path: the file.
        block_size: tokens that an id covers; None takes 512.
        limit: no more lines are read than these.

    Raises:
        TraceError: naming the line that is wrong.
    """
    size = block_size or MOONCAKE_BLOCK
    lines = decoded(path, islice(numbered_lines(path), limit), MooncakeLine)
    entries = (
        TraceEntry(
            timestamp=line.timestamp / 1000,
            input_length=line.input_length,
            output_length=line.output_length,
            ids=_checked(path, number, line, size),
        )
        for number, line in lines
    )
    return Trace(path.name, "mooncake", size, tuple(entries))


def read_bailian(path: Path, block_size: int | None, limit: int | None) -> Trace:
    """A trace of Bailian's format; a session is what leads to one first request.

    Args:
        path: the file.
        block_size: tokens that an id covers; None takes 16.
        limit: no more lines are read than these.

    Raises:
        TraceError: naming the line that is wrong.
    """
    size = block_size or BAILIAN_BLOCK
    entries = _bailian_entries(path, islice(numbered_lines(path), limit), size)
    return Trace(path.name, "bailian", size, tuple(entries))


def _bailian_entries(
    path: Path, lines: Iterator[tuple[int, bytes]], size: int
) -> Iterator[TraceEntry]:
    sessions: dict[int, str] = {}
    for number, line in decoded(path, lines, BailianLine):
        parent = line.parent_chat_id
        first = line.chat_id if parent is None or parent < 0 else parent
        session = sessions.setdefault(first, str(first))
        sessions[line.chat_id] = session
        yield TraceEntry(
            timestamp=line.timestamp,
            input_length=line.input_length,
            output_length=line.output_length,
            ids=_checked(path, number, line, size),
            session=session,
            turn=max(line.turn - 1, 0),
        )


def _checked(
    path: Path, number: int, line: MooncakeLine | BailianLine, size: int
) -> tuple[int, ...]:
    """The ids, if the prompt has as many blocks, the partial one counted or not."""
    least, most = line.input_length // size, cdiv(line.input_length, size)
    if not least <= len(line.hash_ids) <= most:
        raise TraceError(
            f"{path}, line {number}: {len(line.hash_ids)} hash_ids for an input_length "
            f"of {line.input_length}, {most} expected with {size} tokens an id; set "
            f"the trace's block size if it is another"
        )
    return line.hash_ids
