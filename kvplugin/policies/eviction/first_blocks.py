"""The one block of each key that counts."""

from itertools import chain

from kvplugin.errors import IntegrityError


class FirstBlocks:
    """Keys of blocks, and of each key the block that was given it first.

    Requests that compute one prefix at the same time leave several blocks under one
    key; a pool answers with the first one, and the others are of no use before it is
    gone.
    """

    def __init__(self) -> None:
        self._keys: dict[int, bytes] = {}
        self._first: dict[bytes, int] = {}
        self._others: dict[bytes, list[int]] = {}
        """Of keys with several blocks, all but the first."""

    def add(self, block: int, key: bytes) -> None:
        """The block was given a key."""
        self._keys[block] = key
        if self._first.setdefault(key, block) != block:
            self._others.setdefault(key, []).append(block)

    def remove(self, block: int) -> int | None:
        """The block lost its key.

        Returns:
            The block that is now the first one of the key in its place, if any.
        """
        key = self._keys.pop(block)
        others = self._others.get(key, [])
        heir = None
        if self._first[key] != block:
            others.remove(block)
        elif others:
            heir = self._first[key] = others.pop(0)
        else:
            del self._first[key]
        if not others:
            self._others.pop(key, None)
        return heir

    def key_of_first(self, block: int) -> bytes | None:
        """Key of the block, None unless it is the first one of that key."""
        key = self._keys[block]
        return key if self._first[key] == block else None

    def get(self, key: bytes) -> int | None:
        """The first block of the key."""
        return self._first.get(key)

    def check(self) -> None:
        """Raise `IntegrityError` if blocks and keys do not belong together."""
        listed = [*self._first.values(), *chain(*self._others.values())]
        if sorted(listed) != sorted(self._keys):
            raise IntegrityError("blocks of keys differ from keys of blocks")
