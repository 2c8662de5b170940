"""Eviction policies for tests: a random one, one that takes notes, broken ones."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from kvplugin.policies.eviction import LRU, BlockContext


class RandomPolicy(LRU):
    """Any victim is as good as any other; the same ones for the same seed."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._random = Random(seed)

    def release(self, ids: Sequence[int]) -> None:
        queue = [*self.order(), *ids]
        self._random.shuffle(queue)
        super().forget(queue)
        super().release(queue)


class Recorder(LRU):
    """LRU that writes down what the pool tells it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def insert(self, ids: Sequence[int], ctx: BlockContext) -> None:
        self.calls.append(("insert", list(ids), ctx))

    def hit(self, ids: Sequence[int], ctx: BlockContext) -> None:
        self.calls.append(("hit", list(ids), ctx))

    def pin(self, ids: Sequence[int]) -> None:
        super().pin(ids)
        self.calls.append(("pin", list(ids)))

    def release(self, ids: Sequence[int]) -> None:
        super().release(ids)
        self.calls.append(("release", list(ids)))

    def forget(self, ids: Sequence[int]) -> None:
        super().forget(ids)
        self.calls.append(("forget", list(ids)))

    def victims(self, n: int) -> list[int]:
        chosen = super().victims(n)
        self.calls.append(("victims", chosen))
        return chosen


class Faulty(LRU):
    """LRU until its first fault; counts how often it was asked to do its worst."""

    faults = 0


class FaultyChoice(Faulty):
    """Its choice is impossible; `spoil` makes it so from a right one.

    The right one has left the evictable set by then: what was in it is lost unless
    the pool knows better.
    """

    def __init__(self, spoil: Callable[[list[int]], Any]) -> None:
        super().__init__()
        self._spoil = spoil

    def victims(self, n: int) -> list[int]:
        self.faults += 1
        return self._spoil(super().victims(n))


class FaultyCall(Faulty):
    """Raises in one of its methods, before or after doing the work."""

    def __init__(self, method: str, *, works_first: bool) -> None:
        super().__init__()
        work = getattr(self, method)

        def fail(*args: object) -> None:
            self.faults += 1
            if works_first:
                work(*args)
            raise RuntimeError(f"{method} does not work today")

        setattr(self, method, fail)


class ChoosesUsedBlock(Faulty):
    """Puts a block that came into use back into its choice."""

    def __init__(self) -> None:
        super().__init__()
        self._in_use: dict[int, None] = {}

    def pin(self, ids: Sequence[int]) -> None:
        super().pin(ids)
        self._in_use.update(dict.fromkeys(ids))

    def release(self, ids: Sequence[int]) -> None:
        super().release(ids)
        for block in ids:
            self._in_use.pop(block, None)

    def forget(self, ids: Sequence[int]) -> None:
        super().forget(ids)
        for block in ids:
            self._in_use.pop(block, None)

    def victims(self, n: int) -> list[int]:
        chosen = super().victims(n)
        if self._in_use:
            self.faults += 1
            chosen[-1] = next(iter(self._in_use))
        return chosen


def _raise(ids: list[int]) -> None:
    raise RuntimeError(f"{ids} do not please")


NUM_BLOCKS = 9
"""Of the pools in which these misbehave."""

FAULTY_POLICIES: dict[str, Callable[[], Faulty]] = {
    "chooses too few": lambda: FaultyChoice(lambda ids: ids[1:]),
    "chooses too many": lambda: FaultyChoice(lambda ids: [*ids, ids[0]]),
    "chooses a block twice": lambda: FaultyChoice(
        lambda ids: ids[:1] * max(2, len(ids))
    ),
    "chooses the null block": lambda: FaultyChoice(lambda ids: [0, *ids[1:]]),
    "chooses beyond the pool": lambda: FaultyChoice(lambda ids: [NUM_BLOCKS, *ids[1:]]),
    "chooses a negative id": lambda: FaultyChoice(lambda ids: [-1, *ids[1:]]),
    "chooses a used block": ChoosesUsedBlock,
    "chooses nothing": lambda: FaultyChoice(lambda ids: None),
    "chooses text": lambda: FaultyChoice(lambda ids: "x" * len(ids)),
    "raises in victims": lambda: FaultyChoice(_raise),
    "raises in insert": lambda: FaultyCall("insert", works_first=True),
    "raises in hit": lambda: FaultyCall("hit", works_first=True),
    "raises before it pins": lambda: FaultyCall("pin", works_first=False),
    "raises after it pins": lambda: FaultyCall("pin", works_first=True),
    "raises before it releases": lambda: FaultyCall("release", works_first=False),
    "raises after it releases": lambda: FaultyCall("release", works_first=True),
    "raises before it forgets": lambda: FaultyCall("forget", works_first=False),
    "raises after it forgets": lambda: FaultyCall("forget", works_first=True),
}
