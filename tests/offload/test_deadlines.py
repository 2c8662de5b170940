"""Transfers that do not end: who waited goes on, what they use stays theirs."""

from collections.abc import Callable

import pytest

from kvplugin.contract import MISS, Lookup, Step
from tests.offload.engine_model import Clock, Engine
from tests.offload.setup_model import Phase, Setup, prompt
from tests.offload.situations import held_load, held_store


def expire(engine: Engine, seconds: float = 30) -> None:
    engine.clock.now += seconds
    engine.step()


def run_beside(engine: Engine) -> None:
    """Go on: stores end, the load that was given up does not."""
    for _ in range(10):
        engine.jobs.complete(*engine.jobs.stores)
        engine.step()
    assert not engine.has_work()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("outcome", ["complete", "fail", "move"])
def test_a_load_that_does_not_end_is_computed_instead(ranks: int, outcome: str) -> None:
    engine = Engine(Setup(ranks=ranks, on_failed_load="recompute"))
    request, load = held_load(engine)
    expire(engine, 29.9)
    assert request.phase is Phase.PARKED
    expire(engine, 0.1)
    run_beside(engine)
    assert request.phase is Phase.FINISHED
    assert engine.blocks.held, "late bytes may still be written there"
    assert engine.totals.gauges["overdue_blocks"] == 3
    assert engine.totals.counters["given_up_loads"] == 1
    for transport in engine.transports:
        getattr(transport, outcome)(load.id)
    engine.jobs.let_go()
    engine.steps(2)
    assert engine.totals.gauges["overdue_blocks"] == 0
    assert engine.totals.counters["failed_loads"] == 1, "once, however it ends"
    assert engine.totals.counters["given_up_loads"] == 1
    assert engine.totals.counters["loaded_blocks"] == 0
    engine.check_idle()


def test_a_load_that_does_not_end_may_end_its_request() -> None:
    engine = Engine(Setup(on_failed_load="fail"))
    request, load = held_load(engine)
    expire(engine)
    assert request.failed
    assert set(engine.blocks.held) == set(load.parts[0][1])
    engine.jobs.let_go()
    engine.steps(2)
    engine.check_idle()


def test_a_load_given_up_after_the_end_of_its_request_frees_its_row_once() -> None:
    engine = Engine()
    request, _ = held_load(engine)
    engine.abort(request)
    expire(engine)
    engine.jobs.let_go()
    engine.steps(2)
    engine.check_idle()


def test_what_a_load_hangs_on_is_not_offered_again() -> None:
    engine = Engine()
    _, load = held_load(engine)
    expire(engine)
    assert not engine.offered(prompt(16)).tokens, "nor while it is being stored anew"
    run_beside(engine)
    engine.forget_local()
    engine.add(prompt(16))
    engine.step()
    (hung, new) = engine.jobs.loads
    assert hung == load
    assert set(hung.parts[0][2]).isdisjoint(new.parts[0][2]), "the same host blocks"


def test_a_late_failure_takes_nothing_from_others() -> None:
    engine = Engine()
    _, load = held_load(engine)
    expire(engine)
    run_beside(engine)
    engine.jobs.fail(load)
    engine.steps(2)
    engine.check_idle()
    assert engine.offered(prompt(16)) == Lookup(16), "as it was recomputed"


def test_a_store_that_does_not_end_holds_its_blocks_and_nobody_up() -> None:
    engine = Engine(Setup(asks_pending_work=False))
    _, store = held_store(engine)
    while engine.running:
        engine.step()
    assert engine.has_work(), "the end of the request waits for the store"
    expire(engine)
    engine.run()
    assert engine.blocks.held
    assert not engine.scheduler.has_pending_work()
    engine.jobs.complete(store)
    engine.steps(2)
    engine.check_idle()


def test_many_overdue_blocks_stop_hits_and_stores_until_they_end() -> None:
    engine = Engine(Setup(usable_blocks=32), max_overdue_fraction=0.1)
    engine.serve(prompt(16, 1))
    engine.forget_local()
    engine.jobs.hold()
    engine.add(prompt(16, 2))
    engine.step()
    (store,) = engine.jobs.stores
    assert engine.offered(prompt(16, 1)) == Lookup(16)
    expire(engine)
    assert engine.offered(prompt(16, 1)) == MISS, "4 of 33 blocks are overdue"
    late = engine.add([*prompt(16, 3)], max_new_tokens=3)
    engine.step()
    assert late.phase is Phase.RUNNING
    assert engine.jobs.stores == [store]
    engine.jobs.complete(store)
    engine.steps(1)
    assert engine.offered(prompt(16, 1)) == Lookup(16)
    engine.jobs.let_go()
    engine.run()
    engine.check_idle()


def test_what_was_computed_meanwhile_is_stored_when_they_have_ended() -> None:
    engine = Engine(Setup(usable_blocks=32, token_budget=8), max_overdue_fraction=0.1)
    engine.jobs.hold()
    engine.add(prompt(16, 2))
    engine.steps(2)
    stores = engine.jobs.stores
    expire(engine)
    engine.add(prompt(32, 3))
    engine.steps(2)
    assert engine.jobs.stores == stores
    engine.jobs.let_go()
    engine.run()
    assert engine.offered(prompt(32, 3)) == Lookup(32)
    engine.check_idle()


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_the_share_is_the_users_choice(fraction: float) -> None:
    engine = Engine(max_overdue_fraction=fraction)
    engine.serve(prompt(16, 1))
    engine.forget_local()
    engine.jobs.hold()
    engine.add(prompt(4, 2))
    engine.step()
    expire(engine)
    assert engine.offered(prompt(16, 1)) == (MISS if fraction == 0 else Lookup(16))


def test_a_reset_does_not_wait_for_a_load_that_every_rank_has_given_up() -> None:
    """Its engine blocks have no hash, and are the connector's until it ends."""
    engine = Engine(Setup(ranks=2))
    _, load = held_load(engine)
    kept: list[bytes] = []
    engine.deliver = lambda reports: kept.extend(reports[1:]) or reports[:1]
    expire(engine)
    assert not engine.scheduler.reset(), "one rank may not have said so"
    engine.deliver = lambda reports: reports
    engine.scheduler.apply(kept)
    assert engine.scheduler.reset()
    run_beside(engine)
    engine.jobs.complete(load)
    engine.steps(2)
    assert engine.scheduler.reset()
    engine.check_idle()


def test_a_load_that_hangs_from_a_plan_made_too_late_is_given_up() -> None:
    """The plan that starts it names it as given up: the engine stood still between."""
    engine = Engine(Setup(on_failed_load="recompute"))
    engine.serve(prompt(16))
    engine.forget_local()
    engine.jobs.hold()
    request = engine.add(prompt(16))
    plan = engine.scheduler.plan_step
    engine.scheduler.plan_step = late = Late(engine.clock, plan)  # type: ignore
    engine.step()
    assert late.seconds == 0
    run_beside(engine)
    assert request.phase is Phase.FINISHED
    assert engine.totals.counters["given_up_loads"] == 1


class Late:
    """`plan_step` after a long while, the first time."""

    def __init__(self, clock: Clock, plan: Callable[[Step], bytes]) -> None:
        self.seconds = 31
        self._clock = clock
        self._plan = plan

    def __call__(self, step: Step) -> bytes:
        self._clock.now, self.seconds = self._clock.now + self.seconds, 0
        return self._plan(step)
