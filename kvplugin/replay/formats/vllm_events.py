"""KV events of vLLM as a trace: what can be told of requests from what they stored.

Batches are MessagePack objects one after another, as vLLM's ZMQ publisher sends them
(`EventBatch` of `vllm/distributed/kv_events.py`, 0.32: ``[ts, events, rank]``), or JSON
lines of batches or of single events. Events are maps with a ``type``, or arrays with it
in front (before vLLM 0.20).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path
from typing import Any, Final

import msgpack
import msgspec

from kvplugin.events import MEDIUM_GPU
from kvplugin.replay.formats.lines import (
    MAX_LINE_BYTES,
    first_byte,
    numbered_lines,
    opened,
)
from kvplugin.replay.trace import Trace, TraceEntry, TraceError

CONTINUES_WITHIN_S: Final = 1.0
"""A run of blocks behind the last block that a request stored belongs to the same
request (its prefill in chunks, its answer) if it comes so soon, in seconds."""

EVENT_TYPES: Final = ("BlockStored", "BlockRemoved", "AllBlocksCleared")

NOTES: Final = (
    "KV events: a run of stored blocks is a request that looked up the chain before it "
    "and computed the run; a run behind a request's last block within "
    f"{CONTINUES_WITHIN_S:g} s is the same request",
    "KV events: requests that stored nothing (full hits) are invisible, so real hit "
    "rates are higher; removals are the recorded policy's and passed over; after a "
    "reset nothing from before hits",
    "KV events: group 0 of the device only; tokens that fill no block are unknown",
)

_STORED_FIELDS: Final = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
    "lora_name", "extra_keys", "group_idx",
)  # fmt: skip


class Stored(msgspec.Struct, frozen=True):
    """Keys of `BlockStored` that are read."""

    block_hashes: tuple[int | bytes, ...]
    """Bytes where vLLM was told to publish whole hashes; base64 in JSON."""
    parent_block_hash: int | bytes | None
    block_size: int
    medium: str | None = None
    group_idx: int | None = None
    session_id: str | None = None


@dataclass
class _Run:
    """A request as it is pieced together."""

    timestamp: float
    last_time: float
    ids: list[int | str]
    session: str | None
    is_wanted: bool


@dataclass
class _Requests:
    """Pieces together what events tell."""

    block_size: int | None = None
    runs: list[_Run] = field(default_factory=list)
    epoch: int = 0
    parents: dict[int | str, int | str | None] = field(default_factory=dict)
    open: dict[int | str, _Run] = field(default_factory=dict)
    """By the last block that they stored."""
    limit: int | None = None
    """Requests that are wanted."""
    wanted_until: float = -inf
    """Until when one of them may go on."""

    def has_enough(self, now: float) -> bool:
        """Whether what is wanted is complete."""
        enough = self.limit is not None and len(self.runs) >= self.limit
        return enough and now > self.wanted_until

    def clear(self) -> None:
        """The cache was reset: names of blocks are new from now on."""
        self.epoch += 1
        self.parents.clear()
        self.open.clear()

    def store(self, now: float, event: Stored) -> None:
        """Blocks were computed."""
        ids = [self._name(block_hash) for block_hash in event.block_hashes]
        if event.group_idx or event.medium not in (None, MEDIUM_GPU) or not ids:
            return
        if self.block_size is None:
            self.block_size = event.block_size
        if event.block_size != self.block_size or event.block_size < 1:
            raise ValueError(f"a block of {event.block_size} tokens among others")
        parent = event.parent_block_hash
        before = None if parent is None else self._name(parent)
        run = self.open.pop(before, None) if before is not None else None
        if run is None or now - run.last_time > CONTINUES_WITHIN_S:
            wanted = self.limit is None or len(self.runs) < self.limit
            run = _Run(now, now, self._chain(before), event.session_id, wanted)
            self.runs.append(run)
        for block in ids:
            self.parents[block], before = before, block
        run.ids += ids
        run.last_time = now
        if run.is_wanted:
            self.wanted_until = max(self.wanted_until, now + CONTINUES_WITHIN_S)
        self.open[ids[-1]] = run

    def _name(self, block_hash: int | bytes) -> int | str:
        name = block_hash.hex() if isinstance(block_hash, bytes) else block_hash
        return f"{self.epoch}/{name}" if self.epoch else name

    def _chain(self, last: int | str | None) -> list[int | str]:
        """Blocks from the start to `last`, as far back as they are known."""
        chain: list[int | str] = []
        seen = set()
        while last is not None and last not in seen:
            seen.add(last)
            chain.append(last)
            last = self.parents.get(last)
        return chain[::-1]


def read_vllm_events(path: Path, block_size: int | None, limit: int | None) -> Trace:
    """Requests pieced together from KV events; see `NOTES` for the rules.

    Args:
        path: MessagePack batches, or JSON lines.
        block_size: None, or what the events say.
        limit: so many requests; reading ends when none of them can go on.

    Raises:
        TraceError: naming the line, or the batch, that is wrong.
    """
    requests = _Requests(limit=limit)
    for place, message in _messages(path):
        try:
            now, events = _events(message)
            if requests.has_enough(now):
                break
            for event in events:
                _take(requests, now, event)
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            raise TraceError(f"{path}, {place}: {error}") from error
    size = requests.block_size or block_size
    if size is None:
        raise TraceError(f"{path} stores no block of group 0 on the device")
    if block_size not in (None, size):
        raise TraceError(f"{path} has blocks of {size} tokens, not of {block_size}")
    entries = tuple(
        TraceEntry(run.timestamp, len(run.ids) * size, 0, tuple(run.ids), run.session)
        for run in requests.runs[:limit]
    )
    return Trace(path.name, "vllm-events", size, entries, True, NOTES)


def _messages(path: Path) -> Iterator[tuple[str, Any]]:
    """Batches or events with the words for their place."""
    if first_byte(path) in (b"{", b"["):
        for number, line in numbered_lines(path):
            try:
                yield f"line {number}", json.loads(line, parse_constant=_no_number)
            except (ValueError, RecursionError) as error:
                raise TraceError(f"{path}, line {number}: {error}") from error
        return
    with opened(path) as file:
        unpacker = msgpack.Unpacker(
            file, max_buffer_size=MAX_LINE_BYTES, strict_map_key=False
        )
        number = end = 0
        while True:
            number += 1
            try:
                message = unpacker.unpack()
            except msgpack.OutOfData:
                if end < file.tell():
                    raise TraceError(f"{path}, batch {number}: cut off") from None
                return
            except (ValueError, TypeError, msgpack.UnpackException) as error:
                # TypeError: a map whose key is a map or an array.
                raise TraceError(f"{path}, batch {number}: {error!r}") from error
            end = unpacker.tell()
            yield f"batch {number}", message


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _events(message: Any) -> tuple[float, list[Any]]:
    """Time in seconds and events of a batch; a single event in an array has time 0."""
    if isinstance(message, Mapping):
        now, events = message.get("ts", 0.0), message.get("events", [message])
    elif isinstance(message, Sequence) and message and message[0] in EVENT_TYPES:
        now, events = 0.0, [message]
    elif isinstance(message, Sequence) and len(message) >= 2:
        now, events = message[0], message[1]
    else:
        raise ValueError("neither a batch of KV events nor an event")
    now = msgspec.convert(now, float)
    if not isfinite(now):
        raise ValueError(f"time {now} is no number")
    return now, msgspec.convert(events, list[Any])


def _take(requests: _Requests, now: float, event: Any) -> None:
    kind, fields = _opened(event)
    if kind == "BlockStored":
        requests.store(now, msgspec.convert(fields, Stored))
    elif kind == "AllBlocksCleared":
        requests.clear()
    elif kind != "BlockRemoved":
        raise ValueError(f"{kind!r} is none of {', '.join(EVENT_TYPES)}")


def _opened(event: Any) -> tuple[Any, Mapping[Any, Any]]:
    """Type and fields of an event in either form."""
    if isinstance(event, Mapping):
        return event.get("type"), event
    if isinstance(event, Sequence) and not isinstance(event, str | bytes) and event:
        return event[0], dict(zip(_STORED_FIELDS, event[1:], strict=False))
    raise ValueError("an event is neither a map nor an array")
