"""Traces for tests, and a cache simulated in the plainest way."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvplugin.replay import Trace, TraceEntry

DATA = Path(__file__).parent.parent / "data" / "traces"
CONVERSATION = DATA / "conversation_trace.jsonl.gz"
SYNTHETIC = DATA / "synthetic_trace.jsonl.gz"


def make_trace(
    requests: Sequence[Sequence[int]], block_size: int = 16, **more: object
) -> Trace:
    """A trace of whole blocks, a request a second."""
    entries = tuple(
        TraceEntry(float(i), len(ids) * block_size, 0, tuple(ids), **more)
        for i, ids in enumerate(requests)
    )
    return Trace("made", "mooncake", block_size, entries)


@dataclass
class NaiveLRU:
    """Least recently used, of prefixes, one list for all that can be evicted.

    Blocks of a request are released with its tail first, or with its head first and
    touched one by one, as simulators of independent keys do.
    """

    capacity: int
    running_limit: int = 0
    idle: dict[tuple[int, ...], None] = field(default_factory=dict)
    used: dict[tuple[int, ...], int] = field(default_factory=dict)
    running: list[list[tuple[int, ...]]] = field(default_factory=list)

    def serve(self, ids: Sequence[int]) -> int | None:
        """Blocks hit, None if the request does not fit."""
        keys = [tuple(ids[: i + 1]) for i in range(len(ids))]
        if len(keys) > self.capacity:
            return None
        hits = 0
        while hits < len(keys) and (keys[hits] in self.idle or keys[hits] in self.used):
            hits += 1
        while self._needed(keys, hits) > self.capacity - len(self.used):
            self._finish()
        for key in keys[:hits]:
            self.idle.pop(key, None)
            self.used[key] = self.used.get(key, 0) + 1
        for key in keys[hits:]:
            if len(self.idle) + len(self.used) >= self.capacity:
                del self.idle[next(iter(self.idle))]
            self.used[key] = 1
        self.running.append(keys)
        while len(self.running) > self.running_limit:
            self._finish()
        return hits

    def _needed(self, keys: list[tuple[int, ...]], hits: int) -> int:
        return len(keys) - hits + sum(key in self.idle for key in keys[:hits])

    def _finish(self) -> None:
        for key in reversed(self.running.pop(0)):
            self.used[key] -= 1
            if not self.used[key]:
                del self.used[key]
                self.idle[key] = None


def published_lru(requests: Sequence[Sequence[int]], capacity: int) -> float:
    """Share of blocks hit by LRU over ids one after another, head first, where a block
    hits only behind hits: the rules of the numbers that are published with the
    traces."""
    cache: dict[int, None] = {}
    hits = total = 0
    for ids in requests:
        chained = True
        for block in ids:
            total += 1
            if block in cache:
                del cache[block]
                hits += chained
            else:
                chained = False
                if len(cache) >= capacity:
                    del cache[next(iter(cache))]
            cache[block] = None
    return hits / total
