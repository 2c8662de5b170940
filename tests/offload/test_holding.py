"""A prefix stays together in host memory while its request still stores."""

import pytest

from kvplugin.contract import MISS, Lookup
from tests.offload.engine_model import Engine
from tests.offload.setup_model import Phase, Request, Setup, prompt


def half_way(engine: Engine, steps: int = 2) -> Request:
    """A prompt of 8 blocks, of which 2 a step have been stored."""
    request = engine.add(prompt(32, 1), max_new_tokens=3)
    engine.steps(steps)
    assert request.phase is Phase.RUNNING
    return request


def small(**more: object) -> Engine:
    """Its host memory holds one such prompt."""
    return Engine(Setup(token_budget=8), host_blocks=8, **more)


def test_what_is_stored_of_a_running_prefill_is_not_evicted() -> None:
    engine = Engine(Setup(token_budget=12), host_blocks=8)
    half_way(engine, 1)
    engine.add(prompt(32, 2))
    engine.run()
    assert engine.offered(prompt(32, 1)) == Lookup(32)
    engine.check_idle()


@pytest.mark.parametrize("how", ["end", "abort", "preempt", "reset", "fail"])
def test_nothing_is_held_after(how: str) -> None:
    engine = small()
    request = half_way(engine)
    if how == "abort":
        engine.abort(request)
    elif how == "preempt":
        engine.preempt(request)
        engine.abort(request)
    elif how == "reset":
        engine.scheduler.reset()
        engine.check()
    elif how == "fail":
        engine.memories[0].broken = True
        engine.step()
        engine.memories[0].broken = False
    engine.run()
    engine.check_idle()
    engine.serve(prompt(32, 7))
    assert engine.offered(prompt(32, 7)) == Lookup(32), "all of host memory is free"
    engine.check_idle()


@pytest.mark.parametrize("how", ["abort", "preempt", "reset", "fail"])
def test_nothing_is_held_after_a_store_that_was_under_way(how: str) -> None:
    engine = small()
    engine.jobs.hold()
    request = half_way(engine)
    first, second = engine.jobs.stores
    engine.jobs.complete(second)
    if how == "abort":
        engine.abort(request)
    elif how == "preempt":
        engine.preempt(request)
        engine.abort(request)
    elif how == "reset":
        engine.scheduler.reset()
    else:
        engine.jobs.fail(first)
    engine.step()
    engine.check()
    engine.jobs.let_go()
    engine.run()
    engine.check_idle()
    engine.serve(prompt(32, 7))
    assert engine.offered(prompt(32, 7)) == Lookup(32)


def test_a_request_that_is_done_with_its_prompt_holds_nothing() -> None:
    engine = small()
    request = half_way(engine, 5)
    assert request.phase is Phase.RUNNING
    assert not list(engine.scheduler._admissions.uses())


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_what_was_found_is_held_like_what_was_stored(prefix_caching: bool) -> None:
    engine = Engine(Setup(token_budget=8, prefix_caching=prefix_caching))
    engine.serve(prompt(16, 1))
    request = engine.add([*prompt(16, 1), *prompt(16, 2)], max_new_tokens=2)
    while request.num_computed < 24:
        engine.step()
    assert len(list(engine.scheduler._admissions.uses())) == 6
    engine.run()
    engine.check_idle()


def test_a_reset_in_the_middle_stores_nothing_of_who_runs() -> None:
    engine = small()
    half_way(engine)
    assert engine.scheduler.reset()
    engine.run()
    assert engine.offered(prompt(32, 1)) == MISS
    assert engine.totals.gauges["host_blocks_stored"] == 0
    engine.forget_local()
    engine.serve(prompt(32, 1))
    assert engine.offered(prompt(32, 1)) == Lookup(32), "the next one stores again"


@pytest.mark.parametrize("announces_resumed", [True, False])
def test_who_loads_during_a_reset_stores_nothing_either(
    announces_resumed: bool,
) -> None:
    engine = Engine(Setup(token_budget=8, announces_resumed=announces_resumed))
    engine.serve(prompt(8))
    engine.forget_local()
    engine.jobs.hold()
    engine.add(prompt(32))
    engine.step()
    assert engine.jobs.loads
    assert not engine.scheduler.reset()
    engine.jobs.let_go()
    engine.run()
    assert engine.offered(prompt(32)) == MISS
    engine.check_idle()


def test_the_tail_leaves_first_whoever_stored_last() -> None:
    engine = Engine(Setup(token_budget=8), host_blocks=12)
    engine.jobs.hold()
    engine.add(prompt(32, 1), max_new_tokens=2)
    engine.steps(4)
    # The stores end from the last to the first.
    for store in reversed(engine.jobs.stores):
        engine.jobs.complete(store)
        engine.step()
    engine.jobs.let_go()
    engine.run()
    engine.serve(prompt(24, 2))
    assert engine.offered(prompt(32, 1)) == Lookup(24)


@pytest.mark.parametrize("tokens", [400, 800])
def test_a_step_of_a_long_prefill_looks_at_its_new_blocks_only(tokens: int) -> None:
    """Storing a prompt looks up each chunk a bounded number of times in all."""
    engine = Engine(Setup(token_budget=8, usable_blocks=256), host_blocks=256)
    looked: list[bytes] = []
    find = engine.scheduler._tier.find

    def counted(key: bytes) -> int | None:
        looked.append(key)
        return find(key)

    engine.scheduler._tier.find = counted  # type: ignore[method-assign]
    engine.serve(prompt(tokens))
    assert len(looked) <= 2 * tokens // 4
