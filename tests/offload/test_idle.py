"""Halves that do nothing, and say so."""

from kvplugin.connectors.idle import IdleScheduler, IdleWorker
from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.messages import CopyOrder, HostPool, Report
from kvplugin.connectors.offload.refusing import RefusingWorker
from kvplugin.connectors.offload.worker import OffloadWorker
from kvplugin.contract import (
    EMPTY_STEP,
    MISS,
    NOTHING_HAPPENED,
    SchedulerHalf,
    WorkerHalf,
)
from kvplugin.wire import decode
from tests.offload import plans
from tests.offload.engine_model import Engine
from tests.offload.plans import order
from tests.offload.setup_model import Request, Setup, View, prompt


def plan(step: int = 5, *, loads: list[CopyOrder], stores: list[CopyOrder]) -> bytes:
    """Of whatever identity: it makes no difference."""
    return plans.plan(
        Setup().info(),
        step,
        [HostPool([0], 8)],
        loads=loads,
        stores=stores,
        sends=["gone"],
        given_up=[1],
        identity="another",
    )


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


def test_an_idle_worker_has_nothing_to_say() -> None:
    half: WorkerHalf = IdleWorker()
    half.register({})
    half.begin_step(b"a plan of whatever")
    half.end_step()
    assert half.poll() == NOTHING_HAPPENED
    assert half.drain() == b""
    half.close()


class TestRefusingWorker:
    def test_it_refuses_every_job_of_a_scheduler_half_that_does_not_know(self) -> None:
        half: WorkerHalf = RefusingWorker(2, "no memory on this rank")
        half.register({})
        half.begin_step(
            plan(
                loads=[order(1, [3, 4], [0, 1]), order(3, [6], [2], refusal="why")],
                stores=[order(2, [5], [3])],
            )
        )
        half.end_step()
        outcome = half.poll()
        assert outcome.finished_loads == {"r1", "r3"}
        assert outcome.failed_loads == {"r1": [3, 4], "r3": [6]}
        assert outcome.finished_sends == {"gone"}
        report = decode(outcome.report, Report)
        assert (report.rank, report.step) == (2, 5)
        assert {(c.id, c.error) for c in report.completions} == {
            (1, "no memory on this rank"),
            (2, "no memory on this rank"),
            (3, "why"),
        }

    def test_it_says_so_once(self) -> None:
        half = RefusingWorker(0, "off")
        message = plan(loads=[order(1, [3], [0])], stores=[])
        half.begin_step(message)
        half.begin_step(message)
        assert half.poll().finished_loads == {"r1"}
        assert half.poll() == NOTHING_HAPPENED
        half.begin_step(message)
        assert half.poll() == NOTHING_HAPPENED
        half.begin_step(b"")
        half.end_step()
        assert half.poll() == NOTHING_HAPPENED

    def test_two_plans_between_two_polls_are_both_refused(self) -> None:
        half = RefusingWorker(0, "off")
        half.begin_step(plan(5, loads=[order(1, [3], [0])], stores=[]))
        half.begin_step(plan(6, loads=[], stores=[order(2, [4], [1])]))
        outcome = half.poll()
        assert outcome.failed_loads == {"r1": [3]}
        report = decode(outcome.report, Report)
        assert (report.step, [done.id for done in report.completions]) == (6, [1, 2])

    def test_it_has_nothing_to_finish(self) -> None:
        half = RefusingWorker(0, "off")
        assert half.drain() == b""
        half.close()


def test_one_rank_that_could_not_start_costs_hits_and_nothing_else() -> None:
    engine = Engine(Setup(ranks=2))
    engine.workers[1] = RefusingWorker(1, "no memory")
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
