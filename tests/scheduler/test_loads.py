"""Asynchronous loads: parked requests, ends of every kind, deadlines, aborts."""

import pytest

from kvplugin.contract import NOTHING_HAPPENED, WorkerOutcome
from kvplugin.request import RequestError
from kvplugin.scheduler import Status
from tests.core.manager_setups import mamba
from tests.scheduler.harness import Harness, failed, full, loaded, next_token, window
from tests.testing.lab import Lab


def parked(
    tokens: int = 20,
    offered: int = 16,
    harness: Harness | None = None,
    first: int = 0,
    **settings: object,
) -> Harness:
    """A request "a" of these tokens from `first` on, whose load is under way."""
    engine = harness or Harness(connects=True, **settings)
    engine.add("a", range(first, first + tokens))
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


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("offered", [32, 31, 16])
@pytest.mark.parametrize("mode", ["none", "all", "align"])
def test_what_is_loaded_is_what_is_credited(
    mode: str, offered: int, synchronous: bool
) -> None:
    """Scenario 5: a prompt of 32, blocks of 16, all of it stored. A state that is newer
    than the credited tokens is an error of the lab's memory."""
    states = () if mode == "none" else (mamba(mode, 16),)
    lab = Lab((full(16), *states), 20, held=False, synchronous=synchronous)
    lab.add(list(range(32)), 3, remote_tokens=offered)
    lab.step()
    credited = min(offered, 31)
    (load,) = lab.remote.loads.values()
    assert (load.start, load.stop) == (0, credited)
    if not synchronous:
        assert lab.requests["r0"].num_computed_tokens == credited
    lab.drain()
    assert len(lab.outputs["r0"]) == 3


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("budget", [16, 24, 64])
@pytest.mark.parametrize("offered", [5, 16, 23, 39])
def test_a_state_that_is_loaded_inside_a_block_is_never_hit_as_the_one_at_its_end(
    offered: int, budget: int, synchronous: bool
) -> None:
    """Steps end where blocks do, the first one after the load too: only then is the
    block's state the one that its key names."""
    lab = Lab(
        (full(16), mamba("align", 16)),
        20,
        held=False,
        synchronous=synchronous,
        max_num_batched_tokens=budget,
    )
    lab.add(list(range(60)), 3, remote_tokens=offered)
    lab.run()
    lab.add(list(range(60)), 3)
    lab.add([*range(35), 7], 3)
    lab.drain()
    assert all(len(output) == 3 for output in lab.outputs.values())


def test_nobody_waits_for_the_last_token_alone() -> None:
    """All others are cached here, and it is computed in any case."""
    engine = Harness(connects=True)
    engine.add("first", range(8))
    engine.run()
    engine.add("a", range(9))
    engine.connector.offers["a"] = 9
    assert engine.step().num_scheduled_tokens == {"a": 1}
    assert "a" not in engine.connector.rows
    assert engine.outputs["a"] == [next_token(range(9))]
    assert engine.scheduler.make_connector_prefix_cache_stats().hits == 0


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


@pytest.mark.parametrize(
    ("group", "entry", "hit"), [(0, 0, 0), (0, 1, 0), (0, 3, 8), (1, 0, 0), (1, 1, 8)]
)
def test_a_failed_load_of_several_groups_goes_back_to_a_common_boundary(
    group: int, entry: int, hit: int
) -> None:
    """Scenario 18: an entry of a row is taken by the geometry of its own group. (Groups
    share one pool, so no two of them hold the same id.)"""
    groups = [full(), window(20, 8)]
    engine = parked(harness=Harness(30, groups, connects=True, max_model_len=64))
    rows = engine.connector.rows["a"]
    assert [len(row) for row in rows] == [4, 2]
    engine.step(failed(a=[rows[group][entry]]))
    assert engine.connector.distrusted == {rows[group][entry]}
    output = engine.step()
    (new,) = output.scheduled_new_reqs
    assert new.num_computed_tokens == hit
    for row, loaded_row, size in zip(new.block_ids, rows, (4, 8), strict=True):
        assert row[: hit // size] == loaded_row[: hit // size]
    engine.run()
    assert engine.outputs["a"] == [next_token(range(20))]
    assert engine.is_idle()


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
    @pytest.mark.parametrize("ends", [0, 1, 2, 5, 9])
    def test_request_goes_on_and_blocks_stay_until_the_transfer_ends(
        self, ends: int
    ) -> None:
        """At once, however long the transfer takes, and with no second load; nobody
        else gets the id or the blocks before it has ended."""
        engine = parked(load_timeout_s=5)
        blocks = set(engine.connector.rows["a"][0])
        engine.now = 5
        for step in range(10):
            output = engine.step(*[loaded("a")] * (step == ends))
            assert bool(output.num_scheduled_tokens) == (step < 2)
            assert blocks.isdisjoint(engine.rows("a")[0])
            used = engine.kv.block_pool.num_used_blocks
            assert used == (len(blocks) if step < ends else 0) + 4 * (step < 1)
            if step < ends:
                with pytest.raises(RequestError, match="'a' is in use"):
                    engine.add("a", range(4))
        assert engine.outputs["a"] == [next_token(range(20))]
        assert engine.connector.lookups == ["a"]
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


ORDERS = {
    "abort, completion": ["abort", "step", "report"],
    "completion, abort": ["report", "abort", "step"],
    "both in one step, abort first": ["abort", "report"],
    "both in one step, while it is in flight": ["schedule", "abort", "land report"],
    "completion twice": ["abort", "step", "report", "report"],
    "completion twice, abort between": ["report", "abort", "report"],
    "completion twice, then abort": ["report", "report", "abort", "step"],
}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_abort_and_completion_in_any_order(order: list[str], depth: int) -> None:
    """Scenario 34: no block can be had before the write has ended, and then all."""
    engine = parked(pipeline_depth=depth)
    blocks, ended = engine.connector.rows["a"][0], False
    for event in order:
        match event:
            case "abort":
                engine.scheduler.abort_request("a")
            case "step":
                engine.step()
            case "schedule":
                engine.schedule()
            case "report":
                engine.step(loaded("a"))
            case "land report":
                engine.land(loaded("a"))
        ended |= "report" in event
        used = engine.kv.block_pool.num_used_blocks
        assert ended or used == len(blocks), f"{used} blocks after {event}"
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


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_waiting_head_does_not_hold_up_a_loaded_request(policy: str) -> None:
    """Scenario 20: B holds 12 of 20 blocks, A is ahead of it and needs 16. `run` sees
    to it that no state comes back."""
    engine = Harness(
        20,
        connects=True,
        max_model_len=100,
        max_num_batched_tokens=64,
        policy=policy,
    )
    engine.add("b", range(48), priority=1)
    engine.connector.offers["b"] = 48
    engine.step()
    assert engine.kv.block_pool.num_used_blocks == 12
    engine.add("a", range(100, 164))
    engine.step()
    assert engine.scheduler.requests["a"].status is Status.WAITING
    engine.step(loaded("b"))
    engine.run()
    assert list(engine.reasons) == ["b", "a"]
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


@pytest.mark.parametrize("reserves", [False, True])
@pytest.mark.parametrize(("mode", "usable"), [("all", 20), ("align", 13)])
def test_admission_that_fails_leaves_nothing_behind(
    mode: str, usable: int, reserves: bool
) -> None:
    """Scenario 45: a state is matched, blocks for the rest are not to be had, abort;
    100 times."""
    engine = Harness(
        usable,
        [full(), mamba(mode)],
        connects=True,
        max_num_batched_tokens=64,
        scheduler_reserve_full_isl=reserves,
    )
    engine.add("first", range(9))
    engine.step()
    engine.add("first again", range(9))  # aligned states are kept where steps end
    engine.run()
    parked(offered=20, harness=engine, first=50)
    pool = engine.kv.block_pool
    before = pool.num_used_blocks, pool.num_keyed_blocks
    for i in range(100):
        request = engine.add(f"r{i}", [*range(8), *range(200, 222)])
        assert engine.kv.find_computed_blocks(request)[1] == 8
        output = engine.schedule()
        assert output.num_scheduled_tokens == {}
        if i % 2:
            engine.scheduler.abort_request(f"r{i}")
        engine.land()
        engine.scheduler.abort_request(f"r{i}")
        assert (pool.num_used_blocks, pool.num_keyed_blocks) == before
    engine.step(loaded("a"))
    engine.run()
    assert engine.is_idle()


def test_new_weights_discard_loads_under_way() -> None:
    engine = parked()
    before = list(engine.scheduler.requests["a"].request.block_hashes)
    assert not engine.scheduler.reset_prefix_cache(weight_epoch=1)
    assert engine.scheduler.requests["a"].request.block_hashes[0] != before[0]
    assert engine.step().num_scheduled_tokens == {"a": 16}, "at once, by itself"
    engine.step(loaded("a"))
    assert engine.connector.lookups == ["a"]
    assert engine.outputs["a"] == [next_token(range(20))]
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
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


@pytest.mark.parametrize("named", [[], [0], [17], [999], [4, 0], [17, 4], [4, 999]])
def test_a_failure_that_names_others_blocks_or_none_means_all_of_the_load(
    named: list[int],
) -> None:
    """Of the load are 1 to 4; block 0 is the null block, and the pool has no 999."""
    engine = parked()
    mine = engine.rows("a")[0]
    assert mine == [1, 2, 3, 4]
    engine.step(failed(a=named))
    assert engine.connector.distrusted >= set(mine)
    (new,) = engine.step().scheduled_new_reqs
    assert new.num_computed_tokens == 0
    engine.run()
    assert engine.outputs["a"] == [next_token(range(20))]


def test_a_local_hit_does_not_fail() -> None:
    """All of the load failed: that is what it was to fill, not what it began from."""
    engine = Harness(connects=True)
    engine.add("first", range(8))
    engine.run()
    parked(harness=engine)
    hit, mine = engine.rows("a")[0][:2], engine.rows("a")[0][2:]
    engine.step(failed(a=[]))
    assert engine.connector.distrusted == set(mine)
    (new,) = engine.step().scheduled_new_reqs
    assert (new.num_computed_tokens, new.block_ids[0][:2]) == (8, hit)


@pytest.mark.parametrize("first", [0, 1])
def test_a_failure_counts_whoever_tells_it_and_when(first: int) -> None:
    """Before the load has ended on that rank, or with another rank's last word."""
    engine = parked(ranks=2)
    bad = engine.rows("a")[0][1]
    told = WorkerOutcome(failed_loads={"a": [bad]})
    engine.step(*[[told, NOTHING_HAPPENED], [NOTHING_HAPPENED, told]][first])
    engine.step(loaded("a"), loaded("a"))
    assert engine.scheduler.requests["a"].skips_external
    (new,) = engine.step().scheduled_new_reqs
    assert new.num_computed_tokens == 4


def test_blocks_of_overdue_loads_are_counted_once_each() -> None:
    engine = Harness(40, connects=True, load_timeout_s=5, max_overdue_fraction=1)
    loads = engine.scheduler._roster.loads
    for i in range(4):
        engine.add(f"r{i}", range(100 * i, 100 * i + 20))
        engine.connector.offers[f"r{i}"] = 16
    engine.step()
    assert loads.num_overdue_blocks == 0
    engine.now = 5
    for left in range(3, -1, -1):
        engine.step(loaded(f"r{left}"))
        assert loads.num_overdue_blocks == 4 * left
        assert left == len(loads)
