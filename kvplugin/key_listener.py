"""KeyListener: who wants to know which keys a pool gains and loses."""

from collections.abc import Sequence
from typing import Protocol

from kvplugin.request import RequestLike


class KeyListener(Protocol):
    """Told in batches, after the fact, in the thread of the caller; must not raise."""

    def keys_given(
        self,
        request: RequestLike,
        group: int,
        block_size: int,
        start: int,
        hashes: Sequence[bytes],
        given: Sequence[int],
        parent: bytes | None,
    ) -> None:
        """Blocks of a request can now be hit.

        Args:
            request: whose blocks they are.
            group: number of the group.
            block_size: tokens of a block.
            start: index in the request of the block that `hashes[0]` names.
            hashes: hashes of consecutive blocks.
            given: positions in `hashes` of the blocks that were given a key.
            parent: hash of the block before `start`, None at the start.
        """

    def keys_lost(self, keys: Sequence[tuple[int, bytes]]) -> None:
        """No block is left under these (group, hash): evicted, or taken out."""

    def all_keys_lost(self) -> None:
        """Every key is gone at once: the cache was reset."""
