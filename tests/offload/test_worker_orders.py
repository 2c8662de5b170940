"""What a worker half makes of its orders: each ends once, and is told once."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kvplugin.connectors.identity import StoreIdentity
from kvplugin.connectors.offload.capacity import host_pools
from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.messages import Completion, CopyOrder, HostPool, Report
from kvplugin.connectors.offload.retries import RETRIES
from kvplugin.connectors.offload.worker import OffloadWorker
from kvplugin.contract import (
    NOTHING_HAPPENED,
    CopyJob,
    EngineInfo,
    ModelIdentity,
    Transport,
    WorkerOutcome,
)
from kvplugin.errors import TransferError
from kvplugin.testing.transport import FakeTransport
from kvplugin.wire import decode
from tests.offload.plans import order, plan
from tests.offload.setup_model import Setup

CONFIG = OffloadConfig(cpu_bytes_to_use=1 << 12)


class Bench:
    """A worker half over a fake transport that holds its jobs."""

    def __init__(
        self,
        info: EngineInfo | None = None,
        execute: Callable[[CopyJob], int] = lambda job: 64,
    ) -> None:
        self.info = info or Setup().info()
        self.pools = host_pools(self.info, CONFIG)
        self.opened: list[Sequence[HostPool]] = []
        self.transports: list[FakeTransport] = []
        self._execute = execute
        self.worker = OffloadWorker(self.info, CONFIG, self._open, drain_seconds=1.0)
        self._step = 0

    def _open(self, pools: Sequence[HostPool]) -> Transport:
        self.opened.append(pools)
        self.transports.append(FakeTransport(self._execute, held=True))
        return self.transports[-1]

    @property
    def transport(self) -> FakeTransport:
        return self.transports[-1]

    def step(
        self,
        *,
        loads: Sequence[CopyOrder] = (),
        stores: Sequence[CopyOrder] = (),
        sends: Sequence[str] = (),
        given_up: Sequence[int] = (),
        identity: str = "",
        pools: Sequence[HostPool] | None = None,
    ) -> bytes:
        """Begin and end a step; the plan."""
        self._step += 1
        message = plan(
            self.info,
            self._step,
            self.pools if pools is None else pools,
            loads=loads,
            stores=stores,
            sends=sends,
            given_up=given_up,
            identity=identity,
        )
        self.worker.begin_step(message)
        self.worker.end_step()
        return message


def completions(outcome: WorkerOutcome) -> list[Completion]:
    return decode(outcome.report, Report).completions


def errors(outcome: WorkerOutcome) -> dict[int, str]:
    return {done.id: done.error for done in completions(outcome)}


class TestRefusals:
    def test_an_order_that_is_refused_ends_at_once_without_a_copy(self) -> None:
        bench = Bench()
        bench.step(
            loads=[order(1, [3, 4], [0, 1], refusal="a block is missing")],
            stores=[order(2, [5], [2], refusal="no room"), order(3, [6], [3])],
        )
        outcome = bench.worker.poll()
        assert outcome.finished_loads == {"r1"}
        assert outcome.failed_loads == {"r1": [3, 4]}
        assert errors(outcome) == {1: "a block is missing", 2: "no room"}
        assert [job.id for job in bench.transport.submitted] == [3]
        assert bench.worker.poll() == NOTHING_HAPPENED

    @pytest.mark.parametrize("is_store", [True, False])
    def test_the_null_block_is_never_source_or_target(self, is_store: bool) -> None:
        bench, orders = Bench(), [order(1, [3, 0], [0, 1])]
        bench.step(loads=[] if is_store else orders, stores=orders if is_store else [])
        assert "null block" in errors(bench.worker.poll())[1]
        assert bench.transport.submitted == []

    def test_a_plan_for_another_model_is_refused_and_both_are_named(self) -> None:
        bench = Bench()
        other = replace(bench.info, model=ModelIdentity(name="other", weight_epoch=1))
        theirs, ours = (StoreIdentity.of(i).shared for i in (other, bench.info))
        assert theirs != ours
        bench.step(
            loads=[order(1, [3], [0])],
            stores=[order(2, [4], [1])],
            sends=["gone"],
            identity=theirs,
        )
        outcome = bench.worker.poll()
        assert outcome.failed_loads == {"r1": [3]}
        assert outcome.finished_sends == {"gone"}
        for error in errors(outcome).values():
            assert ours in error
            assert theirs in error
        assert bench.transports == [], "nothing is opened for it"
        bench.step(stores=[order(3, [4], [1])])
        assert [job.id for job in bench.transport.submitted] == [3]

    def test_ranks_of_a_pipeline_have_one_identity(self) -> None:
        bench = Bench(Setup(ranks=2).info(rank=1))
        first = StoreIdentity.of(Setup(ranks=2).info(rank=0)).shared
        bench.step(stores=[order(1, [3], [0])], identity=first)
        assert [job.id for job in bench.transport.submitted] == [1]

    def test_pools_that_change_after_the_first_job_are_refused(self) -> None:
        """Opening again would lose what is stored."""
        bench = Bench()
        bench.step(stores=[order(1, [3], [0])])
        bench.transport.complete_all()
        bench.worker.poll()
        larger = [HostPool([0], bench.pools[0].host_blocks + 1)]
        bench.step(loads=[order(2, [4], [0])], pools=larger)
        outcome = bench.worker.poll()
        assert outcome.failed_loads == {"r2": [4]}
        assert "have changed" in errors(outcome)[2]
        assert len(bench.transports) == 1

    def test_a_worker_that_is_closed_refuses(self) -> None:
        bench = Bench()
        bench.step(stores=[order(1, [3], [0])])
        bench.worker.close()
        bench.step(loads=[order(2, [4], [0])])
        assert errors(bench.worker.poll()) == {2: "the worker half is closed"}
        bench.worker.close()


class TestPools:
    def test_the_plans_pools_win_over_a_smaller_guess(self) -> None:
        bench = Bench()
        larger = [HostPool([0], bench.pools[0].host_blocks + 1)]
        bench.step()
        bench.step(pools=larger, stores=[order(1, [3], [0])])
        assert bench.opened == [bench.pools, larger]
        assert [job.id for job in bench.transport.submitted] == [1]

    def test_a_guess_that_was_larger_stays(self) -> None:
        bench = Bench()
        bench.step()
        smaller = [HostPool([0], bench.pools[0].host_blocks - 1)]
        bench.step(pools=smaller, stores=[order(1, [3], [0])])
        assert bench.opened == [bench.pools]


class TestPlansThatComeAgain:
    def test_nothing_is_done_twice(self, caplog: pytest.LogCaptureFixture) -> None:
        bench = Bench()
        message = bench.step(
            loads=[order(1, [3], [0])], stores=[order(2, [4], [1])], sends=["gone"]
        )
        bench.worker.begin_step(message)
        bench.worker.end_step()
        assert bench.worker.poll().finished_sends == {"gone"}
        assert [job.id for job in bench.transport.submitted] == [1, 2]
        bench.transport.complete_all()
        assert bench.worker.poll().finished_loads == {"r1"}
        bench.worker.begin_step(message)
        assert bench.worker.poll() == NOTHING_HAPPENED
        assert "came again" in caplog.text

    def test_one_whose_poll_never_came_is_said_with_the_next(self) -> None:
        bench = Bench()
        bench.step(sends=["a"], stores=[order(1, [3], [0], refusal="no")])
        bench.step(sends=["b"])
        outcome = bench.worker.poll()
        assert outcome.finished_sends == {"a", "b"}
        assert errors(outcome) == {1: "no"}


class TestResultsThatComeAgain:
    @pytest.mark.parametrize("is_store", [True, False])
    def test_a_job_ends_once(self, is_store: bool) -> None:
        bench, orders = Bench(), [order(1, [3], [0])]
        bench.step(loads=[] if is_store else orders, stores=orders if is_store else [])
        bench.transport.complete(1)
        bench.transport.repeat(1)
        outcome = bench.worker.poll()
        assert [done.id for done in completions(outcome)] == [1]
        bench.step(stores=[order(2, [4], [1])])
        bench.transport.repeat(1)
        outcome = bench.worker.poll()
        assert outcome.finished_loads == frozenset()
        assert completions(outcome) == []


class TestLoadsThatAreGivenUp:
    def test_the_engine_hears_at_once_and_the_scheduler_half_when_it_ends(self) -> None:
        bench = Bench()
        bench.step(loads=[order(1, [3, 4], [0, 1]), order(2, [5], [2])])
        bench.worker.poll()
        bench.step(given_up=[1])
        outcome = bench.worker.poll()
        assert outcome.finished_loads == {"r1"}
        assert outcome.failed_loads == {"r1": [3, 4]}
        assert completions(outcome) == []
        assert bench.worker.poll() == NOTHING_HAPPENED
        bench.transport.complete_all()
        outcome = bench.worker.poll()
        assert outcome.finished_loads == {"r2"}
        assert outcome.failed_loads == {}
        assert errors(outcome) == {1: "", 2: ""}

    @pytest.mark.parametrize("error", ["", "torn"])
    def test_one_that_ends_in_the_same_poll_is_told_once_as_failed(
        self, error: str
    ) -> None:
        """The scheduler half has already made up its mind, as have other ranks."""
        bench = Bench()
        bench.step(loads=[order(1, [3], [0])])
        bench.worker.poll()
        if error:
            bench.transport.fail(1, error)
        else:
            bench.transport.complete(1)
        bench.step(given_up=[1])
        outcome = bench.worker.poll()
        assert outcome.finished_loads == {"r1"}
        assert outcome.failed_loads == {"r1": [3]}
        assert errors(outcome) == {1: error}
        assert bench.worker.poll() == NOTHING_HAPPENED

    def test_one_that_has_ended_long_ago_is_not_told_again(self) -> None:
        bench = Bench()
        bench.step(loads=[order(1, [3], [0])])
        bench.transport.complete(1)
        assert bench.worker.poll().finished_loads == {"r1"}
        bench.step(given_up=[1])
        assert bench.worker.poll().finished_loads == frozenset()

    def test_no_step_waits_for_it(self) -> None:
        bench = Bench()
        bench.step(loads=[order(1, [3], [0])])
        bench.worker.poll()
        assert bench.transport.waits == [CONFIG.copy_wait_ms / 1e3]
        bench.step(given_up=[1])
        bench.worker.poll()
        bench.worker.poll()
        assert bench.transport.waits[1:] == [0, 0]

    def test_an_id_may_load_again_while_its_old_load_hangs(self) -> None:
        bench = Bench()
        bench.step(loads=[order(1, [3], [0])])
        bench.step(given_up=[1])
        bench.worker.poll()
        again = CopyOrder(2, "r1", order(2, [9], [0]).parts, "")
        bench.step(loads=[again])
        assert bench.worker.poll().finished_loads == frozenset()
        bench.transport.complete(1)
        outcome = bench.worker.poll()
        assert outcome.finished_loads == frozenset(), "that was the old one"
        assert errors(outcome) == {1: ""}
        bench.transport.complete(2)
        outcome = bench.worker.poll()
        assert (outcome.finished_loads, outcome.failed_loads) == ({"r1"}, {})

    def test_one_that_ended_in_a_drain_is_told_once(self) -> None:
        bench = Bench()
        bench.step(loads=[order(1, [3], [0])], stores=[order(2, [4], [1])])
        bench.worker.poll()
        bench.transport.complete_all()
        assert [c.id for c in decode(bench.worker.drain(), Report).completions] == [2]
        bench.step(given_up=[1])
        outcome = bench.worker.poll()
        assert outcome.failed_loads == {"r1": [3]}
        assert errors(outcome) == {1: ""}


class TestPlansMadeLate:
    """A plan that starts a load and says in the same breath that it is given up."""

    def test_the_engine_hears_at_once_and_the_scheduler_half_of_the_end(self) -> None:
        bench = Bench()
        bench.step(loads=[order(1, [3, 4], [0, 1])], given_up=[1])
        outcome = bench.worker.poll()
        assert outcome.failed_loads == {"r1": [3, 4]}
        assert outcome.finished_loads == {"r1"}
        assert completions(outcome) == []
        bench.transport.complete_all()
        outcome = bench.worker.poll()
        assert outcome.finished_loads == frozenset()
        assert errors(outcome) == {1: ""}

    def test_one_that_is_refused_is_told_once(self) -> None:
        bench = Bench()
        bench.step(loads=[order(1, [3, 4], [0, 1], refusal="no")], given_up=[1])
        outcome = bench.worker.poll()
        assert outcome.failed_loads == {"r1": [3, 4]}
        assert errors(outcome) == {1: "no"}
        assert bench.worker.poll() == NOTHING_HAPPENED


class TestEnginesThatCannotBeTold:
    """vLLM 0.19 with several groups: wrong text would follow a failed load."""

    info = replace(Setup().info(), reports_failed_loads=False)

    def test_a_failed_load_is_tried_again_and_its_end_is_a_good_one(self) -> None:
        fails = iter([True] * RETRIES + [False])

        def execute(job: CopyJob) -> int:
            if next(fails):
                raise OSError("flaky")
            return 64

        bench = Bench(self.info, execute)
        bench.step(loads=[order(1, [3, 4], [0, 1])])
        outcomes = []
        for _ in range(RETRIES + 1):
            bench.transport.complete_all()
            outcomes.append(bench.worker.poll())
        assert [o.finished_loads for o in outcomes[1:]] == [
            *[frozenset()] * (RETRIES - 1),
            {"r1"},
        ]
        assert outcomes[-1].failed_loads == {}
        assert errors(outcomes[-1]) == {1: ""}
        assert {job.parts[0][1:] for job in _frozen(bench.transport.submitted)} == {
            ((3, 4), (0, 1))
        }

    def test_one_that_fails_for_good_ends_the_engine_and_says_why(self) -> None:
        bench = Bench(self.info)
        bench.step(loads=[order(1, [3], [0])])
        for _ in range(RETRIES):
            bench.transport.fail(bench.transport.pending[0].id, "no space")
            bench.worker.poll()
        bench.transport.fail(bench.transport.pending[0].id, "no space")
        with pytest.raises(TransferError) as caught:
            bench.worker.poll()
        for words in (
            "request r1",
            f"{RETRIES + 1} tries",
            "no space",
            "kvplugin.integration.vllm.scheduler.KVPluginScheduler",
            "newer vLLM",
        ):
            assert words in str(caught.value)
        with pytest.raises(TransferError):
            bench.worker.poll()

    def test_what_is_refused_is_not_tried_again(self) -> None:
        bench = Bench(self.info)
        bench.step(loads=[order(1, [3], [0], refusal="a block is missing")])
        with pytest.raises(TransferError, match="a block is missing"):
            bench.worker.poll()

    def test_failed_stores_are_reported_as_ever(self) -> None:
        bench = Bench(self.info)
        bench.step(stores=[order(1, [3], [0])])
        bench.transport.fail(1, "no space")
        assert errors(bench.worker.poll()) == {1: "no space"}

    def test_a_load_that_hangs_is_waited_for(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        bench = Bench(self.info)
        bench.step(loads=[order(1, [3], [0])])
        bench.step(given_up=[1])
        assert bench.worker.poll().finished_loads == frozenset()
        assert "cannot be told" in caplog.text
        bench.transport.complete(1)
        outcome = bench.worker.poll()
        assert (outcome.finished_loads, outcome.failed_loads) == ({"r1"}, {})


class TestEndsOfLife:
    def test_a_drain_waits_for_a_hung_store_as_long_as_it_may(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        bench = Bench()
        bench.step(stores=[order(1, [3], [0]), order(2, [4], [1])])
        bench.transport.complete(2)
        report = decode(bench.worker.drain(), Report)
        assert [done.id for done in report.completions] == [2]
        assert sum(bench.transport.waits) == pytest.approx(1.0)
        assert "1 stores do not end" in caplog.text

    def test_a_drain_does_not_wait_for_loads(self) -> None:
        bench = Bench()
        bench.step(loads=[order(1, [3], [0])], stores=[order(2, [4], [1])])
        bench.transport.complete(2)
        bench.worker.drain()
        assert sum(bench.transport.waits) == 0

    def test_a_drain_ends_with_its_last_store(self) -> None:
        bench = Bench()
        bench.step(stores=[order(1, [3], [0])])
        bench.transport.held = False
        assert decode(bench.worker.drain(), Report).completions
        assert sum(bench.transport.waits) == 0

    def test_a_store_whose_step_never_ended_is_drained_too(self) -> None:
        bench = Bench()
        message = plan(bench.info, 1, bench.pools, stores=[order(1, [3], [0])])
        bench.worker.begin_step(message)
        bench.transport.held = False
        report = decode(bench.worker.drain(), Report)
        assert [done.id for done in report.completions] == [1]

    def test_closing_twice_is_closing_once(self) -> None:
        bench = Bench()
        bench.step(loads=[order(1, [3], [0])])
        bench.worker.close()
        bench.worker.close()
        assert bench.worker.drain() == bench.worker.drain()

    def test_stores_of_a_step_that_has_not_ended_are_not_begun_any_more(self) -> None:
        bench = Bench()
        message = plan(bench.info, 1, bench.pools, stores=[order(1, [3], [0])])
        bench.worker.begin_step(message)
        bench.worker.close()
        bench.worker.end_step()
        assert bench.transport.submitted == []


def _frozen(jobs: Sequence[CopyJob]) -> list[CopyJob]:
    return [
        job._replace(parts=[(g, tuple(e), tuple(h)) for g, e, h in job.parts])
        for job in jobs
    ]
