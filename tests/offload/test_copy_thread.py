"""The copy thread keeps a transport's promises. Limits here only end what hangs."""

import ctypes
import threading
from collections.abc import Iterator

import pytest

from kvplugin.connectors.offload import copy_thread
from kvplugin.connectors.offload.copy_thread import MAX_THREADS, CopyThread
from kvplugin.contract import CopyJob, CopyResult, Transport

HANG_SECONDS = 60.0
"""Nothing here takes a thousandth of it."""
HUNG = copy_thread.HANG_SECONDS + 1


def store(job_id: int) -> CopyJob:
    return CopyJob(job_id, store=True, parts=[(0, [1], [1])])


def load(job_id: int) -> CopyJob:
    return CopyJob(job_id, store=False, parts=[(0, [1], [1])])


class Gate:
    """Copies that take until the test opens the gate."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self._is_open = threading.Event()
        self._has_begun = threading.Semaphore(0)

    def __call__(self, job: CopyJob) -> int:
        self.begun.append(job.id)
        self._has_begun.release()
        assert self._is_open.wait(HANG_SECONDS)
        return 100 + job.id

    def open(self) -> None:
        self._is_open.set()

    def wait_for_a_job(self) -> None:
        assert self._has_begun.acquire(timeout=HANG_SECONDS)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def thread(gate: Gate) -> Iterator[CopyThread]:
    thread = CopyThread(gate)
    yield thread
    gate.open()
    thread.close()


def results(thread: Transport, count: int) -> list[CopyResult]:
    """That many results, in order of their end."""
    found: list[CopyResult] = []
    while len(found) < count:
        new = thread.poll(HANG_SECONDS)
        assert new, "no result in a minute"
        found += new
    assert len(found) == count
    return found


def test_a_job_ends_with_the_bytes_it_copied(thread: CopyThread, gate: Gate) -> None:
    gate.open()
    thread.submit(store(7))
    (result,) = results(thread, 1)
    assert (result.id, result.error, result.nbytes) == (7, "", 107)
    assert result.seconds >= 0
    assert thread.poll(0) == []


def test_loads_overtake_stores_that_have_not_begun(
    thread: CopyThread, gate: Gate
) -> None:
    thread.submit(store(1))
    gate.wait_for_a_job()
    for job in (store(2), load(3), store(4), load(5)):
        thread.submit(job)
    gate.open()
    results(thread, 5)
    assert gate.begun == [1, 3, 5, 2, 4]


def test_jobs_of_a_kind_keep_their_order(thread: CopyThread, gate: Gate) -> None:
    gate.open()
    for job_id in range(20):
        thread.submit(store(job_id))
    assert [result.id for result in results(thread, 20)] == list(range(20))


def test_a_poll_without_a_wait_does_not_wait_for_a_copy(
    thread: CopyThread, gate: Gate
) -> None:
    thread.submit(store(1))
    gate.wait_for_a_job()
    assert thread.poll(0) == []
    gate.open()
    results(thread, 1)


def test_a_poll_does_not_wait_where_nothing_is_under_way(thread: CopyThread) -> None:
    assert thread.poll(10 * HANG_SECONDS) == []


def test_a_poll_waits_for_all_that_is_under_way(thread: CopyThread, gate: Gate) -> None:
    thread.submit(store(1))
    thread.submit(store(2))
    gate.wait_for_a_job()
    threading.Timer(0.01, gate.open).start()
    assert [result.id for result in thread.poll(HANG_SECONDS)] == [1, 2]


def test_a_poll_that_has_a_result_still_waits_for_the_rest(gate: Gate) -> None:
    copies = CopyThread(lambda job: 0 if job.id == 1 else gate(job))
    copies.submit(store(1))
    copies.submit(store(2))
    gate.wait_for_a_job()
    threading.Timer(0.01, gate.open).start()
    assert [result.id for result in copies.poll(HANG_SECONDS)] == [1, 2]
    copies.close()


def test_a_poll_waits_no_longer_than_told(thread: CopyThread, gate: Gate) -> None:
    thread.submit(store(1))
    gate.wait_for_a_job()
    assert thread.poll(0.001) == []


@pytest.mark.parametrize("error", [OSError("no space"), ValueError("id 9"), KeyError()])
def test_what_a_copy_raises_is_its_result_and_the_thread_goes_on(
    error: Exception,
) -> None:
    def execute(job: CopyJob) -> int:
        if job.store:
            raise error
        return 1

    thread = CopyThread(execute)
    thread.submit(store(1))
    (failed,) = results(thread, 1)
    assert failed == CopyResult(1, error=f"{type(error).__name__}: {error}")
    thread.submit(load(2))
    (good,) = results(thread, 1)
    assert (good.id, good.error) == (2, "")
    thread.close()


def test_closing_finishes_what_is_queued(gate: Gate) -> None:
    thread = CopyThread(gate)
    for job in (store(1), store(2), load(3)):
        thread.submit(job)
    gate.open()
    thread.close()
    assert sorted(result.id for result in thread.poll(0)) == [1, 2, 3]


def test_a_closed_thread_takes_no_jobs_and_may_be_closed_again(gate: Gate) -> None:
    thread = CopyThread(gate)
    thread.close()
    thread.close()
    with pytest.raises(RuntimeError, match="closed"):
        thread.submit(store(1))


def test_a_job_that_is_submitted_from_the_copy_of_another_is_not_lost() -> None:
    def execute(job: CopyJob) -> int:
        if job.store:
            copies.submit(load(2))
        return 0

    copies = CopyThread(execute)
    copies.submit(store(1))
    assert {result.id for result in results(copies, 2)} == {1, 2}
    copies.close()


def test_many_submitters_and_one_poller_lose_no_job(gate: Gate) -> None:
    gate.open()
    thread = CopyThread(gate)

    def submit(first: int) -> None:
        for job_id in range(first, first + 100):
            thread.submit(store(job_id) if job_id % 3 else load(job_id))

    submitters = [threading.Thread(target=submit, args=(100 * i,)) for i in range(4)]
    for submitter in submitters:
        submitter.start()
    found: list[CopyResult] = []
    while any(submitter.is_alive() for submitter in submitters):
        found += thread.poll(0.01)  # nothing, where none has submitted since the last
    found += results(thread, 400 - len(found))
    assert sorted(result.id for result in found) == list(range(400))
    thread.close()


def new_threads(others: list[threading.Thread]) -> list[threading.Thread]:
    """Copy threads that were not there before."""
    return [
        t for t in threading.enumerate() if t not in others and "kvplugin" in t.name
    ]


class Deadly:
    """Copies of which those in `deaths` take the thread with them."""

    def __init__(self, deaths: dict[int, BaseException]) -> None:
        self.deaths = deaths
        self.done: list[int] = []

    def __call__(self, job: CopyJob) -> int:
        if job.id in self.deaths:
            raise self.deaths[job.id]
        self.done.append(job.id)
        return 1


class TestADeadThread:
    @pytest.mark.parametrize("death", [SystemExit(3), KeyboardInterrupt()])
    def test_its_job_fails_and_the_queue_goes_on(
        self, death: BaseException, caplog: pytest.LogCaptureFixture
    ) -> None:
        copy = Deadly({2: death})
        thread = CopyThread(copy)
        for job_id in (1, 2, 3, 4):
            thread.submit(store(job_id))
        found = {result.id: result.error for result in results(thread, 4)}
        why = f"the copy thread died: {type(death).__name__}: {death}"
        assert found == {1: "", 2: why, 3: "", 4: ""}
        assert copy.done == [1, 3, 4]
        (record,) = [r for r in caplog.records if r.levelname == "ERROR"]
        assert why in record.message
        thread.close()

    def test_one_that_dies_alone_is_replaced_at_the_next_submit(self) -> None:
        thread = CopyThread(Deadly({1: SystemExit()}))
        thread.submit(store(1))
        (dead,) = results(thread, 1)
        assert dead.error.startswith("the copy thread died")
        thread.submit(load(2))
        (good,) = results(thread, 1)
        assert good == CopyResult(2, "", 1, good.seconds)
        thread.close()

    def test_one_that_is_killed_without_a_word_is_noticed(self) -> None:
        """Whatever ends a thread: here an exception set from outside of it."""
        killed, waits = threading.Event(), threading.Event()

        def execute(job: CopyJob) -> int:
            if job.id == 1:
                waits.set()
                while not killed.wait(0.001):
                    pass
            return 1

        others = threading.enumerate()
        thread = CopyThread(execute)
        thread.submit(store(1))
        thread.submit(store(2))
        assert waits.wait(HANG_SECONDS)
        (victim,) = new_threads(others)
        identity = ctypes.c_ulong(victim.ident or 0)
        exception = ctypes.py_object(SystemExit)
        assert ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, exception) == 1
        found = {result.id: bool(result.error) for result in results(thread, 2)}
        killed.set()
        assert found == {1: True, 2: False}
        thread.close()

    def test_each_death_costs_one_job(self) -> None:
        thread = CopyThread(Deadly({i: SystemExit() for i in range(0, 20, 2)}))
        for job_id in range(20):
            thread.submit(store(job_id))
        found = {result.id: bool(result.error) for result in results(thread, 20)}
        assert found == {i: i % 2 == 0 for i in range(20)}
        thread.close()

    def test_closing_after_a_death_finishes_the_queue(self) -> None:
        thread = CopyThread(Deadly({1: SystemExit()}))
        for job_id in (1, 2, 3):
            thread.submit(store(job_id))
        thread.close()
        assert sorted(result.id for result in thread.poll(0)) == [1, 2, 3]

    def test_a_system_without_threads_fails_jobs_and_tries_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_more(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        thread = CopyThread(Deadly({}))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_more)
            thread.submit(store(1))
        (failed,) = thread.poll(0)
        assert failed == CopyResult(1, "no copy thread: can't start new thread")
        thread.submit(store(2))
        (good,) = results(thread, 1)
        assert good.error == ""
        thread.close()


class Hanging:
    """Copies of which those in `hung` take until the test lets them go."""

    def __init__(self, hung: set[int]) -> None:
        self.begun = {job_id: threading.Event() for job_id in hung}
        self.free = {job_id: threading.Event() for job_id in hung}

    def __call__(self, job: CopyJob) -> int:
        if job.id in self.free:
            self.begun[job.id].set()
            assert self.free[job.id].wait(HANG_SECONDS)
        return 100 + job.id

    def wait_for(self, job_id: int) -> None:
        assert self.begun[job_id].wait(HANG_SECONDS)


class TestAHungCopy:
    """It stays overdue; others go on beside it."""

    def test_others_go_on_and_it_ends_when_it_ends(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        now, copy = [0.0], Hanging({1})
        thread = CopyThread(copy, clock=lambda: now[0])
        thread.submit(store(1))
        copy.wait_for(1)
        for job in (store(2), load(3)):
            thread.submit(job)
        assert thread.poll(0) == [], "not hung yet: others wait"
        now[0] += HUNG
        found: list[CopyResult] = []
        while len(found) < 2:
            found += thread.poll(0.01)
        assert [(r.id, r.error, r.nbytes) for r in found] == [
            (3, "", 103),
            (2, "", 102),
        ]
        assert "others go on beside it" in caplog.text
        copy.free[1].set()
        while not (late_ones := thread.poll(0.01)):
            pass
        (late,) = late_ones
        assert (late.id, late.error, late.nbytes) == (1, "", 101)
        thread.submit(load(4))
        (good,) = results(thread, 1)
        assert good.id == 4
        thread.close()

    @pytest.mark.parametrize("others", [0, 1])
    def test_no_step_waits_for_it(self, others: int) -> None:
        now, copy = [0.0], Hanging({1})
        thread = CopyThread(copy, clock=lambda: now[0])
        thread.submit(store(1))
        copy.wait_for(1)
        now[0] += HUNG
        for job_id in range(2, 2 + others):
            thread.submit(store(job_id))
        found = results(thread, others) if others else thread.poll(0)
        assert len(found) == others
        assert thread.poll(10 * HANG_SECONDS) == [], "it does not wait"
        copy.free[1].set()
        while not thread.poll(0.01):
            pass
        thread.close()

    def test_a_slow_copy_with_nobody_behind_it_costs_no_thread(self) -> None:
        now, copy, others = [0.0], Hanging({1}), threading.enumerate()
        thread = CopyThread(copy, clock=lambda: now[0])
        thread.submit(store(1))
        copy.wait_for(1)
        now[0] += 100 * HUNG
        assert thread.poll(0) == []
        assert len(new_threads(others)) == 1
        copy.free[1].set()
        while not thread.poll(0.01):
            pass
        thread.close()

    def test_threads_are_few_however_many_copies_hang(self) -> None:
        now, copy = [0.0], Hanging(set(range(MAX_THREADS)))
        thread = CopyThread(copy, clock=lambda: now[0])
        for job_id in range(MAX_THREADS):
            thread.submit(store(job_id))
            copy.wait_for(job_id)
            thread.submit(store(100 + job_id))
            now[0] += HUNG
            found: list[CopyResult] = []
            while job_id < MAX_THREADS - 1 and not found:
                found += thread.poll(0.01)
        thread.submit(load(200))
        assert thread.poll(0) == [], "all threads hang: the queue waits"
        copy.free[0].set()
        copy.free[MAX_THREADS - 1].set()
        found = []
        while len(found) < 4:
            found += thread.poll(0.01)
        assert {r.id for r in found} == {0, MAX_THREADS - 1, 99 + MAX_THREADS, 200}
        for event in copy.free.values():
            event.set()
        found = []
        while len(found) < MAX_THREADS - 2:
            found += thread.poll(0.01)
        thread.close()

    def test_closing_does_not_wait_for_it_for_ever(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        copy = Hanging({1})
        thread = CopyThread(copy, close_seconds=0.01)
        thread.submit(store(1))
        copy.wait_for(1)
        thread.submit(store(2))
        thread.close()
        assert "1 copies do not end" in caplog.text
        assert thread.poll(0) == [CopyResult(2, error="the copy thread was closed")]
        thread.close()
        copy.free[1].set()
