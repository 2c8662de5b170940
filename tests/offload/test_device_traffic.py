"""Random steps, stores and loads of a worker half beside a device, in random orders of
its streams: no race, and every block holds what it should."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from kvplugin.connectors.offload.messages import CopyOrder
from kvplugin.contract import WorkerOutcome
from tests.kernels.fake_streams import FakeStreams
from tests.kernels.test_streams_traffic import (
    EndsTooEarly,
    LoadsDoNotWait,
    StoresDoNotWait,
)
from tests.offload.device_bench import Bench, errors
from tests.offload.plans import order

group, block, host = st.integers(0, 2), st.integers(1, 3), st.integers(0, 1)
programs = st.lists(
    st.tuples(
        group,
        st.sets(block, max_size=2),
        st.sampled_from(["store", "load"]),
        block,
        host,
        st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), max_size=3),
        st.booleans(),
    ),
    max_size=25,
)


class Model:
    """What each block holds, for a scheduler that keeps its part of the contract: it
    leaves alone what copies use until a poll has said that they ended."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.held: dict[tuple[str, int, int], int] = {}
        """By side, group and block; one group at a time has a block."""
        self.under_way: dict[int, tuple[tuple[str, int, int], int]] = {}
        """Targets and what they will hold, by job."""
        self.busy: dict[int, tuple[int, int]] = {}
        self.loaded = 0

    def play(self, program: Sequence[tuple[Any, ...]]) -> None:
        for number, step in enumerate(program, 1):
            self._step(number, *step)
        while self.under_way:
            self._hear(self.bench.settle())
        self.bench.gpu.streams.run_all()
        for (side, group, block), value in self.held.items():
            if side == "device":
                assert set(self.bench.bytes_of(group, block)) == {value}

    def _step(
        self,
        number: int,
        group: int,
        written: set[int],
        kind: str,
        block: int,
        host: int,
        runs: Sequence[tuple[int, int]],
        loads_first: bool,
    ) -> None:
        used = {block for block, _ in self.busy.values()}
        job = self._order(number, group, kind, block, host, used, written)
        writes = {(group, b): number * 7 % 251 + b for b in written - used}
        for (_, b), value in writes.items():
            self._put(("device", group, b), value)
        if kind == "store" and job:
            self.under_way[number] = (
                ("host", group, host),
                self.held["device", group, block],
            )
        outcome = self.bench.step(
            functools.partial(self.bench.forward, writes),
            loads_first=loads_first,
            **{f"{kind}s": job},
        )
        self._hear(outcome)
        for stream, count in runs:
            for _ in range(count):
                self.bench.gpu.streams.step(self.bench.gpu.streams.streams[stream])

    def _order(
        self,
        number: int,
        group: int,
        kind: str,
        block: int,
        host: int,
        used: set[int],
        written: set[int],
    ) -> list[CopyOrder]:
        hosts = {h for _, h in self.busy.values()}
        if block in used or host in hosts:
            return []
        if kind == "store":
            if ("device", group, block) not in self.held and block not in written:
                return []
            self._forget("host", host)
        else:
            if ("host", group, host) not in self.held:
                return []
            written.discard(block)
            self._forget("device", block)
            self.under_way[number] = (
                ("device", group, block),
                self.held["host", group, host],
            )
        self.busy[number] = (block, host)
        if kind == "load":
            used.add(block)
        return [order(number, [block], [host], group)]

    def _hear(self, outcome: WorkerOutcome) -> None:
        for race in self.bench.gpu.streams.races:  # taken for a failure of the copy
            raise race
        for job, error in errors(outcome).items():
            assert error == ""
            place, value = self.under_way.pop(job)
            self._put(place, value)
            del self.busy[job]
            self.loaded += place[0] == "device"

    def _put(self, place: tuple[str, int, int], value: int) -> None:
        self._forget(place[0], place[2])
        self.held[place] = value

    def _forget(self, side: str, block: int) -> None:
        for group in range(3):
            self.held.pop((side, group, block), None)


@settings(max_examples=60, deadline=None)
@given(programs)
def test_whatever_the_order_of_the_streams_bytes_are_right(program: list[Any]) -> None:
    Model(Bench()).play(program)


def test_such_programs_load_what_they_stored() -> None:
    search(lambda program: played(program, FakeStreams()).loaded >= 2)


@pytest.mark.parametrize("mutated", [LoadsDoNotWait, StoresDoNotWait, EndsTooEarly])
def test_a_copy_that_does_not_wait_for_its_step_is_found_out(
    mutated: type[FakeStreams],
) -> None:
    def goes_wrong(program: list[Any]) -> bool:
        try:
            played(program, mutated())
        except AssertionError:
            return True
        return False

    search(goes_wrong)


def played(program: list[Any], streams: FakeStreams) -> Model:
    model = Model(Bench(streams))
    model.play(program)
    return model


def search(condition: Callable[[list[Any]], bool]) -> None:
    """Raises NoSuchExample if no program does it."""
    find(
        programs,
        condition,
        settings=settings(
            max_examples=2000,
            deadline=None,
            phases=[Phase.generate],
            database=None,
            derandomize=True,  # what is found once is found
        ),
    )
