"""Reading traces: which formats there are, and which one a file has."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from kvplugin.errors import unknown_name
from kvplugin.replay.formats.hash_ids import read_bailian, read_mooncake
from kvplugin.replay.formats.lines import numbered_lines, opened
from kvplugin.replay.formats.recorded import read_recorded
from kvplugin.replay.formats.vllm_events import EVENT_TYPES, read_vllm_events
from kvplugin.replay.record import FORMAT
from kvplugin.replay.settings import FORMATS
from kvplugin.replay.trace import Trace, TraceError

__all__ = ["READERS", "detect_format", "read_trace"]

_Reader = Callable[[Path, int | None], Trace]

READERS: Final[Mapping[str, _Reader]] = dict(
    zip(
        FORMATS,
        (read_recorded, read_mooncake, read_bailian, read_vllm_events),
        strict=True,
    )
)


def read_trace(
    path: str | Path,
    format: str = "auto",  # noqa: A002  # the command line's name for it
    *,
    block_size: int | None = None,
    limit: int | None = None,
) -> Trace:
    """The trace in a file, gzipped or not.

    Args:
        path: the file.
        format: one of `FORMATS`, or ``auto``.
        block_size: tokens that an id of the trace covers; None takes the format's.
        limit: read no more requests than these; None takes all.

    Raises:
        ConfigError: there is no such format.
        TraceError: the file cannot be read, or is not of the format; names the line.
    """
    path = Path(path)
    if format == "auto":
        format = detect_format(path)  # noqa: A001
    if format not in FORMATS:
        raise unknown_name("trace format", format, FORMATS, "format")
    trace = READERS[format](path, block_size)
    if not trace.entries:
        raise TraceError(f"{path} has no requests")
    return trace if limit is None else replace(trace, entries=trace.entries[:limit])


def detect_format(path: Path) -> str:
    """The format that the first line of a file has.

    Raises:
        TraceError: the file cannot be read, is empty, or has none of the formats.
    """
    with opened(path) as file:
        first = file.read(1)
    if not first:
        raise TraceError(f"{path} is empty")
    if first not in (b"{", b"["):
        if first[0] >= 0x80:  # MessagePack's arrays and maps
            return "vllm-events"
        raise _nothing_known(path)
    _, line = next(numbered_lines(path))
    try:
        head = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}, line 1: {error}") from error
    if isinstance(head, list):
        return "vllm-events"
    return _of_keys(path, head)


def _of_keys(path: Path, head: Mapping[str, Any]) -> str:
    if head.get("format") == FORMAT:
        return "kvplugin"
    if "hash_ids" in head:
        return "bailian" if "parent_chat_id" in head else "mooncake"
    if "events" in head or head.get("type") in EVENT_TYPES:
        return "vllm-events"
    raise _nothing_known(path)


def _nothing_known(path: Path) -> TraceError:
    return TraceError(
        f"{path} has none of the known formats: {', '.join(FORMATS)}; name one to see "
        f"where it differs"
    )
