"""The fake transport keeps the transport's promises, and breaks them to order."""

import pytest

from kvplugin.contract import CopyJob, CopyResult, Transport
from kvplugin.errors import IntegrityError
from kvplugin.testing.transport import FakeTransport


class Bench:
    """A transport over two lists; each block is one of their items."""

    def __init__(self, *, held: bool = True) -> None:
        self.engine = [f"engine {i}" for i in range(6)]
        self.tier = [f"tier {i}" for i in range(6)]
        self.transport = FakeTransport(self._move, held=held)

    def _move(self, job: CopyJob) -> int:
        for _, engine_ids, tier_ids in job.parts:
            for engine, tier in zip(engine_ids, tier_ids, strict=True):
                if job.store:
                    self.tier[tier] = self.engine[engine]
                else:
                    self.engine[engine] = self.tier[tier]
        return sum(10 * len(ids) for _, ids, _ in job.parts)


STORE = CopyJob(1, store=True, parts=[(0, [0, 1], [3, 4]), (1, [2], [5])])
LOAD = CopyJob(2, store=False, parts=[(0, [4], [0])])


def test_it_is_a_transport() -> None:
    transport: Transport = Bench().transport
    transport.submit(STORE)
    assert transport.poll(wait=10) == []


def test_nothing_moves_and_nothing_ends_while_jobs_are_held() -> None:
    bench = Bench()
    bench.transport.submit(STORE)
    assert bench.transport.poll(0) == []
    assert bench.transport.pending == [STORE]
    assert bench.tier[3] == "tier 3"


def test_a_poll_notes_how_long_it_was_to_wait_and_does_not() -> None:
    bench = Bench()
    bench.transport.submit(STORE)
    bench.transport.poll(0)
    bench.transport.poll(3600)
    assert bench.transport.waits == [0, 3600]


def test_jobs_that_are_not_held_end_at_the_next_poll() -> None:
    bench = Bench(held=False)
    bench.transport.submit(STORE)
    bench.transport.submit(LOAD)
    assert bench.tier[3] == "tier 3"
    assert bench.transport.poll(0) == [
        CopyResult(1, nbytes=30),
        CopyResult(2, nbytes=10),
    ]
    assert bench.tier[3:] == ["engine 0", "engine 1", "engine 2"]
    assert bench.engine[4] == "tier 0"
    assert bench.transport.poll(0) == []


def test_bytes_are_read_when_a_job_is_executed() -> None:
    bench = Bench()
    bench.transport.submit(STORE)
    bench.engine[0] = "someone else's"
    bench.transport.complete(1)
    assert bench.tier[3] == "someone else's"


def test_jobs_end_in_the_order_that_the_test_says() -> None:
    bench = Bench()
    bench.transport.submit(STORE)
    bench.transport.submit(LOAD)
    bench.transport.complete(2)
    bench.transport.complete(1)
    assert [result.id for result in bench.transport.poll(0)] == [2, 1]
    assert bench.transport.ended == [2, 1]
    assert bench.transport.submitted == [STORE, LOAD]


def test_a_failed_job_moves_nothing() -> None:
    bench = Bench()
    bench.transport.submit(STORE)
    bench.transport.fail(1, "peer is gone")
    assert bench.transport.poll(0) == [CopyResult(1, error="peer is gone")]
    assert bench.tier == [f"tier {i}" for i in range(6)]


@pytest.mark.parametrize("blocks", [0, 1, 2, 3, 9])
def test_a_torn_job_moves_its_first_blocks_and_fails(blocks: int) -> None:
    bench = Bench()
    bench.transport.submit(STORE)
    bench.transport.tear(1, blocks)
    (result,) = bench.transport.poll(0)
    assert result.error
    moved = [tier.startswith("engine") for tier in bench.tier[3:]]
    assert moved == [i < blocks for i in range(3)]


def test_the_report_of_bytes_that_have_moved_may_come_late() -> None:
    bench = Bench()
    bench.transport.submit(STORE)
    bench.transport.move(1)
    assert bench.tier[3] == "engine 0"
    assert bench.transport.poll(0) == []
    bench.engine[0] = "someone else's"
    bench.transport.complete(1)
    assert bench.tier[3] == "engine 0", "bytes move once"
    assert bench.transport.poll(0) == [CopyResult(1, nbytes=30)]


def test_a_result_may_come_twice() -> None:
    bench = Bench()
    bench.transport.submit(STORE)
    bench.transport.complete(1)
    bench.transport.repeat(1)
    assert bench.transport.poll(0) == [CopyResult(1, nbytes=30)] * 2
    bench.transport.repeat(1)
    assert bench.transport.poll(0) == [CopyResult(1, nbytes=30)]


def test_what_execute_raises_is_the_error_of_the_result() -> None:
    def refuse(job: CopyJob) -> int:
        raise OSError(f"no space for job {job.id}")

    transport = FakeTransport(refuse)
    transport.submit(STORE)
    assert transport.poll(0) == [CopyResult(1, error="OSError: no space for job 1")]


def test_an_assertion_in_execute_ends_the_test() -> None:
    def check(job: CopyJob) -> int:
        raise AssertionError(f"job {job.id} must not be")

    transport = FakeTransport(check)
    transport.submit(STORE)
    with pytest.raises(AssertionError, match="job 1 must not be"):
        transport.poll(0)


def test_closing_completes_what_is_under_way_and_refuses_more() -> None:
    bench = Bench()
    bench.transport.submit(STORE)
    bench.transport.close()
    assert bench.tier[3] == "engine 0"
    with pytest.raises(IntegrityError, match="after the end"):
        bench.transport.submit(LOAD)


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_job_is_submitted_once(has_ended: bool) -> None:
    bench = Bench()
    bench.transport.submit(STORE)
    if has_ended:
        bench.transport.complete(1)
    with pytest.raises(IntegrityError, match="submitted twice"):
        bench.transport.submit(STORE)
