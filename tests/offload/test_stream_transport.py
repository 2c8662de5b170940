"""The transport of a device: what waits for what, what ends, and who never waits."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.connectors.offload.stream_transport import StreamTransport
from kvplugin.contract import CopyJob, CopyResult, Transport
from kvplugin.kernels.streams import CopyStreams, Keep
from tests.kernels.fake_streams import FakeStreams, Place

IN_FLIGHT = 2


def device(block: int) -> Place:
    return ("device", block)


def host(block: int) -> Place:
    return ("host", block)


def store(job_id: int, block: int | None = None) -> CopyJob:
    """Of device block to host block, both of the job's number or of `block`."""
    number = job_id if block is None else block
    return CopyJob(job_id, True, [(0, [number], [number])])


def load(job_id: int, block: int | None = None) -> CopyJob:
    return store(job_id, block)._replace(store=False)


def never(seconds: float) -> None:
    raise AssertionError(f"the host waits for {seconds} seconds")


class Bench:
    """A transport over simulated streams; each block is a place."""

    def __init__(
        self, *, sleep: Callable[[float], object] = never, close_seconds: float = 0.0
    ) -> None:
        self.gpu = FakeStreams()
        self.now = 0.0
        self.failing: set[int] = set()
        self.transport = StreamTransport(
            CopyStreams(self.gpu, in_flight=IN_FLIGHT),
            self._launch,
            clock=lambda: self.now,
            sleep=sleep,
            close_seconds=close_seconds,
        )
        self.loads, self.stores = self.gpu.streams[1:]

    def _launch(self, job: CopyJob, keep: Keep) -> int:
        del keep
        if job.id in self.failing:
            raise ValueError(f"id of job {job.id}")
        moves = [
            (device(d), host(h)) if job.store else (host(h), device(d))
            for _, engine_ids, host_ids in job.parts
            for d, h in zip(engine_ids, host_ids, strict=True)
        ]
        self.gpu.launch(f"copy {job.id}", moves=moves)
        return 64 * len(moves)

    def step(self, *, writes: Sequence[int] = (), reads: Sequence[int] = ()) -> None:
        """A forward of the engine, launched."""
        values = [(device(block), f"step wrote {block}") for block in writes]
        self.gpu.launch("step", writes=values, reads=[device(b) for b in reads])

    def ended(self) -> list[int]:
        """Jobs that a poll of a step finds ended well."""
        found = self.transport.poll(0)
        assert not [result for result in found if result.error]
        return [result.id for result in found]

    @property
    def launched(self) -> list[int]:
        """Jobs of which copies were launched, in order."""
        names = [name for name, _ in self.gpu.log if name.startswith("copy ")]
        return [int(name.removeprefix("copy ")) for name in names]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_it_is_a_transport(bench: Bench) -> None:
    transport: Transport = bench.transport
    assert transport.poll(3600) == [], "nothing is under way: it does not wait"


class TestOrder:
    def test_a_store_begins_after_the_step_that_wrote_its_source(
        self, bench: Bench
    ) -> None:
        bench.step(writes=[1])
        bench.transport.submit(store(1))
        bench.gpu.run_all([bench.stores])
        assert host(1) not in bench.gpu.memory
        bench.gpu.run_all()
        assert bench.gpu.memory[host(1)] == "step wrote 1"
        assert bench.ended() == [1]

    @pytest.mark.parametrize("behind_the_forward", [True, False])
    def test_a_load_waits_for_steps_that_read_what_its_target_held(
        self, bench: Bench, behind_the_forward: bool
    ) -> None:
        """vLLM 0.32 starts loads behind the forward, 0.19 before it."""
        bench.gpu.memory[host(1)] = "loaded"
        bench.step(reads=[1])  # its last step: then the block changed hands
        if behind_the_forward:
            bench.step(writes=[2])
        bench.transport.submit(load(1))
        if not behind_the_forward:
            bench.step(writes=[2])
        bench.gpu.run_all([bench.loads])
        assert device(1) not in bench.gpu.memory
        bench.gpu.run_all()
        assert bench.ended() == [1]
        bench.step(reads=[1])  # behind the poll: no more order is needed
        bench.gpu.run_all()
        assert bench.gpu.memory[device(1)] == "loaded"

    def test_a_step_behind_a_submitted_load_does_not_hold_it(
        self, bench: Bench
    ) -> None:
        bench.step(reads=[1])
        bench.gpu.run_all()
        bench.transport.submit(load(1))
        bench.step(writes=[2])
        bench.gpu.run_all([bench.gpu.compute])  # reaches the load's event
        queued = len(bench.gpu.compute.queue)
        bench.step(writes=[3])
        bench.gpu.run_all([bench.loads])
        assert bench.ended() == [1]
        assert len(bench.gpu.compute.queue) == queued + 1, "the step has not run"

    def test_no_step_waits_for_a_copy(self, bench: Bench) -> None:
        for number in range(1, 6):
            bench.step(writes=[number])
            bench.transport.submit(store(number))
            bench.transport.submit(load(10 + number))
            bench.transport.poll(0)
        bench.gpu.run_all([bench.gpu.compute])
        assert not bench.gpu.compute.queue
        assert ("wait", bench.gpu.compute.number) not in bench.gpu.log

    def test_nothing_is_reported_before_its_event_is_reached(
        self, bench: Bench
    ) -> None:
        bench.transport.submit(store(1))
        stream = bench.stores
        bench.gpu.run_all([bench.gpu.compute])
        while len(stream.queue) > 1:
            bench.gpu.step(stream)
            assert bench.ended() == []
        assert bench.gpu.memory.keys() >= {host(1)}, "moved, yet its event is to come"
        bench.gpu.step(stream)
        assert bench.ended() == [1]


class TestRoom:
    def test_what_does_not_fit_waits_in_the_order_of_submission(
        self, bench: Bench
    ) -> None:
        for job_id in range(1, 7):
            bench.transport.submit(store(job_id))
        assert bench.launched == [1, 2]
        assert bench.transport.outstanding == 6
        found: list[int] = []
        while bench.transport.outstanding:
            bench.gpu.run_all()
            found += bench.ended()
        assert found == bench.launched == [1, 2, 3, 4, 5, 6]

    def test_a_load_overtakes_stores_that_have_not_begun(self, bench: Bench) -> None:
        for job_id in range(1, 5):
            bench.transport.submit(store(job_id))
        bench.transport.submit(load(9))
        assert bench.launched == [1, 2, 9]
        bench.gpu.run_all([bench.gpu.compute, bench.loads])
        assert bench.ended() == [9], "no store has moved a byte"

    def test_one_that_waited_for_room_waits_for_its_own_step_only(
        self, bench: Bench
    ) -> None:
        bench.step(writes=[1, 2, 3])
        for job_id in (1, 2, 3):
            bench.transport.submit(store(job_id))
        bench.gpu.run_all()
        bench.step(writes=[7])  # and this one does not end
        assert bench.ended() == [1, 2]
        assert bench.launched == [1, 2, 3]
        bench.gpu.run_all([bench.stores])
        assert bench.ended() == [3]
        assert bench.gpu.memory[host(3)] == "step wrote 3"


class TestFailures:
    def test_a_copy_that_cannot_be_launched_fails_and_others_go_on(
        self, bench: Bench
    ) -> None:
        bench.failing = {1}
        bench.transport.submit(store(1))
        bench.transport.submit(store(2))
        bench.gpu.run_all()
        found = {result.id: result.error for result in bench.transport.poll(0)}
        assert found == {1: "ValueError: id of job 1", 2: ""}

    @pytest.mark.parametrize("call", ["record", "wait", "run"])
    def test_what_the_device_refuses_is_the_error_of_one_job(
        self, bench: Bench, call: str
    ) -> None:
        bench.gpu.fail = {call}
        bench.transport.submit(store(1))
        bench.gpu.run_all()
        (failed,) = bench.transport.poll(0)
        assert failed == CopyResult(1, f"DeviceError: {call} fails")
        bench.transport.submit(store(2))
        bench.gpu.run_all()
        assert bench.ended() == [2]

    def test_a_lost_device_fails_all_of_them(self, bench: Bench) -> None:
        for job_id in range(1, 6):
            bench.transport.submit(store(job_id))
        bench.gpu.lost = True
        bench.transport.submit(load(9))
        found: list[CopyResult] = []
        for _ in range(5):
            found += bench.transport.poll(0)
        assert sorted(result.id for result in found) == [1, 2, 3, 4, 5, 9]
        assert all(result.error for result in found)
        assert bench.transport.outstanding == 0


class TestTime:
    def test_a_poll_of_a_step_waits_for_nothing(self, bench: Bench) -> None:
        """`never` ends the test if it sleeps, and the simulator if it synchronises."""
        bench.step(writes=[1])
        bench.transport.submit(store(1))
        assert bench.transport.poll(0) == []
        assert bench.gpu.log.count(("done", -1)) == 1

    def test_a_poll_that_may_wait_ends_with_the_last_copy(self) -> None:
        naps: list[float] = []

        def sleep(seconds: float) -> None:
            naps.append(seconds)
            if len(naps) == 3:
                bench.gpu.run_all()

        bench = Bench(sleep=sleep)
        bench.transport.submit(store(1))
        assert [result.id for result in bench.transport.poll(30)] == [1]
        assert len(naps) == 3

    def test_a_poll_waits_no_longer_than_told(self) -> None:
        naps: list[float] = []
        bench = Bench(sleep=naps.append)
        bench.transport.submit(store(1))
        assert bench.transport.poll(0.05) == []
        assert sum(naps) == pytest.approx(0.05)

    def test_a_copy_says_how_long_it_took(self, bench: Bench) -> None:
        bench.transport.submit(store(1))
        bench.now += 2.5
        bench.gpu.run_all()
        assert bench.transport.poll(0) == [CopyResult(1, "", 64, 2.5)]


class TestClosing:
    def test_it_finishes_what_is_queued_and_takes_no_more(self) -> None:
        bench = Bench(sleep=lambda _: bench.gpu.run_all(), close_seconds=10)
        for job_id in range(1, 7):
            bench.transport.submit(store(job_id))
        bench.transport.close()
        assert bench.ended() == [1, 2, 3, 4, 5, 6]
        assert bench.transport.outstanding == 0
        with pytest.raises(RuntimeError, match="closed"):
            bench.transport.submit(store(9))
        bench.transport.close()

    def test_it_does_not_wait_for_a_hung_copy_for_ever(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        naps: list[float] = []
        bench = Bench(sleep=naps.append, close_seconds=0.05)
        for job_id in range(1, 5):
            bench.transport.submit(store(job_id))
        bench.transport.close()
        assert sum(naps) == pytest.approx(0.05)
        assert "2 copies do not end" in caplog.text
        assert bench.transport.outstanding == 2
        assert bench.transport.poll(0) == [
            CopyResult(3, error="the streams were closed"),
            CopyResult(4, error="the streams were closed"),
        ]
        bench.transport.close()
        assert sum(naps) == pytest.approx(0.05)


programs = st.lists(
    st.one_of(
        st.tuples(st.just("step")),
        st.tuples(st.just("store"), st.booleans()),
        st.tuples(st.just("load"), st.booleans()),
        st.tuples(st.just("run"), st.integers(0, 2), st.integers(1, 6)),
        st.tuples(st.just("poll")),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(programs)
def test_in_any_order_nothing_races_and_each_job_ends_once(
    program: list[tuple[str, int, int]],
) -> None:
    """Each copy has blocks of its own, as the scheduler half sees to; a store's were
    written, a load's last read, by the step before."""
    bench, submitted, found = Bench(), 0, []
    for name, *args in program:
        if name == "step":
            bench.step(writes=[submitted + 1], reads=[submitted + 2])
        elif name in ("store", "load"):
            submitted += 1
            if args[0]:
                bench.failing.add(submitted)
            job = store(submitted) if name == "store" else load(submitted)
            bench.transport.submit(job)
        elif name == "run":
            for _ in range(args[1]):
                bench.gpu.step(bench.gpu.streams[args[0]])
        else:
            found += bench.transport.poll(0)
    while bench.transport.outstanding:
        bench.gpu.run_all()
        found += bench.transport.poll(0)
    found += bench.transport.poll(0)
    assert not bench.gpu.races
    ended = {result.id: bool(result.error) for result in found}
    assert len(found) == len(ended) == submitted
    assert {job_id for job_id, failed in ended.items() if failed} == bench.failing
