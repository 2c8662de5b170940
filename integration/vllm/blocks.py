"""References to blocks of vLLM's own pool, for connectors."""

from collections.abc import Sequence
from typing import Any


class VllmBlocks:
    """Implements `kvplugin.contract.EngineBlocks` over vLLM's `BlockPool`."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def acquire(self, ids: Sequence[int]) -> None:
        blocks = self._pool.blocks
        self._pool.touch([blocks[block] for block in ids])

    def release(self, ids: Sequence[int]) -> None:
        blocks = self._pool.blocks
        self._pool.free_blocks([blocks[block] for block in ids])

    def forget(self, ids: Sequence[int]) -> None:
        self._pool.evict_blocks(set(ids))
