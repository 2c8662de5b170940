"""A set of blocks that gives away the least one."""

import random

import pytest

from kvplugin.policies.eviction.ranked_set import RankedSet


def test_it_is_a_set_sorted_by_ranks_that_change() -> None:
    chance = random.Random(1)
    ranked, ranks = RankedSet(), {}
    for _ in range(3000):
        block = chance.randrange(30)
        match chance.randrange(5):
            case 0:
                assert ranked.discard(block) == ranks.pop(block, None)
            case 1 if ranks:
                least = min((rank, block) for block, rank in ranks.items())
                assert ranked.first() == ranked.pop() == least
                del ranks[least[1]]
            case _:
                ranks[block] = (chance.randrange(9), chance.random())
                ranked.put(block, ranks[block])
        assert len(ranked) == len(ranks)
        assert (block in ranked) == (block in ranks)
    assert list(ranked) == sorted(ranks, key=ranks.__getitem__)
    ranked.check()


def test_old_ranks_are_not_kept() -> None:
    ranked = RankedSet()
    for i in range(5000):
        ranked.put(i % 3, (i,))
    assert len(ranked._heap) < 1100
    assert [ranked.pop() for _ in range(3)] == [
        ((i,), i % 3) for i in (4997, 4998, 4999)
    ]


def test_nothing_can_be_taken_from_an_empty_one() -> None:
    ranked = RankedSet()
    ranked.put(1, (1,))
    ranked.discard(1)
    with pytest.raises(IndexError):
        ranked.pop()
    with pytest.raises(IndexError):
        ranked.first()
    with pytest.raises(KeyError):
        ranked.rank_of(1)
