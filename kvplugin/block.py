"""KVCacheBlock: one block as an object, for those who read objects."""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvplugin.block_pool import BlockPool

NULL_BLOCK: Final = 0
"""Id of the placeholder block: never free, never keyed, never counted."""


class KVCacheBlock:
    """A view of one block of a pool: it holds no state, every read asks the pool.

    The attributes are those of vLLM's class of this name, so that code written for
    it (connectors above all) reads ours. `BlockPool.block` makes one a block, once.
    """

    __slots__ = ("_pool", "block_id")

    def __init__(self, pool: "BlockPool", block_id: int) -> None:
        self._pool = pool
        self.block_id = block_id

    @property
    def block_hash(self) -> bytes | None:
        """Key of the block (hash and group number), None while it has none."""
        return self._pool.key_of(self.block_id)

    @property
    def ref_cnt(self) -> int:
        """References to the block."""
        return self._pool.ref_count(self.block_id)

    @property
    def is_null(self) -> bool:
        """Whether this is the placeholder block."""
        return self.block_id == NULL_BLOCK

    def __repr__(self) -> str:
        return (
            f"KVCacheBlock(block_id={self.block_id}, ref_cnt={self.ref_cnt}, "
            f"block_hash={self.block_hash!r}, is_null={self.is_null})"
        )
