"""Halves that do nothing, and say so."""

from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.idle import IdleScheduler, IdleWorker
from kvplugin.connectors.offload.messages import (
    VERSION,
    BlockPairs,
    CopyOrder,
    Plan,
    Report,
)
from kvplugin.connectors.offload.worker import OffloadWorker
from kvplugin.contract import (
    EMPTY_STEP,
    MISS,
    NOTHING_HAPPENED,
    SchedulerHalf,
    WorkerHalf,
)
from kvplugin.wire import decode, encode
from tests.offload.engine_model import Engine
from tests.offload.setup_model import Request, Setup, View, prompt


def order(job_id: int, request_id: str, blocks: list[int]) -> CopyOrder:
    return CopyOrder(job_id, request_id, [BlockPairs(0, blocks, blocks)])


def plan(*, loads: list[CopyOrder], stores: list[CopyOrder]) -> bytes:
    return encode(Plan(VERSION, 5, 8, loads, stores, ["gone"]))


class TestIdleScheduler:
    half: SchedulerHalf = IdleScheduler()

    def test_it_never_hits_and_keeps_nothing_waiting(self) -> None:
        request = View(Request("r", prompt(16), 1, Setup()))
        assert self.half.lookup(request, 0) == MISS
        self.half.allocated(request, ([1, 2, 3, 4],), 0)
        assert list(self.half.watched) == []
        assert self.half.plan_step(EMPTY_STEP) == b""
        assert self.half.finished(request) is False

    def test_it_has_nothing_to_do_and_nothing_to_say(self) -> None:
        self.half.apply([b"a report of whatever"])
        assert self.half.reset()
        assert not self.half.has_pending_work()
        assert not self.half.has_pending_frees()
        assert self.half.take_events() == []
        assert self.half.take_stats() is None
        self.half.check()
        self.half.close()


class TestIdleWorker:
    def test_it_refuses_every_job_of_a_scheduler_half_that_does_not_know(self) -> None:
        half: WorkerHalf = IdleWorker(2, "no memory on this rank")
        half.register({})
        half.begin_step(
            plan(loads=[order(1, "a", [3, 4])], stores=[order(2, "b", [5])])
        )
        half.end_step()
        outcome = half.poll()
        assert outcome.finished_loads == {"a"}
        assert outcome.failed_loads == {"a": [3, 4]}
        assert outcome.finished_sends == {"gone"}
        report = decode(outcome.report, Report)
        assert (report.rank, report.step) == (2, 5)
        assert {(c.id, c.error) for c in report.completions} == {
            (1, "no memory on this rank"),
            (2, "no memory on this rank"),
        }

    def test_it_says_so_once(self) -> None:
        half = IdleWorker(0, "off")
        half.begin_step(plan(loads=[order(1, "a", [3])], stores=[]))
        half.poll()
        assert half.poll() == NOTHING_HAPPENED
        half.begin_step(b"")
        half.end_step()
        assert half.poll() == NOTHING_HAPPENED

    def test_it_has_nothing_to_finish(self) -> None:
        half = IdleWorker(0, "off")
        assert half.drain() == b""
        half.close()


def test_one_rank_that_could_not_start_costs_hits_and_nothing_else() -> None:
    engine = Engine(Setup(ranks=2))
    engine.workers[1] = IdleWorker(1, "no memory")
    engine.serve(prompt(16), prompt(16), prompt(24))
    assert engine.totals.counters["failed_stores"] == 3
    assert engine.totals.counters["stored_blocks"] == 0
    assert engine.offered(prompt(16)) == MISS
    engine.check_idle()


def test_a_worker_without_a_plan_has_nothing_to_say() -> None:
    config = OffloadConfig(cpu_bytes_to_use=1024)
    worker = OffloadWorker(Setup().info(), config)
    worker.begin_step(b"")
    worker.end_step()
    assert worker.poll() == NOTHING_HAPPENED
    worker.close()
