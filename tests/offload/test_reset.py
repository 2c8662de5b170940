"""Reset: what was stored before cannot be had after."""

from kvplugin.contract import MISS, Lookup
from kvplugin.events import BlockRemoved, BlockStored
from tests.offload.engine_model import Engine
from tests.offload.setup_model import Phase, Setup, prompt


def test_a_reset_forgets_what_is_stored() -> None:
    engine = Engine()
    engine.serve(prompt(16))
    assert engine.reset()
    assert engine.offered(prompt(16)) == MISS
    engine.check_idle()


def test_host_memory_is_whole_again_after_a_reset() -> None:
    engine = Engine(host_blocks=4)
    engine.serve(prompt(16, seed=1))
    engine.reset()
    engine.serve(prompt(16, seed=2))
    assert engine.offered(prompt(16, seed=2)) == Lookup(16)
    assert engine.totals.counters["evicted_blocks"] == 0


def test_a_store_under_way_at_a_reset_is_dropped() -> None:
    engine = Engine()
    engine.jobs.hold()
    engine.add(prompt(16))
    engine.step()
    assert engine.scheduler.reset()
    assert engine.offered(prompt(16)) == MISS, "nobody waits for it"
    engine.jobs.let_go()
    engine.run()
    assert engine.offered(prompt(16)) == MISS
    assert engine.totals.counters["stored_blocks"] == 0
    engine.check_idle()


def test_a_store_that_fails_after_a_reset_takes_nothing_with_it() -> None:
    engine = Engine(Setup(prefix_caching=False))
    engine.jobs.hold()
    engine.add(prompt(16))
    engine.step()
    (old,) = engine.jobs.stores
    engine.scheduler.reset()
    engine.add(prompt(16))
    engine.step()
    (_, new) = engine.jobs.stores
    engine.jobs.fail(old)
    engine.step()
    assert not engine.offered(prompt(16)).ready, "the new store is still under way"
    engine.jobs.complete(new)
    engine.step()
    assert engine.offered(prompt(16)) == Lookup(16)
    engine.check_idle()


def test_a_reset_beside_a_load_has_to_be_repeated() -> None:
    engine = Engine()
    engine.serve(prompt(16))
    engine.forget_local()
    engine.jobs.hold()
    request = engine.add(prompt(16))
    engine.step()
    assert not engine.scheduler.reset()
    assert not engine.scheduler.reset()
    engine.jobs.let_go()
    engine.run()
    assert request.phase is Phase.FINISHED
    assert engine.reset()
    assert engine.offered(prompt(16)) == MISS
    engine.check_idle()


def test_a_load_that_fails_after_a_reset_leaves_the_new_keys() -> None:
    engine = Engine(Setup(prefix_caching=False), host_blocks=4)
    engine.serve(prompt(16))
    engine.jobs.hold()
    engine.add(prompt(16))
    engine.step()
    (load,) = engine.jobs.loads
    engine.scheduler.reset()
    engine.jobs.fail(load)
    engine.step()
    engine.jobs.let_go()
    engine.run()
    assert engine.offered(prompt(16)) == Lookup(16), "recomputed and stored"
    engine.check_idle()


def test_a_reset_removes_each_block_by_an_event_of_this_medium() -> None:
    engine = Engine(host_blocks=4)
    engine.serve(prompt(16, seed=1), prompt(4, seed=2))
    engine.scheduler.reset()
    events = engine.scheduler.take_events()
    kinds = [type(event) for event in events]
    assert kinds == [BlockStored] * 4 + [BlockRemoved, BlockStored] + [BlockRemoved] * 4
    assert {event.medium for event in events} == {"CPU"}
    assert engine.scheduler.take_events() == []


def test_a_store_from_blocks_that_the_engine_calls_invalid_is_not_kept() -> None:
    """Another connector's load failed while its blocks were on their way to us."""
    engine = Engine()
    engine.jobs.hold()
    engine.add(prompt(16))
    engine.step()
    (store,) = engine.jobs.stores
    engine.scheduler.distrust({store.parts[0][1][1]})
    engine.jobs.let_go()
    engine.run()
    assert engine.offered(prompt(16)) == MISS
    assert engine.totals.counters["failed_stores"] == 1
    engine.check_idle()
