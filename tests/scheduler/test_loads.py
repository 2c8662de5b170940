"""Asynchronous loads: parked requests, ends of every kind, deadlines, aborts."""

from itertools import permutations

import pytest

from kvplugin.contract import NOTHING_HAPPENED, WorkerOutcome
from kvplugin.scheduler import Status
from tests.core.manager_setups import mamba
from tests.scheduler.harness import Harness, failed, full, loaded, next_token, window
from tests.testing.lab import Lab


def parked(
    tokens: int = 20,
    offered: int = 16,
    harness: Harness | None = None,
    **settings: object,
) -> Harness:
    """A request "a" whose load is under way."""
    engine = harness or Harness(connects=True, **settings)
    engine.add("a", range(tokens))
    engine.connector.offers["a"] = offered
    engine.step()
    assert engine.scheduler.requests["a"].status is Status.LOADING
    return engine


def test_blocks_that_wait_for_bytes_have_no_key() -> None:
    engine = parked()
    keyed = engine.kv.get_blocks("a").get_unhashed_block_ids()
    assert keyed == engine.rows("a")[0]
    engine.step(loaded("a"))
    assert engine.kv.get_blocks("a").get_unhashed_block_ids() == []
    output = engine.step()
    (new,) = output.scheduled_new_reqs
    assert (new.num_computed_tokens, output.num_scheduled_tokens) == (16, {"a": 4})
    assert engine.outputs["a"] == [next_token(range(20))]
    assert engine.is_idle() or engine.run() is None
    assert engine.is_idle()


@pytest.mark.parametrize("offered", [32, 31, 28, 16])
def test_at_least_one_token_is_computed(offered: int) -> None:
    """Scenario 5: what is loaded is what is credited, and a token is left."""
    engine = Harness(connects=True)
    engine.add("a", range(32))
    engine.connector.offers["a"] = offered
    engine.step()
    credited = min(offered, 31)
    assert engine.scheduler.requests["a"].request.num_computed_tokens == credited
    assert len(engine.connector.rows["a"][0]) == (offered + 3) // 4
    engine.step(loaded("a"))
    output = engine.schedule()
    assert output.num_scheduled_tokens == {"a": max(32 - offered, 1)}
    engine.land()
    assert engine.outputs["a"] == [next_token(range(32))]


def test_a_failed_load_is_computed_without_a_second_request() -> None:
    """Scenario 19: the engine goes on as long as it says that it has work."""
    engine = parked()
    engine.step(failed(a=[engine.connector.rows["a"][0][2]]))
    engine.run()
    assert engine.outputs["a"] == [next_token(range(20))]
    assert engine.is_idle()


def test_what_came_of_a_failed_load_is_hit() -> None:
    engine = parked()
    bad = engine.connector.rows["a"][0][2]
    engine.step(failed(a=[bad]))
    assert engine.connector.distrusted == {bad}
    output = engine.step()
    assert output.scheduled_new_reqs[0].num_computed_tokens == 8
    assert engine.connector.lookups == ["a"], "a load is not tried twice"


def test_a_failed_load_of_several_groups_goes_back_to_a_common_boundary() -> None:
    """Scenario 18: block ids are taken by the geometry of their own group."""
    engine = parked(
        harness=Harness(30, [full(), window(6, 8)], connects=True, max_model_len=64)
    )
    row = engine.connector.rows["a"][1]
    engine.step(failed(a=[row[-1]]))
    output = engine.step()
    assert output.scheduled_new_reqs[0].num_computed_tokens in (0, 8)
    engine.run()
    assert engine.outputs["a"] == [next_token(range(20))]


def test_policy_fail_ends_the_request() -> None:
    engine = parked(kv_load_failure_policy="fail")
    engine.step(failed(a=[engine.connector.rows["a"][0][0]]))
    assert engine.reasons == {"a": "error"}
    engine.run()
    assert engine.is_idle()


def test_every_rank_has_to_report() -> None:
    engine = parked(ranks=2)
    engine.step(loaded("a"), NOTHING_HAPPENED)
    assert engine.scheduler.requests["a"].status is Status.LOADING
    engine.step(loaded("a"), NOTHING_HAPPENED)  # once more: means nothing
    assert engine.scheduler.requests["a"].status is Status.LOADING
    engine.step(NOTHING_HAPPENED, failed(a=[engine.connector.rows["a"][0][3]]))
    assert engine.scheduler.requests["a"].status is Status.WAITING
    engine.run()
    assert engine.outputs["a"] == [next_token(range(20))]


def test_reports_of_unknown_requests_are_nothing() -> None:
    engine = parked()
    engine.step(loaded("b", "c"))
    assert engine.scheduler.requests["a"].status is Status.LOADING


class TestDeadline:
    def test_request_goes_on_and_blocks_stay_until_the_transfer_ends(self) -> None:
        engine = parked(load_timeout_s=5)
        blocks = set(engine.connector.rows["a"][0])
        engine.now = 5
        output = engine.step()
        assert output.num_scheduled_tokens == {}, "its id still names the transfer"
        assert engine.kv.block_pool.num_used_blocks == len(blocks)
        engine.step(loaded("a"))
        assert engine.kv.block_pool.num_used_blocks == 0
        engine.run()
        assert engine.outputs["a"] == [next_token(range(20))]
        assert engine.is_idle()

    def test_policy_fail(self) -> None:
        engine = parked(load_timeout_s=5, kv_load_failure_policy="fail")
        engine.now = 5
        engine.step()
        assert engine.reasons == {"a": "error"}
        assert engine.scheduler.has_work(), "the transfer goes on"
        engine.step(loaded("a"))
        engine.run()
        assert engine.is_idle()

    def test_no_new_loads_while_too_much_is_overdue(self) -> None:
        engine = parked(load_timeout_s=5, max_overdue_fraction=0.1)
        engine.now = 5
        engine.step()
        engine.add("b", range(50, 70))
        engine.connector.offers["b"] = 16
        engine.step()
        assert "b" not in engine.connector.lookups
        engine.step(loaded("a"))
        engine.run()
        assert engine.outputs["b"] == [next_token(range(50, 70))]


@pytest.mark.parametrize("order", list(permutations(["abort", "report", "report"])))
def test_abort_and_completion_in_any_order(order: tuple[str, ...]) -> None:
    """Scenario 34."""
    engine = parked()
    for event in order:
        if event == "abort":
            engine.scheduler.abort_request("a")
            engine.step()
        else:
            engine.step(loaded("a"))
    engine.run()
    assert engine.is_idle()


def test_blocks_of_an_aborted_load_are_not_handed_out() -> None:
    engine = parked(harness=Harness(6, connects=True))
    engine.scheduler.abort_request("a")
    engine.add("b", range(50, 66))
    assert engine.step().num_scheduled_tokens == {}, "the load may still write"
    engine.step(loaded("a"))
    engine.run()
    assert engine.outputs["b"] == [next_token(range(50, 66))]


def test_a_waiting_head_does_not_hold_up_a_loaded_request() -> None:
    """Scenario 20."""
    engine = Harness(20, connects=True, max_model_len=100, max_num_batched_tokens=64)
    engine.add("b", range(48))
    engine.connector.offers["b"] = 44
    engine.step()
    engine.add("a", range(100, 164))
    engine.step()
    assert engine.scheduler.requests["a"].status is Status.WAITING
    engine.step(loaded("b"))
    engine.run()
    assert set(engine.reasons) == {"a", "b"}
    assert engine.is_idle()


def test_loaded_requests_do_not_block_each_other() -> None:
    """Each holds most of the pool and needs the rest."""
    engine = Harness(10, connects=True, scheduler_reserve_full_isl=False)
    for name, start in (("a", 0), ("b", 50)):
        engine.add(name, range(start, start + 30), max_tokens=2)
        engine.connector.offers[name] = 20
    engine.step()
    engine.step(loaded("a", "b"))
    engine.connector.offers.clear()
    engine.run()
    assert engine.outputs["a"][0] == next_token(range(30))
    assert engine.outputs["b"][0] == next_token(range(50, 80))
    assert engine.is_idle()


def test_a_connector_that_is_not_ready_holds_up_nobody_else() -> None:
    engine = Harness(connects=True)
    engine.add("a", range(8))
    engine.add("b", range(50, 58))
    engine.connector.later.add("a")
    assert engine.step().num_scheduled_tokens == {"b": 8}
    engine.connector.later.clear()
    engine.run()
    assert engine.outputs["a"] == [next_token(range(8))]


def test_a_send_keeps_blocks_until_it_is_announced() -> None:
    engine = Harness(connects=True)
    engine.connector.keeps.add("a")
    engine.add("a", range(8))
    engine.step()
    assert engine.reasons == {"a": "length"}
    assert engine.kv.block_pool.num_used_blocks == 2
    engine.step(WorkerOutcome(finished_sends=frozenset(["a"])))
    assert engine.kv.block_pool.num_used_blocks == 0
    engine.run()
    assert engine.is_idle()


def test_admission_that_fails_leaves_nothing_behind() -> None:
    """Scenario 45: matched, not allocated, aborted; many times."""
    engine = Harness(4, connects=True)
    engine.add("long", range(12), max_tokens=4)
    engine.step()
    for i in range(50):
        engine.add(f"r{i}", range(12))
        engine.step()
        engine.scheduler.abort_request(f"r{i}")
    engine.run()
    assert engine.is_idle()


def test_new_weights_discard_loads_under_way() -> None:
    engine = parked()
    before = list(engine.scheduler.requests["a"].request.block_hashes)
    assert not engine.scheduler.reset_prefix_cache(weight_epoch=1)
    assert engine.scheduler.requests["a"].request.block_hashes[0] != before[0]
    engine.step(loaded("a"))
    assert engine.scheduler.reset_prefix_cache()
    engine.connector.offers.clear()
    engine.run()
    assert engine.outputs["a"] == [next_token(range(20))]
    assert engine.is_idle()


@pytest.mark.parametrize("offered", [15, 16, 17, 24, 25])
def test_a_state_inside_a_block_is_not_taken_for_one_at_its_end(offered: int) -> None:
    lab = Lab((full(), mamba("align")), 40, held=False)
    lab.add(list(range(25)), 3, remote_tokens=offered)
    lab.drain()
    assert len(lab.outputs["r0"]) == 3


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("length", [3, 8, 13])
def test_a_whole_prompt_comes_from_elsewhere(length: int, synchronous: bool) -> None:
    for specs in ((full(),), (full(), window(5)), (full(), mamba("all"))):
        lab = Lab(specs, 40, held=False, synchronous=synchronous)
        lab.add(list(range(length)), 3, remote_tokens=length)
        lab.drain()
        assert len(lab.outputs["r0"]) == 3
