"""Whole traces into files of our own format."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from kvplugin.errors import ConfigError
from kvplugin.replay.record import TraceWriter
from kvplugin.replay.trace import Trace, TraceEntry


def write_entries(
    path: str | Path, entries: Iterable[TraceEntry], block_size: int
) -> None:
    """Write entries whose ids name full blocks, gzipped if the name ends in ``.gz``.

    The file appears, or is replaced, when all is written.

    Raises:
        OSError: the file cannot be written.
        ConfigError: an entry cannot be; says which.
    """
    with (
        _replacing(Path(path)) as file,
        TraceWriter(file, block_size=block_size) as writer,
    ):
        for number, entry in enumerate(entries, 1):
            try:
                _write(writer, entry)
            except ConfigError as error:
                raise ConfigError(f"request {number}: {error}") from error


def full_blocks(trace: Trace) -> Iterator[TraceEntry]:
    """Entries whose ids name full blocks: partial ones at the end are left out."""
    for entry in trace.entries:
        if trace.full_blocks_only:
            yield entry
        else:
            full = entry.input_length // trace.block_size
            yield replace(entry, ids=entry.ids[:full])


def in_order(entries: Iterable[TraceEntry]) -> Iterator[TraceEntry]:
    """Entries with clocks that do not go back: what our format is sorted by."""
    latest = float("-inf")
    for entry in entries:
        if entry.timestamp < latest:
            yield replace(entry, timestamp=latest)
        else:
            latest = entry.timestamp
            yield entry


def times_going_back(trace: Trace) -> int:
    """Entries that `in_order` changes."""
    pairs = zip(trace.entries, in_order(trace.entries), strict=True)
    return sum(one is not other for one, other in pairs)


def _write(writer: TraceWriter, entry: TraceEntry) -> None:
    writer.write(
        timestamp=entry.timestamp,
        input_length=entry.input_length,
        output_length=entry.output_length,
        block_hashes=entry.ids,
        session=entry.session,
        turn=entry.turn,
        priority=entry.priority,
        ttl_s=entry.ttl_s,
        ends_session=entry.ends_session,
        cached_tokens=entry.cached_tokens,
    )


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file to write, which then takes the place of `path`."""
    path = path.resolve()  # a link stays one
    if path.exists() and not path.is_file():
        yield path  # a pipe or a device: nothing to replace
        return
    written = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        yield written
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)
