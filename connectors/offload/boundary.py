"""One boundary for all groups: how many tokens the blocks that are there make up."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvplugin.connectors.offload.chunks import Chunking, alignment

Holds: TypeAlias = Callable[[Chunking, int], bool]
"""Whether the chunk of this number is there."""


class Boundaries:
    """Finds the largest boundary for which every group has what it needs.

    With T tokens credited beyond a local hit of L, a group needs the blocks that
    `Coverage.first` says, up to T; one with layers of a drafter also the block behind
    T, as the drafter's last entry before T depends on the token at T. What a boundary
    needs, larger ones up to a missing block need as well: so dense groups are asked
    upwards, once, and then the others downwards until all agree. No block is asked for
    that no boundary in question needs.

    Args:
        cuts: the groups that count.
    """

    def __init__(self, cuts: Sequence[Chunking]) -> None:
        self.unit = alignment(cuts)
        """Tokens that every boundary is a multiple of."""
        self._dense = [cut for cut in cuts if cut.coverage.dense]
        self._sparse = [cut for cut in cuts if not cut.coverage.dense]

    def floor(self, tokens: int) -> int:
        """`tokens`, rounded down to a possible boundary."""
        return tokens // self.unit * self.unit

    def largest(self, local: int, limit: int, holds: Holds) -> int:
        """The largest boundary, from `local` (for none at all) to `limit`.

        Args:
            local: tokens of the local hit, a possible boundary.
            limit: tokens that may be credited at most.
            holds: what is there.
        """
        end = self.floor(limit)
        for cut in self._dense:
            if end <= local:
                return local
            end = self.floor(_prefix_end(cut, local, end, holds))
        before = -1
        while end != before and end > local:
            before = end
            for cut in self._sparse:
                if end > local:
                    end = self.floor(_tail_end(cut, local, end, holds))
        return max(end, local)


def _prefix_end(cut: Chunking, local: int, end: int, holds: Holds) -> int:
    behind = cut.group.block_size * cut.group.has_drafter
    for number in range(local // cut.tokens, -(-(end + behind) // cut.tokens)):
        if not holds(cut, number):
            return min(end, number * cut.tokens - behind)
    return end


def _tail_end(cut: Chunking, local: int, end: int, holds: Holds) -> int:
    size, behind = cut.group.block_size, int(cut.group.has_drafter)
    first = cut.coverage.first(local, end)
    for block in range(end // size + behind - 1, first - 1, -1):
        if not holds(cut, block):
            return (block - behind) * size
    return end
