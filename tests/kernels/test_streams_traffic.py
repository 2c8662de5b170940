"""Random steps, stores and loads, completed in random orders: no race, right bytes.

The traffic keeps the caller's part of the contract of `CopyStreams` and no more.
Each mutation below breaks one rule of the streams, and random traffic finds it.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from kvplugin.kernels.streams import (
    CopyEnd,
    CopyHandle,
    CopyStreams,
    CopyWork,
    Direction,
    Keep,
)
from tests.kernels.fake_streams import (
    Buffer,
    FakeEvent,
    FakeStream,
    FakeStreams,
    LifetimeError,
    Place,
    RaceError,
)

LOAD, STORE = Direction
BLOCKS = 3
block = st.integers(0, BLOCKS - 1)
blocks = st.lists(block, unique=True, max_size=2)
pairs = st.lists(
    st.tuples(block, block),
    min_size=1,
    max_size=2,
    unique_by=(lambda p: p[0], lambda p: p[1]),
)
"""(device block, host block)"""
stream = st.integers(0, 2)
programs = st.lists(
    st.one_of(
        st.tuples(st.just("step"), blocks, blocks),
        st.tuples(st.just("store"), pairs, st.booleans()),
        st.tuples(st.just("load"), pairs, st.booleans()),
        st.tuples(st.just("run"), stream, st.integers(1, 4)),
        st.tuples(st.just("poll")),
    ),
    max_size=30,
)


class Traffic:
    """A scheduler's view of a device pool and a host pool."""

    def __init__(
        self,
        gpu: FakeStreams,
        copies: type[CopyStreams] = CopyStreams,
        *,
        keeps: bool = True,
    ) -> None:
        self.gpu = gpu
        self.copies = copies(gpu, in_flight=2)
        self.keeps = keeps
        self.mark: FakeEvent | None = None
        self.under_way: dict[CopyHandle, list[tuple[Place, Place, object]]] = {}
        self.values: dict[Place, object] = {}
        """What a place holds for whoever may read it; None: nothing of use."""
        self.steps = 0

    def play(self, program: Sequence[tuple[Any, ...]]) -> None:
        for name, *args in program:
            getattr(self, name)(*args)
            for race in self.gpu.races:  # copies take it for a failure of the work
                raise race
        self.finish()

    def step(self, written: Sequence[int], read: Sequence[int]) -> None:
        self.steps += 1
        writes = [("d", i) for i in written if not self._flies(("d", i))]
        reads = [("d", i) for i in read if ("d", i) not in self._targets()]
        values = [(place, (self.steps, place)) for place in writes]
        self.gpu.launch("step", writes=values, reads=reads)
        self.values.update(values)
        self.mark = None

    def store(self, ids: Sequence[tuple[int, int]], fails: bool) -> None:
        moves = [(("d", d), ("h", h)) for d, h in ids if not self._flies(("h", h))]
        moves = [(d, h) for d, h in moves if d not in self._targets()]
        self._submit(STORE, moves, fails)

    def load(self, ids: Sequence[tuple[int, int]], fails: bool) -> None:
        moves = [(("h", h), ("d", d)) for d, h in ids if not self._flies(("d", d))]
        moves = [(h, d) for h, d in moves if h not in self._targets()]
        self._submit(LOAD, moves, fails)

    def run(self, number: int, works: int) -> None:
        for _ in range(works):
            self.gpu.step(self.gpu.streams[number])

    def poll(self) -> None:
        self._end(self.copies.poll())

    def finish(self) -> None:
        self.gpu.run_all()
        ended, outstanding = self.copies.close()
        self._end(ended)
        assert not outstanding
        assert not self.under_way
        for place, value in self.values.items():
            assert value is None or self.gpu.memory[place] == value
        assert ("wait", self.gpu.compute.number) not in self.gpu.log

    def _submit(
        self, direction: Direction, moves: list[tuple[Place, Place]], fails: bool
    ) -> None:
        if not moves:
            return
        carried = [(s, t, self.values.get(s)) for s, t in moves]
        if self.mark is None and len(moves) == 1:
            self.mark = self.copies.mark()
        room = self.copies.has_room(direction)
        handle = self.copies.submit(self._work(moves, fails), direction, self.mark)
        assert (handle is not None) == room
        if handle is not None:
            self.under_way[handle] = carried
            self.values.update((target, None) for _, target in moves)

    def _work(self, moves: Sequence[tuple[Place, Place]], fails: bool) -> CopyWork:
        def work(keep: Keep) -> int:
            for pair in moves:
                buffer = Buffer()
                if self.keeps:
                    keep(buffer)
                self.gpu.launch("copy", moves=[pair], buffers=[buffer])
                if fails:
                    raise ValueError
            return len(moves)

        return work

    def _end(self, ends: Sequence[CopyEnd]) -> None:
        for handle, error, nbytes in ends:
            carried = self.under_way.pop(handle)
            if not error:
                assert nbytes == len(carried)
                self.values.update((target, value) for _, target, value in carried)

    def _targets(self) -> set[Place]:
        return {t for carried in self.under_way.values() for _, t, _ in carried}

    def _flies(self, place: Place) -> bool:
        sources = {s for carried in self.under_way.values() for s, _, _ in carried}
        return place in sources | self._targets()


@settings(max_examples=300, deadline=None)
@given(programs)
def test_no_race_in_any_order_and_the_right_bytes(program: list[Any]) -> None:
    Traffic(FakeStreams()).play(program)


@pytest.mark.full
@settings(max_examples=5_000, deadline=None)
@given(programs)
def test_no_race_at_length(program: list[Any]) -> None:
    Traffic(FakeStreams()).play(program)


class NoWaits(FakeStreams):
    """Drops the waits of the streams in `without`."""

    without = (1, 2)

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        if stream.number not in self.without:
            super().wait(stream, event)


class LoadsDoNotWait(NoWaits):
    without = (1,)


class StoresDoNotWait(NoWaits):
    without = (2,)


class EndsTooEarly(FakeStreams):
    """Takes every copy for ended."""

    def done(self, event: FakeEvent) -> bool:
        super().done(event)
        return True


class EndsWithTheStep(FakeStreams):
    """Looks at the wrong stream for the end of a copy."""

    def record(self, stream: FakeStream) -> FakeEvent:
        return super().record(self.compute)


class FailsTooEarly(CopyStreams):
    """Gives up a failed copy at once, though some of it still runs."""

    def _has_ended(self, copy: Any) -> bool:
        return bool(copy.error) or super()._has_ended(copy)


class OneMarkForEver(CopyStreams):
    """Orders every copy behind the first one's steps."""

    first: Any = None

    def mark(self) -> Any:
        self.first = self.first or super().mark()
        return self.first


def goes_wrong(program: list[Any], kind: type[Exception], **traffic: Any) -> bool:
    try:
        Traffic(**traffic).play(program)
    except AssertionError as error:
        return isinstance(error, kind)
    return False


@pytest.mark.parametrize(
    "mutated", [LoadsDoNotWait, StoresDoNotWait, EndsTooEarly, EndsWithTheStep]
)
def test_a_wrong_api_is_found_out(mutated: type[FakeStreams]) -> None:
    search(lambda p: goes_wrong(p, RaceError, gpu=mutated()))


@pytest.mark.parametrize("mutated", [FailsTooEarly, OneMarkForEver])
def test_wrong_logic_is_found_out(mutated: type[CopyStreams]) -> None:
    search(lambda p: goes_wrong(p, RaceError, gpu=FakeStreams(), copies=mutated))


def test_buffers_that_are_not_kept_are_found_out() -> None:
    search(lambda p: goes_wrong(p, LifetimeError, gpu=FakeStreams(), keeps=False))


def search(condition: Any) -> None:
    """Raises NoSuchExample if random traffic never goes wrong."""
    find(
        programs,
        condition,
        settings=settings(
            max_examples=5_000, deadline=None, phases=[Phase.generate], database=None
        ),
    )
