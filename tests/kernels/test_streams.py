"""Copies on side streams never race, never hold a step and lose nothing."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from kvplugin.kernels.streams import CopyEnd, CopyStreams, CopyWork, Direction, Keep
from tests.kernels.fake_streams import (
    Buffer,
    FakeStreams,
    LifetimeError,
    RaceError,
)

LOAD, STORE = Direction


@pytest.fixture
def gpu() -> FakeStreams:
    return FakeStreams()


@pytest.fixture
def copies(gpu: FakeStreams) -> CopyStreams:
    return CopyStreams(gpu, in_flight=2, sleep=lambda _: gpu.run_all())


def move(gpu: FakeStreams, source: str, target: str) -> CopyWork:
    """A copy of one block that uses a buffer."""

    def work(keep: Keep) -> int:
        ids = Buffer()
        keep(ids)
        gpu.launch("copy", moves=[(source, target)], buffers=[ids])
        return 64

    return work


def broken(*launches: Callable[[], None]) -> CopyWork:
    """A copy that fails after having launched something."""

    def work(keep: Keep) -> int:
        for launch in launches:
            launch()
        raise ValueError("no such block")

    return work


def test_a_store_reads_what_the_step_wrote(
    gpu: FakeStreams, copies: CopyStreams
) -> None:
    gpu.launch("step", writes=[("d0", "new")])
    handle = copies.submit(move(gpu, "d0", "h0"), STORE)
    side = gpu.streams[-1]
    gpu.run_all([side])
    assert copies.poll() == []
    assert "h0" not in gpu.memory
    gpu.run_all()
    assert copies.poll() == [CopyEnd(handle, "", 64)]
    assert gpu.memory["h0"] == "new"
    assert copies.poll() == []


def test_a_load_lets_the_step_that_reads_its_target_end(
    gpu: FakeStreams, copies: CopyStreams
) -> None:
    gpu.memory |= {"d0": "old", "h0": "loaded"}
    gpu.launch("step", moves=[("d0", "logits")])
    copies.submit(move(gpu, "h0", "d0"), LOAD)
    gpu.run_all(gpu.streams[::-1])
    assert gpu.memory["logits"] == "old"
    assert gpu.memory["d0"] == "loaded"


def test_one_mark_serves_all_copies_of_a_step(
    gpu: FakeStreams, copies: CopyStreams
) -> None:
    gpu.launch("step", writes=[("d0", 0), ("d1", 1)])
    mark = copies.mark()
    gpu.launch("next step", writes=[("d2", 2)])
    copies.submit(move(gpu, "d0", "h0"), STORE, mark)
    copies.submit(move(gpu, "d1", "h1"), STORE, mark)
    assert gpu.log.count(("record", 0)) == 1
    with pytest.raises(RaceError, match="copy and next step race for d2"):
        gpu.run(gpu.streams[2], lambda: move(gpu, "d2", "h2")(id))


def test_the_step_waits_for_nothing(gpu: FakeStreams, copies: CopyStreams) -> None:
    for i in range(2):
        gpu.launch("step", writes=[(f"d{i}", i)])
        copies.submit(move(gpu, f"d{i}", f"h{i}"), STORE)
    gpu.run_all([gpu.compute])
    assert not gpu.compute.queue
    assert ("wait", gpu.compute.number) not in gpu.log


def test_directions_run_side_by_side(gpu: FakeStreams, copies: CopyStreams) -> None:
    gpu.memory["h1"] = "loaded"
    copies.submit(move(gpu, "d0", "h0"), STORE)
    load = copies.submit(move(gpu, "h1", "d1"), LOAD)
    gpu.run_all([gpu.compute, gpu.streams[1]])
    assert copies.poll() == [CopyEnd(load, "", 64)]


def test_not_now(gpu: FakeStreams, copies: CopyStreams) -> None:
    for i in range(2):
        assert copies.has_room(STORE)
        assert copies.submit(move(gpu, f"d{i}", f"h{i}"), STORE)
    calls = len(gpu.log)
    assert not copies.has_room(STORE)
    assert copies.submit(move(gpu, "d2", "h2"), STORE) is None
    assert len(gpu.log) == calls
    assert copies.submit(move(gpu, "h7", "d7"), LOAD)
    gpu.run_all()
    assert len(copies.poll()) == 3
    assert copies.submit(move(gpu, "d2", "h2"), STORE)


def test_a_copy_that_fails_half_way_ends_when_its_half_has(
    gpu: FakeStreams, copies: CopyStreams
) -> None:
    work = broken(lambda: gpu.launch("half", moves=[("d0", "h0")]))
    handle = copies.submit(work, STORE)
    assert copies.poll() == []
    gpu.run_all()
    assert copies.poll() == [CopyEnd(handle, "ValueError: no such block")]


@pytest.mark.parametrize("call", ["wait", "record", "run"])
def test_the_api_fails(gpu: FakeStreams, copies: CopyStreams, call: str) -> None:
    gpu.fail = {call}
    handle = copies.submit(move(gpu, "d0", "h0"), STORE)
    gpu.run_all()
    assert copies.poll() == [CopyEnd(handle, f"DeviceError: {call} fails")]
    assert copies.submit(move(gpu, "d0", "h0"), STORE)
    gpu.run_all()
    (end,) = copies.poll()
    assert not end.error


def test_without_an_event_behind_it_a_copy_does_not_end(
    gpu: FakeStreams, copies: CopyStreams
) -> None:
    mark = copies.mark()
    gpu.fail = {"record"}
    handle = copies.submit(move(gpu, "d0", "h0"), STORE, mark)
    gpu.run_all([gpu.compute])
    gpu.fail = {"record"}
    assert copies.poll() == []
    assert copies.poll() == []
    gpu.run_all()
    assert copies.poll() == [CopyEnd(handle, "DeviceError: record fails")]


@pytest.mark.parametrize("when", ["before", "within", "after"])
def test_a_lost_device_fails_what_is_under_way(
    gpu: FakeStreams, copies: CopyStreams, when: str
) -> None:
    def lose() -> None:
        gpu.lost = True

    work = broken(lose) if when == "within" else move(gpu, "d0", "h0")
    gpu.lost = when == "before"
    handle = copies.submit(work, STORE)
    lose()
    (end,) = copies.poll()
    assert end.handle is handle
    assert end.error
    assert copies.close() == ([], [])


def test_close_drains(gpu: FakeStreams, copies: CopyStreams) -> None:
    stored = copies.submit(move(gpu, "d0", "h0"), STORE)
    failed = copies.submit(broken(), LOAD)
    ends = {end.handle: end.error for end in copies.close().ended}
    assert ends == {stored: "", failed: "ValueError: no such block"}
    with pytest.raises(RuntimeError, match="closed"):
        copies.submit(move(gpu, "d0", "h0"), STORE)


def test_close_reports_what_does_not_end(gpu: FakeStreams) -> None:
    naps: list[float] = []
    copies = CopyStreams(gpu, sleep=naps.append)
    handle = copies.submit(move(gpu, "d0", "h0"), STORE)
    assert copies.close(timeout=0.05) == ([], [handle])
    assert sum(naps) == pytest.approx(0.05)
    gpu.run_all()  # its buffers are still there


def test_buffers_live_until_the_copy_has_ended(
    gpu: FakeStreams, copies: CopyStreams
) -> None:
    copies.submit(move(gpu, "d0", "h0"), STORE)
    (kept,) = gpu.streams[2].queue[1].buffers
    gpu.run_all()
    assert kept() is not None
    copies.poll()
    assert kept() is None


def test_the_simulator_sees_a_freed_buffer(gpu: FakeStreams) -> None:
    move(gpu, "d0", "h0")(lambda _: None)
    with pytest.raises(LifetimeError, match="copy runs with a buffer"):
        gpu.run_all()


def test_the_simulator_sees_races_in_any_order_of_completion(gpu: FakeStreams) -> None:
    side = gpu.new_stream()
    gpu.launch("step", writes=[("d0", 1)])
    gpu.run_all()  # has happened, yet nothing says that it had to
    with pytest.raises(RaceError, match="copy and step race for d0"):
        gpu.run(side, lambda: move(gpu, "d0", "h0")(id))


def test_the_simulator_allows_no_host_wait(gpu: FakeStreams) -> None:
    for wait in (gpu.synchronize, gpu.compute.synchronize):
        with pytest.raises(AssertionError, match="the host waits"):
            wait()


def test_no_room_at_all(gpu: FakeStreams) -> None:
    with pytest.raises(ValueError, match="in_flight 0"):
        CopyStreams(gpu, in_flight=0)


def test_the_stream_logic_needs_no_torch() -> None:
    code = "import sys, kvplugin.kernels.streams; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_streams_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from kvplugin.kernels.torch_streams import TorchStreams

    gpu = FakeStreams()

    class Event:
        def record(self, stream: Any) -> None:
            self.event = gpu.record(stream.fake)

        def query(self) -> bool:
            return gpu.done(self.event)

    class Stream:
        def __init__(self, device: int) -> None:
            self.fake = gpu.compute if device < 0 else gpu.new_stream()

        def wait_event(self, event: Event) -> None:
            gpu.wait(self.fake, event.event)

    class Current:
        def __init__(self, stream: Stream) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            gpu._current = self.stream.fake

        def __exit__(self, *_: object) -> None:
            gpu._current = gpu.compute

    fake = {"Stream": Stream, "Event": Event, "stream": Current}
    for name, value in fake.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream(-1))
    copies = CopyStreams(TorchStreams(0))
    gpu.launch("step", writes=[("d0", "new")])
    handle = copies.submit(move(gpu, "d0", "h0"), STORE)
    assert copies.poll() == []
    gpu.run_all()
    assert copies.poll() == [CopyEnd(handle, "", 64)]
    assert gpu.memory["h0"] == "new"
