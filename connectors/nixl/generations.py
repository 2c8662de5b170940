"""Generations: how a reader notices that a block was given to somebody else.

Each block of the pool has one, an int64 that only grows. It changes when the last
lease that names the block ends, before the engine may use the block for anything else.
A reader is told the generations of the blocks it may read; after the bytes have
arrived it reads the producer's array, and what differs by then is discarded.

The scheduler half keeps `Generations`, each worker half a registered array of int64
with one entry a block. The array starts with `FIRST` in all entries but the null
block's, entry 0, which holds the process's own random number (its incarnation,
positive) and never changes. From then on it follows the plans
(`kvplugin.connectors.nixl.messages.Plan`).
"""

from array import array
from collections.abc import Iterable
from typing import Final

FIRST: Final = 0
"""Of every block when the engine starts."""


class Generations:
    """What the workers' arrays hold once they have executed every plan.

    Args:
        num_blocks: of the pool, the null block included.
    """

    def __init__(self, num_blocks: int) -> None:
        self._generations = array("q", [FIRST]) * num_blocks

    def of(self, ids: Iterable[int]) -> list[int]:
        """Of each of these blocks; that of the null block says nothing."""
        generations = self._generations
        return [generations[block] for block in ids]

    def advance(self, ids: Iterable[int]) -> list[tuple[int, int]]:
        """Let what was read of these blocks until now be discarded: each of them with
        its generation from now on."""
        generations = self._generations
        changes = []
        for block in ids:
            generations[block] += 1
            changes.append((block, generations[block]))
        return changes
