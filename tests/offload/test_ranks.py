"""Completion is a count over ranks; reports may come in any order, late and twice."""

import msgpack
import pytest

from kvplugin.connectors.offload.copy_thread import MOST_SECONDS
from kvplugin.connectors.offload.messages import VERSION, Completion, Report
from kvplugin.contract import MISS, CopyJob, Lookup
from kvplugin.errors import IntegrityError
from kvplugin.wire import encode
from tests.offload.engine_model import Engine
from tests.offload.setup_model import Phase, Request, Setup, prompt

RANKS = 3


def storing() -> tuple[Engine, CopyJob]:
    """A store is under way on three ranks."""
    engine = Engine(Setup(ranks=RANKS))
    engine.jobs.hold()
    engine.add(prompt(16))
    engine.step()
    (store,) = engine.jobs.stores
    return engine, store


def loading(**setup: str) -> tuple[Engine, CopyJob, Request]:
    """A load is under way on three ranks."""
    engine = Engine(Setup(ranks=RANKS, **setup))  # type: ignore[arg-type]
    engine.serve(prompt(16))
    engine.forget_local()
    engine.jobs.hold()
    request = engine.add(prompt(16))
    engine.step()
    (load,) = engine.jobs.loads
    return engine, load, request


def report(job: CopyJob, rank: int, error: str = "") -> bytes:
    """What a worker half says of a job, whether it is so or not."""
    return encode(Report(VERSION, rank, 0, [Completion(job.id, error, 0, 0.0)]))


class TestAllRanksMustReport:
    def test_a_store_can_be_hit_when_the_last_rank_has_it(self) -> None:
        engine, store = storing()
        for transport in engine.transports[1:]:
            transport.complete(store.id)
            engine.step()
            assert not engine.offered(prompt(16)).ready
        engine.transports[0].complete(store.id)
        engine.step()
        assert engine.offered(prompt(16)) == Lookup(16)
        engine.check_idle()

    def test_a_load_ends_when_the_last_rank_has_it(self) -> None:
        engine, load, request = loading()
        for transport in engine.transports[:-1]:
            transport.complete(load.id)
            engine.step()
            assert request.phase is Phase.PARKED
        engine.transports[-1].complete(load.id)
        engine.jobs.let_go()
        engine.run()
        engine.check_idle()

    @pytest.mark.parametrize("failing", range(RANKS))
    def test_a_store_that_fails_on_one_rank_has_failed(self, failing: int) -> None:
        engine, store = storing()
        for rank, transport in enumerate(engine.transports):
            if rank == failing:
                transport.fail(store.id)
            else:
                transport.complete(store.id)
            engine.step()
        assert engine.offered(prompt(16)) == MISS
        assert engine.totals.counters["failed_stores"] == 1
        engine.check_idle()

    @pytest.mark.parametrize("policy", ["recompute", "fail"])
    @pytest.mark.parametrize("failing", range(RANKS))
    def test_a_load_that_fails_on_one_rank_has_failed(
        self, failing: int, policy: str
    ) -> None:
        engine, load, request = loading(on_failed_load=policy)
        for rank, transport in enumerate(engine.transports):
            if rank == failing:
                transport.tear(load.id, rank)
            else:
                transport.complete(load.id)
            engine.step()
        assert engine.totals.counters["failed_loads"] == 1
        assert engine.offered(prompt(16)) == MISS
        engine.jobs.let_go()
        engine.run()
        assert request.failed == (policy == "fail")
        engine.check_idle()

    def test_a_rank_without_memory_spoils_no_answer(self) -> None:
        engine = Engine(Setup(ranks=RANKS))
        engine.memories[1].broken = True
        engine.serve(prompt(16), prompt(16), prompt(20))
        engine.check_idle()
        assert engine.totals.counters["stored_blocks"] == 0
        assert engine.jobs.all_loads == []

    def test_numbers_are_summed_over_ranks(self) -> None:
        engine, store = storing()
        engine.jobs.complete(store)
        engine.step()
        assert engine.totals.counters["stored_blocks"] == 4
        assert engine.totals.counters["stored_bytes"] == RANKS * 4 * 64


class TestUnexpectedReports:
    def test_a_rank_that_reports_twice_is_counted_once(self) -> None:
        engine, store = storing()
        engine.scheduler.apply([report(store, 0), report(store, 0), report(store, 0)])
        assert not engine.offered(prompt(16)).ready

    def test_what_a_rank_said_first_counts(self) -> None:
        engine, store = storing()
        engine.scheduler.apply(
            [report(store, 0), report(store, 0, "no"), report(store, 1)]
        )
        engine.scheduler.apply([report(store, 2), report(store, 2, "no")])
        assert engine.offered(prompt(16)) == Lookup(16)

    def test_reports_of_jobs_that_have_ended_are_ignored(self) -> None:
        engine, store = storing()
        engine.jobs.complete(store)
        engine.step()
        engine.scheduler.apply([report(store, rank, "no") for rank in range(RANKS)])
        engine.check_idle()
        assert engine.offered(prompt(16)) == Lookup(16)

    def test_reports_of_jobs_that_never_were_are_ignored(self) -> None:
        engine, store = storing()
        engine.scheduler.apply([report(store._replace(id=99), 0)])
        engine.check()

    def test_reports_of_ranks_that_do_not_exist_are_ignored(self) -> None:
        engine, store = storing()
        engine.scheduler.apply([report(store, rank) for rank in (0, 1, 7)])
        assert not engine.offered(prompt(16)).ready

    def test_the_order_of_reports_does_not_matter(self) -> None:
        engine, store = storing()
        engine.deliver = lambda reports: reversed(reports)
        engine.jobs.complete(store)
        engine.run()
        assert engine.offered(prompt(16)) == Lookup(16)

    def test_reports_may_be_repeated_for_ever(self) -> None:
        engine = Engine(Setup(ranks=2, token_budget=8), host_blocks=8)
        heard: list[bytes] = []

        def repeat_all(reports: list[bytes]) -> list[bytes]:
            heard.extend(reports)
            return [*heard, *reversed(heard)]

        engine.deliver = repeat_all
        for seed in (1, 2, 3, 1, 2):
            engine.serve(prompt(21, seed))
            engine.forget_local()
        engine.check_idle()

    @pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x80"])
    def test_what_is_no_report_is_refused(self, data: bytes) -> None:
        engine, _ = storing()
        with pytest.raises(IntegrityError, match="not a valid Report"):
            engine.scheduler.apply([data])

    def test_messages_of_another_version_are_refused(self) -> None:
        engine, store = storing()
        for message, hear in (
            (engine.plan, engine.workers[0].begin_step),
            (report(store, 0), lambda data: engine.scheduler.apply([data])),
        ):
            version, *fields = msgpack.unpackb(message)
            with pytest.raises(IntegrityError, match="install one version of kvplugin"):
                hear(msgpack.packb([version + 1, *fields]))


class TestDrain:
    """Waiting for stores, where nobody may step any more."""

    def test_a_drained_store_can_be_hit_and_holds_nothing(self) -> None:
        engine = Engine(Setup(asks_pending_work=False))
        engine.jobs.hold()
        engine.add(prompt(16), max_new_tokens=3)
        engine.step()
        engine.jobs.let_go()
        engine.scheduler.apply([worker.drain() for worker in engine.workers])
        assert not engine.scheduler.has_pending_frees()
        assert engine.offered(prompt(16)) == Lookup(16)
        engine.run()
        engine.check_idle()

    def test_a_load_that_ends_in_a_drain_is_told_to_the_engine_later(self) -> None:
        engine, _, request = loading()
        engine.add(prompt(16, seed=1))
        engine.step()
        engine.jobs.let_go()
        engine.scheduler.apply([worker.drain() for worker in engine.workers])
        assert not engine.scheduler.has_pending_frees()
        assert engine.scheduler.has_pending_work(), "of the load nobody knows yet"
        assert request.phase is Phase.PARKED
        engine.run()
        engine.check_idle()

    def test_a_store_that_does_not_end_is_given_up_with_an_error(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine, store = storing()
        engine.scheduler.apply([worker.drain() for worker in engine.workers])
        assert "1 stores do not end" in caplog.text
        assert engine.scheduler.has_pending_work(), "it still reads its blocks"
        engine.jobs.complete(store)
        engine.run()
        engine.check_idle()

    def test_a_drain_of_nothing_is_a_report_of_nothing(self) -> None:
        engine = Engine()
        engine.serve(prompt(16))
        engine.scheduler.apply([worker.drain() for worker in engine.workers])
        engine.check_idle()

    def test_a_drain_waits_for_stores_and_never_for_loads_alone(self) -> None:
        engine, _, _ = loading()
        waits = engine.transports[0].waits
        waits.clear()
        engine.workers[0].drain()
        assert sum(waits) == 0
        engine.add(prompt(16, seed=1))
        engine.step()
        waits.clear()
        engine.workers[0].drain()
        assert sum(waits) == pytest.approx(MOST_SECONDS)


def test_a_step_waits_for_its_copies_as_long_as_is_configured() -> None:
    engine = Engine(copy_wait_ms=7)
    engine.serve(prompt(16))
    assert engine.transports[0].waits == [0.007]
