"""What the host prepares for one step never reaches another one."""

import random
from collections import deque

import pytest
import torch

from kvplugin.worker.buffers import MirroredTensor
from kvplugin.worker.pushes import Ring
from tests.kernels.fake_streams import FakeEvent, FakeStreams, RaceError, Work

ROWS = 4


class FakePushes:
    """`PushApi` of a simulated GPU: copies happen when their turn comes.

    Accesses to whole buffers go to the simulator, which finds races from clocks, and
    the bytes really move, late.
    """

    def __init__(self, streams: FakeStreams) -> None:
        self.streams = streams
        self.staged: list[torch.Tensor] = []
        self.waits = 0

    def staging(self, like: torch.Tensor) -> torch.Tensor:
        self.staged.append(_Watched(torch.zeros_like(like), self))
        return self.staged[-1]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        place = source.data_ptr()
        self.streams.launch("push", reads=[place], writes=[("device", 0)])
        plain = source.as_subclass(torch.Tensor)
        act = Work("bytes", lambda: target.copy_(plain))
        self.streams.compute.queue.append(act)

    def record(self) -> FakeEvent:
        return self.streams.record(self.streams.compute)

    def done(self, event: FakeEvent) -> bool:
        return self.streams.done(event)

    def wait(self, event: FakeEvent) -> None:
        self.waits += 1
        self.streams.finish(event)


class Credulous(FakePushes):
    """Takes every event for reached: what happens without them."""

    def done(self, event: FakeEvent) -> bool:
        return True


class _Watched(torch.Tensor):
    """A buffer that tells the simulator when the host fills it."""

    pushes: FakePushes

    @staticmethod
    def __new__(cls, tensor: torch.Tensor, pushes: FakePushes) -> "_Watched":
        made = tensor.as_subclass(cls)
        made.pushes = pushes
        return made

    def __getitem__(self, index: slice) -> "_Watched":
        part = self.as_subclass(torch.Tensor)[index]
        return _Watched(part, self.pushes)

    def copy_(self, rows: torch.Tensor) -> torch.Tensor:
        self.pushes.streams.touch("fill", self.data_ptr())
        return self.as_subclass(torch.Tensor).copy_(rows)


def run(
    kind: type[FakePushes], depth: int, in_flight: int, seed: int
) -> tuple[int, list[list[int]]]:
    """Steps that are prepared up to `in_flight` ahead; the host's waits, and what each
    step read of the device."""
    rng, streams = random.Random(seed), FakeStreams()
    pushes = kind(streams)
    tensor = MirroredTensor(
        ROWS, dtype=torch.int64, device="cpu", pipeline_depth=depth, pushes=pushes
    )
    read: list[list[int]] = []
    under_way: deque[FakeEvent] = deque()
    for step in range(12):
        while len(under_way) >= in_flight:
            # A step has landed when its results are here: not a wait of the push's.
            streams.finish(under_way.popleft())
        tensor.array[:] = range(step, step + ROWS)
        count = rng.randint(1, ROWS)
        view = tensor.push(count)
        tensor.array[:] = -1  # at once, whatever the device has done
        streams.launch("step", reads=[("device", 0)])
        work = Work("read", lambda view=view: read.append(view.tolist()))
        streams.compute.queue.append(work)
        under_way.append(streams.record(streams.compute))
        for _ in range(rng.choice([0, 0, 1, 5])):
            streams.step(streams.compute)
    streams.run_all()
    return pushes.waits, read


def is_right(read: list[list[int]]) -> bool:
    return all(
        seen == list(range(step, step + len(seen))) for step, seen in enumerate(read)
    )


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_steps_in_flight_read_what_was_meant_for_them_and_nobody_waits(
    depth: int,
) -> None:
    for seed in range(30):
        waits, read = run(FakePushes, depth, depth, seed)
        assert is_right(read)
        assert len(read) == 12
        assert waits == 0


def test_a_host_that_runs_further_ahead_waits_and_nothing_is_lost() -> None:
    runs = [run(FakePushes, 2, 9, seed) for seed in range(30)]
    assert all(is_right(read) for _, read in runs)
    assert any(waits for waits, _ in runs)


def test_without_events_or_without_a_ring_the_race_is_found() -> None:
    """The control: the simulator would have seen it."""

    def many(depth: int, in_flight: int) -> None:
        for seed in range(30):
            run(Credulous, depth, in_flight, seed)

    for depth, in_flight in ((0, 2), (1, 3), (2, 9)):
        with pytest.raises(RaceError, match="fill and push race"):
            many(depth, in_flight)


def test_one_buffer_for_all_steps_gives_a_step_the_next_ones_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As before the ring: the bytes themselves are wrong."""
    monkeypatch.setattr(FakeStreams, "touch", lambda *_: None)
    monkeypatch.setattr(FakeStreams, "_check", lambda *_: None)
    assert not all(is_right(run(Credulous, 0, 2, seed)[1]) for seed in range(30))
    assert all(is_right(run(Credulous, 2, 2, seed)[1]) for seed in range(30))


def test_buffers_take_turns() -> None:
    pushes = FakePushes(FakeStreams())
    ring = Ring(pushes, torch.zeros(ROWS, dtype=torch.int64), 3)
    target = torch.zeros(ROWS, dtype=torch.int64)
    for _ in range(5):
        ring.push(target, torch.arange(ROWS))
        pushes.streams.run_all()
    fills = [staged.data_ptr() for staged in pushes.staged]
    assert len(set(fills)) == 3
    assert target.tolist() == list(range(ROWS))


def test_a_cpu_has_no_ring() -> None:
    tensor = MirroredTensor(ROWS, dtype=torch.int32, device="cpu")
    assert tensor._ring is None
    tensor.array[:] = 3
    view = tensor.push(2)
    tensor.array[:] = 4
    assert view.tolist() == [3, 3]
    assert tensor.device.tolist() == [3, 3, 0, 0]
