"""Blocks in groups whose rank may rise at any time."""

from collections.abc import Callable, Hashable, Iterator
from itertools import count

from kvplugin.errors import IntegrityError
from kvplugin.policies.eviction.ranked_set import Rank, RankedSet


class RankedGroups:
    """A set of blocks that gives away the one of least rank, first by its group, then
    by itself. O(log n) a change, and as much for a group that rises: none of its blocks
    is looked at.

    Args:
        rank_of: rank of a group now; of a group with blocks it never falls. Whoever
            raises it need not say so.
    """

    def __init__(self, rank_of: Callable[[Hashable], Rank]) -> None:
        self._rank_of = rank_of
        self._numbers: dict[Hashable, int] = {}
        self._groups: dict[int, tuple[Hashable, RankedSet]] = {}
        """By number: what it is called, and its blocks."""
        self._number_of: dict[int, int] = {}
        """Of a block, the number of its group."""
        self._order = RankedSet()
        """Numbers of groups. Ranks are true or too low."""
        self._new_numbers = count()

    def put(self, block: int, group: Hashable, rank: Rank) -> None:
        """Add a block that is not there.

        Args:
            block: the block.
            group: its group, made if there is none.
            rank: among the blocks of the group.
        """
        number = self._numbers.get(group)
        if number is None:
            number = self._numbers[group] = next(self._new_numbers)
            self._groups[number] = group, RankedSet()
        blocks = self._groups[number][1]
        blocks.put(block, rank)
        self._number_of[block] = number
        if blocks.first()[1] == block:
            self._order.put(number, self._rank(number))

    def discard(self, block: int) -> Rank | None:
        """Take the block out.

        Returns:
            Its rank in its group, None if it was not there.
        """
        number = self._number_of.pop(block, None)
        if number is None:
            return None
        blocks = self._groups[number][1]
        rank = blocks.discard(block)
        if not blocks:
            self._order.discard(number)
            self._drop(number)
        return rank

    def pop(self) -> int:
        """Take out the block of least rank.

        Raises:
            IndexError: there is none.
        """
        while True:
            # Ranks are too low at most, so the first one that is true is the least.
            rank, number = self._order.pop()
            true = self._rank(number)
            if rank == true:
                break
            self._order.put(number, true)
        blocks = self._groups[number][1]
        block = blocks.pop()[1]
        del self._number_of[block]
        if blocks:
            self._order.put(number, self._rank(number))
        else:
            self._drop(number)
        return block

    def ranks(self) -> Iterator[tuple[Rank, int]]:
        """All blocks with their full rank, in no order."""
        for group, blocks in self._groups.values():
            of_group = self._rank_of(group)
            yield from ((of_group + blocks.rank_of(block), block) for block in blocks)

    def __iter__(self) -> Iterator[int]:
        """Blocks, in no order."""
        return iter(self._number_of)

    def __len__(self) -> int:
        return len(self._number_of)

    def check(self) -> None:
        """Raise `IntegrityError` if groups and blocks disagree."""
        self._order.check()
        if {*self._order} != {*self._groups} or len(self._numbers) != len(self._groups):
            raise IntegrityError("groups of blocks and their order disagree")
        for number, (group, blocks) in self._groups.items():
            blocks.check()
            if not blocks or self._numbers[group] != number:
                raise IntegrityError("a group of blocks is empty or has two numbers")
            if self._order.rank_of(number) > self._rank(number):
                raise IntegrityError("the rank of a group of blocks fell")
            if any(self._number_of.get(block) != number for block in blocks):
                raise IntegrityError("a block does not know its group")
        if len(self) != sum(len(blocks) for _, blocks in self._groups.values()):
            raise IntegrityError("grouped blocks are miscounted")

    def _rank(self, number: int) -> Rank:
        """Rank of the next block of a group."""
        group, blocks = self._groups[number]
        return self._rank_of(group) + blocks.first()[0]

    def _drop(self, number: int) -> None:
        del self._numbers[self._groups.pop(number)[0]]
