"""Metrics: only names of the table, only what happened, nothing negative."""

import pytest

from kvplugin.connectors.metrics import Counters, Kind, Metric
from kvplugin.connectors.offload.metrics import METRICS
from kvplugin.connectors.offload.recompute import RecomputeRate
from kvplugin.contract import GroupKind
from tests.offload.engine_model import Clock, Engine
from tests.offload.half import Half, engine, group, request
from tests.offload.jobs import Totals
from tests.offload.setup_model import Setup, prompt

TABLE = (
    Metric("eggs", Kind.COUNTER, "Eggs laid."),
    Metric("hens", Kind.GAUGE, "Hens present."),
    Metric("weight", Kind.HISTOGRAM, "Grams an egg.", (40.0, 60.0)),
)


class TestCounters:
    def test_a_snapshot_is_what_changed_since_the_last_one(self) -> None:
        counters = Counters(TABLE)
        counters.add("eggs")
        counters.add("eggs", 2)
        counters.set("hens", 5)
        counters.set("hens", 4)
        counters.observe("weight", 55)
        counters.observe("weight", 44)
        stats = counters.take()
        assert stats is not None
        assert stats.counters == {"eggs": 3}
        assert stats.gauges == {"hens": 4}
        assert stats.observations == {"weight": [55, 44]}
        assert counters.take() is None
        counters.add("eggs")
        later = counters.take()
        assert later is not None
        assert (later.counters, later.gauges) == ({"eggs": 1}, {})
        assert stats.counters == {"eggs": 3}, "a snapshot does not change"

    @pytest.mark.parametrize("name", ["hens", "weight", "cocks"])
    def test_only_counters_of_the_table_count(self, name: str) -> None:
        with pytest.raises(KeyError, match=name):
            Counters(TABLE).add(name)

    @pytest.mark.parametrize("name", ["eggs", "weight", "cocks"])
    def test_only_gauges_of_the_table_are_set(self, name: str) -> None:
        with pytest.raises(KeyError, match=name):
            Counters(TABLE).set(name, 1)

    @pytest.mark.parametrize("name", ["eggs", "hens", "cocks"])
    def test_only_histograms_of_the_table_observe(self, name: str) -> None:
        with pytest.raises(KeyError, match=name):
            Counters(TABLE).observe(name, 1)


class TestTable:
    def test_names_are_unique_and_explained(self) -> None:
        names = [metric.name for metric in METRICS]
        assert len(set(names)) == len(names)
        assert all(metric.help.endswith(".") for metric in METRICS)

    def test_histograms_have_rising_buckets_and_nothing_else_has_any(self) -> None:
        for metric in METRICS:
            assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
            assert list(metric.buckets) == sorted(set(metric.buckets))


def troubled_engine() -> Engine:
    """One that has met everything that is counted."""
    engine = Engine(
        Setup(token_budget=64),
        host_blocks=20,
        offload_policy="min_depth",
        offload_policy_options={"min_tokens": 20},
    )
    engine.serve(prompt(8, seed=3))
    engine.serve(prompt(64))
    engine.forget_local()
    engine.serve(prompt(64))
    engine.forget_local()
    engine.jobs.hold()
    engine.add(prompt(64))
    engine.step()
    engine.jobs.fail(*engine.jobs.loads)
    engine.jobs.let_go()
    engine.run()
    engine.forget_local()
    engine.jobs.hold()
    engine.add(prompt(64))
    engine.step()
    engine.clock.now += 30
    engine.step()
    engine.jobs.let_go()
    engine.run()
    engine.memories[0].broken = True
    engine.serve(prompt(20, seed=1))
    engine.memories[0].broken = False
    engine.serve(prompt(100, seed=2))
    return engine


class TestOffload:
    def test_every_metric_moves_when_its_event_happens(self) -> None:
        totals = troubled_engine().totals
        seen = {*totals.counters, *totals.gauges, *totals.observations}
        assert seen == {metric.name for metric in METRICS}
        assert all(totals.counters.values())

    def test_blocks_are_conserved(self) -> None:
        engine = troubled_engine()
        counters, gauges = engine.totals.counters, engine.totals.gauges
        dropped = 15 + 15  # keys of the loads that failed and that was given up
        assert gauges["host_blocks_stored"] == (
            counters["stored_blocks"] - counters["evicted_blocks"] - dropped
        )
        assert gauges["host_blocks_stored"] <= gauges["host_blocks"] == 20
        assert gauges["pending_jobs"] == 0

    def test_jobs_under_way_are_seen_while_they_are(self) -> None:
        engine = Engine()
        engine.jobs.hold()
        engine.add(prompt(16), max_new_tokens=3)
        engine.step()
        assert engine.totals.gauges["pending_jobs"] == 1
        engine.jobs.let_go()
        engine.run()
        assert engine.totals.gauges["pending_jobs"] == 0

    def test_a_step_in_which_nothing_happens_counts_nothing(self) -> None:
        engine = Engine()
        engine.serve(prompt(16))
        engine.totals = Totals()
        engine.steps(3)
        assert engine.scheduler.take_stats() is None
        assert not engine.totals.counters

    def test_the_wait_for_a_load_is_measured_by_the_clock(self) -> None:
        engine = Engine()
        engine.serve(prompt(16))
        engine.forget_local()
        engine.jobs.hold()
        engine.add(prompt(16))
        engine.step()
        engine.clock.now += 0.25
        engine.jobs.let_go()
        engine.run()
        assert engine.totals.observations["load_seconds"] == [0.25]


def test_errors_that_are_different_each_time_do_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    half = Half(engine(group(GroupKind.FULL)))
    for number in range(100):
        view = request([*range(16)], name=str(number))
        half.admit(view, [1, 2, 3, 4])
        plan = half.step(view, 0, 16)
        assert plan is not None
        half.end(plan.stores[0].id, f"copy {number} failed")
        half.scheduler.finished(view)
    assert 1 < len(caplog.messages) < 20
    assert half.stat("failed_stores") == 100


class TestRecomputeRate:
    """Seconds that loads save, learnt from steps that computed prompts."""

    def test_it_knows_nothing_before_the_first_prefill(self) -> None:
        assert RecomputeRate(Clock()).seconds_for(1000) == 0

    def test_it_learns_the_seconds_a_token_of_a_prefill(self) -> None:
        clock = Clock()
        rate = RecomputeRate(clock)
        assert rate.started(1, 100)
        clock.now += 2
        rate.ended(1)
        assert rate.seconds_for(50) == pytest.approx(1)

    def test_decode_steps_teach_nothing(self) -> None:
        rate = RecomputeRate(Clock())
        assert not rate.started(1, 63)
        rate.ended(1)
        assert rate.seconds_for(1000) == 0

    def test_the_first_report_of_a_step_counts(self) -> None:
        clock = Clock()
        rate = RecomputeRate(clock)
        rate.started(1, 100)
        clock.now += 1
        rate.ended(1)
        clock.now += 99
        rate.ended(1)
        rate.ended(7)
        assert rate.seconds_for(100) == pytest.approx(1)

    def test_steps_that_are_never_reported_are_forgotten(self) -> None:
        """Else each would be remembered for ever, and a late report would count what
        else was done meanwhile."""
        clock = Clock()
        rate = RecomputeRate(clock)
        rate.started(1, 100)
        rate.started(2, 100)
        clock.now += 1
        rate.ended(2)
        clock.now += 99
        rate.ended(1)
        assert rate.seconds_for(100) == pytest.approx(1)

    def test_newer_steps_weigh_more(self) -> None:
        clock = Clock()
        rate = RecomputeRate(clock)
        for step in range(100):
            rate.started(step, 100)
            clock.now += 1 if step < 50 else 3
            rate.ended(step)
        assert rate.seconds_for(100) == pytest.approx(3, rel=0.01)

    def test_a_load_is_worth_the_prefill_that_it_spares(self) -> None:
        engine = Engine(Setup(token_budget=80))

        def take_time(reports: list[bytes]) -> list[bytes]:
            engine.clock.now += 0.8
            return reports

        engine.deliver = take_time
        engine.serve(prompt(80))
        engine.forget_local()
        engine.serve(prompt(80))
        assert engine.totals.observations["recompute_seconds_saved"] == [
            pytest.approx(0.76)
        ]
