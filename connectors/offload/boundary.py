"""One boundary for all groups: how many tokens the blocks that are there make up."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvplugin.connectors.offload.chunks import Chunking, alignment
from kvplugin.spec import cdiv

Holds: TypeAlias = Callable[[Chunking, int], bool]
"""Whether the chunk of this number is there."""


class Boundaries:
    """Finds the largest boundary for which every group has what it needs.

    With T tokens credited beyond a local hit of L, a group needs the blocks that
    `Coverage.first` says, up to T; one with layers of a drafter also the block behind
    T, as the drafter's last entry before T depends on the token at T. What a boundary
    needs, larger ones up to a missing block need as well: so dense groups are asked
    upwards, once, and then the others downwards until all agree. No block is asked for
    that no boundary in question needs, and none of a group that is not dense twice.

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

    def served(self, cut: Chunking, end: int) -> int:
        """The largest boundary for which a group has all that it needs, if everything
        of it is there that ends at token `end` or before."""
        return max(self.floor(end // cut.tokens * cut.tokens - behind(cut)), 0)

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
        tails = [_Tail(cut) for cut in self._sparse]
        before = -1
        while end != before and end > local:
            before = end
            for tail in tails:
                if end > local:
                    end = self.floor(tail.end(local, end, holds))
        return max(end, local)


def behind(cut: Chunking) -> int:
    """Tokens behind a boundary that it needs of a group too."""
    return cut.group.block_size * cut.group.has_drafter


def needed(cut: Chunking, boundary: int) -> range:
    """Numbers of the chunks of a group that `boundary` needs without a local hit."""
    first = cut.coverage.first(0, boundary) // cut.blocks
    return range(first, cdiv(boundary + behind(cut), cut.tokens) if boundary else 0)


def _prefix_end(cut: Chunking, local: int, end: int, holds: Holds) -> int:
    last = cdiv(end + behind(cut), cut.tokens)
    for number in range(local // cut.tokens, last):
        if not holds(cut, number):
            return min(end, number * cut.tokens - behind(cut))
    return end


class _Tail:
    """What is known of a group that is not dense, while boundaries fall."""

    def __init__(self, cut: Chunking) -> None:
        self._cut = cut
        self._asked: int | None = None
        """All blocks from this one on that a boundary can still need are there."""

    def end(self, local: int, end: int, holds: Holds) -> int:
        """The highest boundary up to `end`, which never rises, that the first missing
        block below it allows."""
        cut = self._cut
        size = cut.group.block_size
        top = (end + behind(cut)) // size
        asked = top if self._asked is None else min(top, self._asked)
        first = cut.coverage.first(local, end)
        for block in range(asked - 1, first - 1, -1):
            if not holds(cut, block):
                self._asked = block
                return block * size - behind(cut)
        self._asked = min(asked, first)
        return end
