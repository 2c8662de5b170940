"""KVCacheBlocks: what a scheduler holds of a request's blocks."""

from collections.abc import Sequence
from typing import Literal, overload

from kvplugin.block import NULL_BLOCK, KVCacheBlock
from kvplugin.block_pool import BlockPool
from kvplugin.errors import IntegrityError


class KVCacheBlocks:
    """Block ids of a request, the group in the outer tuple.

    Holds ids; `blocks` shows them as objects (`KVCacheBlock`) to those who ask. Groups
    may have different lengths, null blocks included.

    Args:
        pool: whose blocks they are.
        ids: a sequence a group; not copied, not changed.
    """

    __slots__ = ("_pool", "ids")

    def __init__(self, pool: BlockPool, ids: tuple[Sequence[int], ...]) -> None:
        self._pool = pool
        self.ids = ids

    @property
    def blocks(self) -> tuple[Sequence[KVCacheBlock], ...]:
        """The blocks as objects, one and the same object for each id."""
        view = self._pool.block
        return tuple([view(block) for block in group] for group in self.ids)

    def __add__(self, other: "KVCacheBlocks") -> "KVCacheBlocks":
        """The blocks of both, group by group."""
        pairs = zip(self.ids, other.ids, strict=True)
        return KVCacheBlocks(self._pool, tuple([*a, *b] for a, b in pairs))

    @overload
    def get_block_ids(
        self, allow_none: Literal[False] = ...
    ) -> tuple[list[int], ...]: ...

    @overload
    def get_block_ids(self, allow_none: bool) -> tuple[list[int], ...] | None: ...

    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        """A new list of ids a group; None if allowed and no group has any."""
        if allow_none and not any(self.ids):
            return None
        return tuple(map(list, self.ids))

    def get_unhashed_block_ids(self) -> list[int]:
        """Blocks without a key.

        Raises:
            IntegrityError: there is not exactly one group.
        """
        if len(self.ids) != 1:
            raise IntegrityError(
                f"get_unhashed_block_ids is for one group, there are {len(self.ids)}: "
                f"use get_unhashed_block_ids_all_groups"
            )
        return [block for block in self.ids[0] if self._pool.key_of(block) is None]

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """Blocks without a key, a list a group, null blocks left out."""
        key_of = self._pool.key_of
        return [
            [b for b in group if b != NULL_BLOCK and key_of(b) is None]
            for group in self.ids
        ]

    def new_empty(self) -> "KVCacheBlocks":
        """No blocks, for as many groups."""
        return KVCacheBlocks(self._pool, tuple(() for _ in self.ids))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KVCacheBlocks):
            return NotImplemented
        return self._pool is other._pool and [*map(list, self.ids)] == [
            *map(list, other.ids)
        ]

    __hash__ = None  # type: ignore[assignment]  # lists inside, as in vLLM's dataclass

    def __repr__(self) -> str:
        return f"KVCacheBlocks({self.get_block_ids()})"
