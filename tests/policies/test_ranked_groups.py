"""Blocks in groups that rise: the block of least rank, without a look at the others."""

import random
from collections.abc import Hashable

import pytest

from kvplugin.policies.eviction.ranked_groups import RankedGroups
from kvplugin.policies.eviction.ranked_set import Rank


class Worths:
    """What groups are worth, and how often somebody asks."""

    def __init__(self, names: str) -> None:
        self.of = dict.fromkeys(names, 0)
        self.asked = 0

    def __call__(self, group: Hashable) -> Rank:
        self.asked += 1
        return (self.of[str(group)],)


def test_the_least_block_of_the_least_group_goes_whatever_rises() -> None:
    chance = random.Random(1)
    worths = Worths("abcd")
    blocks = RankedGroups(worths)
    places: dict[int, tuple[str, Rank]] = {}

    def rank_of(block: int) -> Rank:
        group, rank = places[block]
        return (worths.of[group], *rank)

    for _ in range(3000):
        block = chance.randrange(30)
        match chance.randrange(5):
            case 0:
                place = places.pop(block, None)
                assert blocks.discard(block) == (place and place[1])
            case 1 if places:
                least = min(places, key=rank_of)
                assert blocks.pop() == least
                del places[least]
            case 2:
                worths.of[chance.choice("abcd")] += chance.randrange(3)
            case _ if block not in places:
                places[block] = chance.choice("abcd"), (chance.random(),)
                blocks.put(block, *places[block])
        assert len(blocks) == len(places)
        blocks.check()
    assert sorted(blocks) == sorted(places)
    assert sorted(blocks.ranks()) == sorted((rank_of(b), b) for b in places)


def test_a_group_that_rises_is_moved_as_a_whole() -> None:
    worths = Worths("ab")
    blocks = RankedGroups(worths)
    for block in range(1000):
        blocks.put(block, "ab"[block % 2], (block,))
    worths.asked = 0
    for rises in range(100):
        worths.of["a"] += 1
        assert blocks.pop() == 2 * rises + 1
    assert worths.asked < 500


def test_empty_groups_are_not_kept() -> None:
    blocks = RankedGroups(Worths("abc"))
    for block, group in enumerate("abc"):
        blocks.put(block, group, (0,))
    assert [blocks.discard(0), blocks.pop(), blocks.pop()] == [(0,), 1, 2]
    assert not blocks._groups
    assert not blocks._numbers
    with pytest.raises(IndexError):
        blocks.pop()
