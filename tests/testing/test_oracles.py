"""Oracles catch what is planted, and nothing else."""

from collections.abc import Callable

import pytest

from kvplugin.contract import Stats
from kvplugin.events import AllBlocksCleared, BlockRemoved
from kvplugin.spec import EngineLimits, KVCacheSpec
from kvplugin.testing import (
    ContentError,
    CounterWatch,
    EventReplay,
    ProgressWatch,
    Row,
    assert_balanced,
    assert_cache_content,
    assert_equivalent,
    assert_estimate,
    assert_poisoned,
    brute_force_blocks,
)
from kvplugin.testing import estimates as estimates_module
from tests.core.manager_setups import chunk, cross, full, mamba, window
from tests.testing.driver import Driver, config_of


def served(*specs: KVCacheSpec) -> Driver:
    """A driver that has served two requests, and 3 blocks in each group are cached."""
    driver = Driver(specs or (full(),), 40)
    for prompt in (range(12), range(9)):
        driver.add(list(prompt), 2)
    driver.run()
    driver.step()
    return driver


# -- balance ---------------------------------------------------------------------------


def test_balanced() -> None:
    driver = served(full(), window(6), mamba("all"))
    assert_balanced(driver.kv, waiting=driver.waiting, worker=driver.model.tracked)


def test_a_reference_is_left() -> None:
    driver = served()
    (block,) = driver.kv.block_pool.get_new_blocks(1)
    with pytest.raises(AssertionError, match=rf"blocks \[{block}\] are still"):
        assert_balanced(driver.kv)


def test_a_request_is_remembered() -> None:
    driver = served()
    driver.kv.coordinator.single_type_managers[0].num_cached_block["r9"] = 0
    with pytest.raises(AssertionError, match=r"num_cached_block remembers \['r9'\]"):
        assert_balanced(driver.kv)


def test_something_else_is_left() -> None:
    with pytest.raises(AssertionError, match=r"loads is not empty: \['r1'\]"):
        assert_balanced(served().kv, loads=["r1"])


# -- poison, content -------------------------------------------------------------------


def test_poisoned() -> None:
    driver = served()
    assert_poisoned(driver.memory, driver.kv.block_pool)


def test_bytes_in_a_free_block() -> None:
    driver = served()
    driver.memory.in_use = None  # as of a worker that nobody watches
    driver.memory.write(0, Row("r9", [30]), 0, [1])
    with pytest.raises(ContentError, match="block 30 is free, has no key"):
        assert_poisoned(driver.memory, driver.kv.block_pool)


def test_bytes_in_the_null_block() -> None:
    driver = served()
    driver.memory.poison([0])
    with pytest.raises(ContentError, match="null block was written"):
        assert_poisoned(driver.memory, driver.kv.block_pool)


def test_cached_content() -> None:
    driver = served(full(), mamba("all"))
    requests = list(driver.requests.values())
    assert assert_cache_content(driver.memory, driver.kv, requests) == 6


@pytest.mark.parametrize("damage", ["poison", "invalidate"])
@pytest.mark.parametrize("group", [0, 1])
def test_wrong_content_under_a_key(group: int, damage: str) -> None:
    driver = served(full(), mamba("all"))
    block = next(iter(driver.kv.block_pool.cached_blocks(group).values()))
    getattr(driver.memory, damage)([block])
    with pytest.raises(ContentError, match=f"block {block}"):
        assert_cache_content(driver.memory, driver.kv, driver.requests.values())


@pytest.mark.parametrize("damage", ["poison", "invalidate"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_wrong_content_of_a_twin(which: int, damage: str) -> None:
    """Of several blocks under one key all are verified: any may be the next hit."""
    driver = Driver((full(),), 40)
    for _ in range(3):
        driver.add(list(range(9)), 2, skip_reading_prefix_cache=True)
    driver.run()
    pool, requests = driver.kv.block_pool, driver.requests.values()
    assert len(pool.cached_blocks(0)) == 2
    assert assert_cache_content(driver.memory, driver.kv, requests) == 6
    key = pool.key_of(next(iter(pool.cached_blocks(0).values())))
    twins = [b for b in range(pool.num_blocks) if pool.key_of(b) == key]
    getattr(driver.memory, damage)([twins[which]])
    with pytest.raises(ContentError, match=f"block {twins[which]}"):
        assert_cache_content(driver.memory, driver.kv, requests)


# -- equivalence -----------------------------------------------------------------------


def test_equivalence() -> None:
    assert_equivalent({"a": [1, 2]}, {"a": (1, 2)})
    for outputs, message in (
        ({"a": [1, 3]}, "'a': output token 1 is 3, not 2"),
        ({"a": [1]}, "'a': 1 output tokens, not 2"),
        ({"a": [1, 2], "b": []}, r"only one of the runs has requests \['b'\]"),
    ):
        with pytest.raises(AssertionError, match=message):
            assert_equivalent(outputs, {"a": [1, 2]})


# -- progress --------------------------------------------------------------------------


def test_progress() -> None:
    watch = ProgressWatch()
    for state in ({"waiting": 2}, {"waiting": 1}):
        watch.observe(state)
    watch.observe({"waiting": 1}, waits_for_others=True)
    watch.observe({"waiting": 2})
    with pytest.raises(AssertionError, match="after observation 5 is that after 4"):
        watch.observe({"waiting": 2})


def test_a_state_may_be_changed_in_place_after_it_was_observed() -> None:
    watch = ProgressWatch()
    running = ["a", "b"]
    watch.observe({"running": running})
    running.pop()
    watch.observe({"running": running})
    running.append("b")
    with pytest.raises(AssertionError, match="after observation 3 is that after 1"):
        watch.observe({"running": running})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda n: {"step": n, "waiting": ["a"]}, r"only \['step'\] changed"),
        (lambda n: {"steps": [n, n + 1], "waiting": ["a"]}, r"only \['steps'\]"),
        (lambda n: {"now": n * 0.1, "step": n}, "all fields changed"),
        (lambda n: ("step", n), "the state changed"),
    ],
)
def test_a_state_that_counts_is_found_at_the_limit(
    changes: Callable[[int], object], message: str
) -> None:
    watch = ProgressWatch(limit=50)
    for n in range(49):
        watch.observe(changes(n))
    with pytest.raises(AssertionError, match=f"after 50 observations; .*{message}"):
        watch.observe(changes(49))


def test_what_changed_lately_is_known_of_a_state_that_is_changed_in_place() -> None:
    watch, order = ProgressWatch(limit=5), [0]
    for n in range(4):
        order.append(n)
        watch.observe({"order": order, "waiting": ["a"]})
    order.append(4)
    with pytest.raises(AssertionError, match=r"only \['order'\] changed"):
        watch.observe({"order": order, "waiting": ["a"]})


def test_the_limit_counts_from_the_last_wait_for_others() -> None:
    watch = ProgressWatch(limit=3)
    for n in range(20):
        watch.observe(n, waits_for_others=n % 2 == 0)


# -- events ----------------------------------------------------------------------------


def test_event_replay() -> None:
    driver = served(full(), window(6))
    events = driver.kv.take_events()
    replay = EventReplay()
    replay.feed(events)
    replay.assert_matches(driver.kv.block_pool, 2)
    group, key = next(iter(replay.stored))
    lost = EventReplay()
    lost.feed([*events, BlockRemoved([key], "GPU", group)])
    with pytest.raises(AssertionError, match="index alone knows"):
        lost.assert_matches(driver.kv.block_pool, 2)
    with pytest.raises(AssertionError, match="removed, but never stored"):
        lost.feed([BlockRemoved([key], "GPU", group)])
    lost.feed([BlockRemoved([key], "CPU", group), AllBlocksCleared()])
    assert not lost.stored


# -- estimator -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("specs", "depth"),
    [
        ((full(),), 1),
        ((full(), window(6)), 1),
        ((full(), window(6)), 2),
        ((window(9, 4), chunk(8)), 1),
        ((window(9, 4), chunk(8)), 2),
        ((full(), mamba("align", 4)), 1),
        ((full(), cross()), 1),
    ],
)
def test_estimates(specs: tuple[KVCacheSpec, ...], depth: int) -> None:
    limits = EngineLimits(
        max_model_len=60,
        max_num_batched_tokens=8,
        max_concurrent_batches=depth,
        max_num_encoder_input_tokens=9,
    )
    assert_estimate(config_of(specs, 101), limits)


def test_a_wrong_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = EngineLimits(max_model_len=60, max_num_batched_tokens=8)
    config = config_of((full(),), 101)
    assert brute_force_blocks(config, limits) == 15
    monkeypatch.setattr(estimates_module, "brute_force_blocks", lambda *_: 14)
    with pytest.raises(AssertionError, match="hold 15 blocks, by brute force"):
        assert_estimate(config, limits)


# -- counters --------------------------------------------------------------------------


def test_counters() -> None:
    watch = CounterWatch()
    watch.add({"queries": 1000, "local": 600})
    watch.add(Stats(counters={"external": 200}, gauges={"held": 3}))
    watch.observe({"queries": 1000, "computed": 200})
    watch.assert_conserved("queries", "local", "external", "computed")
    watch.assert_conserved(800, "local", "external")
    with pytest.raises(AssertionError, match="queries is 1000, its parts are"):
        watch.assert_conserved("queries", "local")
    for bad in (
        {"queries": -1},
        Stats(gauges={"held": -1}),
        Stats(observations={"seconds": [1.0, -0.1]}),
    ):
        with pytest.raises(AssertionError, match="changed by -"):
            watch.add(bad)
    with pytest.raises(AssertionError, match="'queries' changed by -1"):
        watch.observe({"queries": 999})
