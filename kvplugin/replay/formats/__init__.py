"""Reading traces: which formats there are, and which one a file has."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from kvplugin.errors import check_count, unknown_name
from kvplugin.replay.formats.hash_ids import read_bailian, read_mooncake
from kvplugin.replay.formats.lines import first_byte, numbered_lines
from kvplugin.replay.formats.recorded import read_recorded
from kvplugin.replay.formats.vllm_events import EVENT_TYPES, read_vllm_events
from kvplugin.replay.record import FORMAT
from kvplugin.replay.settings import FORMATS
from kvplugin.replay.trace import Trace, TraceError

__all__ = ["READERS", "detect_format", "read_trace"]

_Reader = Callable[[Path, int | None, int | None], Trace]

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
        limit: read no more requests than these; None takes all. Lines behind them are
            not looked at, except in our own format, which is sorted by time.

    Raises:
        ConfigError: there is no such format, or a number is below 1.
        TraceError: the file cannot be read, or is not of the format; names the line.
    """
    path = Path(path)
    for name, value in (("block_size", block_size), ("limit", limit)):
        if value is not None:
            check_count(name, value, 1)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise TraceError(f"{path} is read more than once: save it to a file first")
    if format == "auto":
        format = detect_format(path)  # noqa: A001
    if format not in FORMATS:
        raise unknown_name("trace format", format, FORMATS, "format")
    trace = READERS[format](path, block_size, limit)
    if not trace.entries:
        raise TraceError(f"{path} has no requests")
    return trace


def detect_format(path: Path) -> str:
    """The format that the first line of a file has which is not blank.

    Raises:
        TraceError: the file cannot be read, is empty, or has none of the formats.
    """
    first = first_byte(path)
    if not first:
        raise TraceError(f"{path} is empty")
    if first not in (b"{", b"["):
        if first[0] >= 0x80:  # MessagePack's arrays and maps
            return "vllm-events"
        raise _nothing_known(path)
    number, line = next(numbered_lines(path))
    try:
        head = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}, line {number}: {error}") from error
    if isinstance(head, list):
        return "vllm-events"
    return _of_keys(path, head)


def _of_keys(path: Path, head: Mapping[str, Any]) -> str:
    if head.get("format") == FORMAT:
        return "kvplugin"
    if "hash_ids" in head:
        return "bailian" if "chat_id" in head else "mooncake"
    if "events" in head or head.get("type") in EVENT_TYPES:
        return "vllm-events"
    raise _nothing_known(path)


def _nothing_known(path: Path) -> TraceError:
    return TraceError(
        f"{path} has none of the known formats: {', '.join(FORMATS)}; name one to see "
        f"where it differs"
    )
