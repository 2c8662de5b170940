"""A block pool as one would write it without a thought for speed: the model.

Blocks are in sets and lists by state, every question is answered by looking through
them, and nothing is shared with the code under test, not even arithmetic on keys.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """A block that carries a key."""

    block: int
    key: bytes
    parent: bytes | None
    depth: int


@dataclass
class NaivePool:
    """Blocks 1 to num_blocks-1; whoever drives it knows of the null block."""

    num_blocks: int
    used: Counter[int] = field(default_factory=Counter)
    """References of the blocks in use."""
    entries: list[Entry] = field(default_factory=list)
    """In order of insertion."""
    stack: list[int] = field(default_factory=list)
    """Free blocks without a key, next one last."""
    recency: list[int] = field(default_factory=list)
    """Free blocks with a key, the one released first, first."""

    def __post_init__(self) -> None:
        self.stack = list(range(self.num_blocks - 1, 0, -1))

    @property
    def free(self) -> int:
        return len(self.stack) + len(self.recency)

    @property
    def keyed(self) -> set[int]:
        return {entry.block for entry in self.entries}

    def get(self, key: bytes) -> int | None:
        return next((e.block for e in self.entries if e.key == key), None)

    def take(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if block in self.recency:
                self.recency.remove(block)
                self._lose_keys({block})
            else:
                assert block == self.stack.pop()
            self.used[block] = 1

    def insert(self, entries: Iterable[Entry]) -> None:
        self.entries += entries

    def touch(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block in self.recency:
                self.recency.remove(block)
            self.used[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        idle = []
        for block in blocks:
            self.used[block] -= 1
            if not self.used[block]:
                del self.used[block]
                idle.append(block)
        keyed = self.keyed
        self.recency += [block for block in idle if block in keyed]
        self.stack += [block for block in reversed(idle) if block not in keyed]

    def evict(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block in self.recency:
                self.recency.remove(block)
                self.stack.append(block)
            self._lose_keys({block})

    def drop_all_keys(self) -> None:
        self.stack += sorted(self.recency)
        self.recency.clear()
        self.entries.clear()

    def _lose_keys(self, blocks: set[int]) -> None:
        self.entries = [e for e in self.entries if e.block not in blocks]
