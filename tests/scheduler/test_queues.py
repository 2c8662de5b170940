"""Queues of any length: in order, and nobody is looked for."""

from random import Random

import pytest

from kvplugin.request import Request
from kvplugin.scheduler import Entry
from kvplugin.scheduler.queues import make_queue


def entry(i: int, random: Random) -> Entry:
    priority, arrival = random.randrange(3), float(random.randrange(3))
    return Entry(Request(f"r{i}", [1], priority=priority, arrival_time=arrival), 1)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(20))
def test_order(policy: str, seed: int) -> None:
    """Against a list that is sorted anew each time; who comes back is before its
    equals."""
    random, queue = Random(seed), make_queue(policy)
    expected: list[Entry] = []
    gone = [entry(i, random) for i in range(30)]
    for _ in range(300):
        if expected and random.random() < 0.45:
            gone.append(expected.pop(random.randrange(len(expected))))
            queue.remove(gone[-1])
        elif gone:
            one = gone.pop(random.randrange(len(gone)))
            if random.random() < 0.5:
                queue.add(one)
                expected.append(one)
            else:
                queue.put_back(one)
                expected.insert(0, one)
        if policy == "priority":
            expected.sort(key=lambda e: e.rank)
        assert list(queue) == expected
        assert len(queue) == len(expected)


class Counted(Entry):
    """Counts how often entries are compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return self is other

    __hash__ = object.__hash__


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_leaving_takes_no_search(policy: str) -> None:
    queue = make_queue(policy)
    entries = [Counted(Request(f"r{i}", [1]), 1) for i in range(2000)]
    for one in entries:
        queue.add(one)
    Counted.compared = 0
    for one in reversed(entries):
        queue.remove(one)
    assert Counted.compared < 4 * len(entries)
    assert not len(queue)
