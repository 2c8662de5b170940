"""A GPU's streams as a happens-before simulator: queues, events, clocks.

The host launches work in program order; each stream runs its own in that order; the
test says which stream takes a step next. A *race* is two accesses to one place, one
of them a write, that no chain of stream order, event waits and polls puts in order:
it is found from vector clocks at launch, so in any order of completion, not only in
the one that happened. Work also really moves values when it runs.
"""

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

HOST = -1
"""In place of a stream's number."""
Place = Hashable
Clock = dict[int, int]
"""By stream: how many of its works are known to have ended before."""


class RaceError(AssertionError):
    """Two accesses are not ordered."""


class LifetimeError(AssertionError):
    """Work ran with a buffer that had been freed."""


class DeviceError(RuntimeError):
    """What a device reports."""


class Buffer:
    """Memory that the device uses; the simulator only watches whether it lives."""


@dataclass
class FakeEvent:
    clock: Clock
    reached: bool = False


@dataclass
class Work:
    """One thing on a stream's queue."""

    name: str
    act: Callable[[], None] = lambda: None
    waits_for: FakeEvent | None = None
    buffers: tuple["weakref.ref[Buffer]", ...] = ()


@dataclass
class FakeStream:
    number: int
    queue: deque[Work] = field(default_factory=deque)
    clock: Clock = field(default_factory=dict)

    def synchronize(self) -> None:
        raise AssertionError("the host waits for a stream")


@dataclass
class _Access:
    stream: int
    tick: int
    what: str

    def before(self, clock: Clock) -> bool:
        return self.tick <= clock.get(self.stream, 0)


class FakeStreams:
    """Implements `kvplugin.kernels.streams.StreamApi`.

    `fail` holds names of methods whose next call raises; `lost` makes all of them.
    `log` holds (what, stream number) in the order of the host's calls.
    """

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.memory: dict[Place, object] = {}
        self.log: list[tuple[str, int]] = []
        self.fail: set[str] = set()
        self.lost = False
        self.races: list[RaceError] = []
        """All that were raised, for who catches them in between."""
        self._host: Clock = {}
        self._writes: dict[Place, _Access] = {}
        self._reads: dict[Place, list[_Access]] = {}
        self.compute = self._current = self.new_stream()

    def new_stream(self) -> FakeStream:
        self.streams.append(FakeStream(len(self.streams)))
        return self.streams[-1]

    def compute_stream(self) -> FakeStream:
        return self.compute

    def record(self, stream: FakeStream) -> FakeEvent:
        self._call("record", stream.number)
        event = FakeEvent(_join(stream.clock, {}))

        def reach() -> None:
            event.reached = True

        stream.queue.append(Work("record", reach))
        return event

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        self._call("wait", stream.number)
        stream.clock = _join(stream.clock, event.clock)
        stream.queue.append(Work("wait", waits_for=event))

    def done(self, event: FakeEvent) -> bool:
        self._call("done", -1)
        if event.reached:
            self._host = _join(self._host, event.clock)
        return event.reached

    def run(self, stream: FakeStream, launch: Callable[[], int]) -> int:
        self._call("run", stream.number)
        before, self._current = self._current, stream
        try:
            return launch()
        finally:
            self._current = before

    def synchronize(self) -> None:
        raise AssertionError("the host waits for the device")

    def launch(
        self,
        name: str,
        *,
        moves: Iterable[tuple[Place, Place]] = (),
        writes: Iterable[tuple[Place, object]] = (),
        reads: Iterable[Place] = (),
        buffers: Iterable[Buffer] = (),
        runs: Callable[[], object] = lambda: None,
    ) -> None:
        """Put work on the current stream.

        Args:
            name: for the log.
            moves: (from, to) places whose values are copied.
            writes: places with the values they get.
            reads: places that are only looked at.
            buffers: must live until the work has run.
            runs: what else it does, such as to move real bytes.

        Raises:
            RaceError: another access is not ordered before this one.
        """
        stream = self._current
        self._call(name, stream.number)
        moves, writes = tuple(moves), tuple(writes)
        stream.clock = _join(stream.clock, self._host)
        stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        access = _Access(stream.number, stream.clock[stream.number], name)
        for place in (*reads, *(source for source, _ in moves)):
            self._read(place, access, stream.clock)
        for place in (
            *(target for _, target in moves),
            *(place for place, _ in writes),
        ):
            self._write(place, access, stream.clock)

        def act() -> None:
            values = [(target, self.memory.get(source)) for source, target in moves]
            self.memory.update([*values, *writes])
            runs()

        references = tuple(weakref.ref(buffer) for buffer in buffers)
        stream.queue.append(Work(name, act, buffers=references))

    def touch(self, name: str, place: Place) -> None:
        """The host writes a place itself, now.

        Raises:
            RaceError: what uses the place is not known to have ended.
        """
        self._call(name, HOST)
        self._host[HOST] = self._host.get(HOST, 0) + 1
        self._write(place, _Access(HOST, self._host[HOST], name), self._host)

    def finish(self, event: FakeEvent) -> None:
        """The host waits for an event, for whom `synchronize` is not the end."""
        self._call("finish", HOST)
        while not event.reached:
            assert any(self.step(stream) for stream in self.streams)
        self.done(event)

    def step(self, stream: FakeStream) -> bool:
        """Let the stream run its next work; False if it has none or must wait.

        Raises:
            LifetimeError: a buffer of the work is gone.
        """
        if not stream.queue:
            return False
        work = stream.queue[0]
        if work.waits_for is not None and not work.waits_for.reached:
            return False
        stream.queue.popleft()
        if any(reference() is None for reference in work.buffers):
            raise LifetimeError(f"{work.name} runs with a buffer that was freed")
        work.act()
        return True

    def run_all(self, streams: Sequence[FakeStream] | None = None) -> None:
        """Until nothing can go on; of the given streams alone, the first one first."""
        while any(self.step(stream) for stream in streams or self.streams):
            pass

    def _call(self, what: str, stream: int) -> None:
        self.log.append((what, stream))
        if self.lost or what in self.fail:
            self.fail.discard(what)
            raise DeviceError(f"{what} fails")

    def _read(self, place: Place, access: _Access, clock: Clock) -> None:
        self._check(self._writes.get(place), access, place, clock)
        self._reads.setdefault(place, []).append(access)

    def _write(self, place: Place, access: _Access, clock: Clock) -> None:
        for other in (self._writes.get(place), *self._reads.pop(place, ())):
            self._check(other, access, place, clock)
        self._writes[place] = access

    def _check(
        self, other: _Access | None, access: _Access, place: Place, clock: Clock
    ) -> None:
        if other is not None and not other.before(clock):
            what = f"{access.what} and {other.what} race for {place}"
            self.races.append(RaceError(what))
            raise self.races[-1]


def _join(one: Clock, other: Clock) -> Clock:
    return {s: max(one.get(s, 0), other.get(s, 0)) for s in one.keys() | other.keys()}
