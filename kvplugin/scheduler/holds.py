"""Blocks whose request has let go of them while somebody may still touch their bytes.

A step in flight may write them, a load may fill them, a connector may send them. They
keep one reference each until that has ended, so the pool cannot hand them out.
"""

from collections.abc import Iterator, Sequence

from kvplugin.block import NULL_BLOCK
from kvplugin.block_pool import BlockPool

Reason = tuple[str, str | int]
"""("step", its number), ("load", request id) or ("send", request id)."""


class Holds:
    """References by the reason for which they are held.

    Args:
        pool: the pool of the blocks.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._held: dict[Reason, list[int]] = {}

    def __len__(self) -> int:
        """Reasons for which blocks are held."""
        return len(self._held)

    @property
    def any_step(self) -> bool:
        """Whether blocks wait for a step in flight."""
        return any(kind == "step" for kind, _ in self._held)

    @property
    def blocks(self) -> Iterator[int]:
        """Held blocks, one entry a reference."""
        return (block for ids in self._held.values() for block in ids)

    def hold(self, reason: Reason, rows: Sequence[Sequence[int]]) -> None:
        """Keep the blocks of these rows, which are in use now, until `release`."""
        ids = [block for row in rows for block in reversed(row) if block != NULL_BLOCK]
        self._pool.touch(ids)
        self._held.setdefault(reason, []).extend(ids)

    def release(self, reason: Reason) -> None:
        """The reason is gone; without one nothing happens."""
        self._pool.free_blocks(self._held.pop(reason, []))
