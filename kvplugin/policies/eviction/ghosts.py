"""Keys of blocks that were evicted: what a policy remembers of its own mistakes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator


class Ghosts:
    """A queue of keys, each once, oldest first. O(1) a key."""

    def __init__(self) -> None:
        # A plain dict walks over what was deleted before it finds its first key.
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def add(self, keys: Iterable[bytes]) -> None:
        """Append keys; one that is there keeps its place."""
        for key in keys:
            self._keys[key] = None

    def discard(self, key: bytes) -> bool:
        """Take a key out; whether it was there."""
        if key in self._keys:
            del self._keys[key]
            return True
        return False

    def shrink(self, most: int) -> None:
        """Drop the oldest keys beyond `most`; all of them if it is 0 or negative."""
        while len(self._keys) > max(most, 0):
            self._keys.popitem(last=False)

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)
