"""What connectors reference in the block pool of an engine."""

from collections import Counter
from collections.abc import Sequence

from kvplugin.block_pool import BlockPool


class EngineReferences:
    """`contract.EngineBlocks` over a pool."""

    def __init__(self, pool: BlockPool) -> None:
        self.held: Counter[int] = Counter()
        """References by block; 0 of one that had some."""
        self._pool = pool

    def acquire(self, ids: Sequence[int]) -> None:
        """See `contract.EngineBlocks`."""
        self._pool.touch(ids)
        self.held.update(ids)

    def release(self, ids: Sequence[int]) -> None:
        """See `contract.EngineBlocks`."""
        self._pool.free_blocks(ids)
        self.held.subtract(ids)

    def forget(self, ids: Sequence[int]) -> None:
        """See `contract.EngineBlocks`."""
        self._pool.evict_blocks(ids)
