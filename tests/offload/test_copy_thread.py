"""The copy thread keeps a transport's promises. Limits here only end what hangs."""

import threading
from collections.abc import Iterator

import pytest

from kvplugin.connectors.offload.copy_thread import CopyThread
from kvplugin.contract import CopyJob, CopyResult, Transport

HANG_SECONDS = 60.0
"""Nothing here takes a thousandth of it."""


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
    found = results(thread, 400)
    for submitter in submitters:
        submitter.join(HANG_SECONDS)
    assert sorted(result.id for result in found) == list(range(400))
    thread.close()
