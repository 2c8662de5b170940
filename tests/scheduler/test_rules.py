"""One test for each rule of a step that no output of a request depends on."""

from collections.abc import Iterator

import pytest

from kvplugin import hookimpl
from kvplugin.hooks import Hooks, VictimContext, WaitingContext
from kvplugin.manager import KVCacheManager
from kvplugin.request import Request, RequestError
from kvplugin.scheduler import Scheduler, SchedulerConfig
from kvplugin.spec import EngineLimits, KVCacheConfig, KVCacheGroupSpec
from tests.core.manager_setups import cross, mamba
from tests.scheduler.harness import Connector, Harness, full, loaded


@pytest.mark.parametrize("most", [1, 2, 5])
@pytest.mark.parametrize("external", [0, 4])
def test_no_more_requests_run_than_max_num_seqs(most: int, external: int) -> None:
    engine = Harness(40, connects=True, max_num_seqs=most, max_num_batched_tokens=64)
    names = [f"r{i}" for i in range(6)]
    for i, name in enumerate(names):
        engine.add(name, range(10 * i, 10 * i + 6), 3)
        engine.connector.offers[name] = external
    sizes = []
    while engine.scheduler.has_work():
        sizes.append(len(engine.step(loaded(*names)).num_scheduled_tokens))
    assert max(sizes) == most


@pytest.mark.parametrize("left", range(6))
def test_drafts_end_before_the_longest_length(left: int) -> None:
    """The last token of all is sampled, so no draft takes its place."""
    engine = Harness(30, drafts=4, max_model_len=20)
    engine.add("a", range(20 - left - 1), left + 1)
    drafts = []
    while engine.scheduler.has_work():
        output = engine.step(accepted=0)
        drafts += map(len, output.scheduled_spec_decode_tokens.values())
        computed = engine.kv.max_model_len
        for cached in output.scheduled_cached_reqs:
            computed = cached.num_computed_tokens
            tokens = output.num_scheduled_tokens["a"]
            assert computed + tokens <= engine.kv.max_model_len - 1
    assert drafts == [n for n in [4] * (left - 4) + [3, 2, 1] if n <= left - 1]
    assert len(engine.outputs["a"]) == left + 1


@pytest.mark.parametrize("threshold", [0, 1, 5, 100])
@pytest.mark.parametrize("external", [0, 8])
def test_a_step_computes_so_much_of_one_prompt(threshold: int, external: int) -> None:
    engine = Harness(
        connects=True,
        max_num_batched_tokens=16,
        long_prefill_token_threshold=threshold,
    )
    engine.add("a", range(40))
    engine.connector.offers["a"] = external
    found = []
    while engine.scheduler.has_work():
        found += engine.step(loaded("a")).num_scheduled_tokens.values()
    assert sum(found) == 40 - external
    assert max(found) == min(threshold or 16, 16)


class Chooses:
    """The newest first, and the oldest loses its blocks."""

    @hookimpl
    def kvp_choose_waiting_order(self, ctx: WaitingContext) -> list[str]:
        return [request.request_id for request in reversed(ctx.waiting)]

    @hookimpl
    def kvp_choose_victim(self, ctx: VictimContext) -> str:
        return ctx.candidates[0].request_id


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_plugins_are_followed(policy: str) -> None:
    def run(hooks: Hooks) -> tuple[list[str], list[str]]:
        engine = Harness(6, policy=policy, max_num_batched_tokens=32, hooks=hooks)
        for i in range(3):
            engine.add(f"r{i}", range(10 * i, 10 * i + 7), 9, arrival_time=i)
        preempted: list[str] = []
        came = [new.req_id for new in engine.step().scheduled_new_reqs]
        while engine.scheduler.has_work():
            preempted += sorted(engine.step().preempted_req_ids)
        return came, preempted[:1]

    assert run(Hooks.of()) == (["r0", "r1", "r2"], ["r2"])
    assert run(Hooks.of(Chooses())) == (["r2", "r1", "r0"], ["r2"])
    # The oldest of those that run is the one that came first, whoever that is.


def test_a_plugin_ends_the_admissions_of_a_step() -> None:
    class NoMore:
        """Lets in whom nobody else runs with."""

        @hookimpl
        def kvp_choose_admission(self) -> bool:
            return False

    engine = Harness(20, hooks=Hooks.of(NoMore()))
    for i in range(3):
        engine.add(f"r{i}", range(10 * i, 10 * i + 3), 2)
    steps = [[new.req_id for new in engine.step().scheduled_new_reqs] for _ in range(6)]
    assert steps == [["r0"], [], ["r1"], [], ["r2"], []]


def test_the_victim_by_priority_is_not_the_last_one() -> None:
    engine = Harness(9, policy="priority", max_num_batched_tokens=32)
    for name, priority in (("a", 0), ("b", 2), ("c", 1)):
        engine.add(name, range(10 * priority, 10 * priority + 7), 9, priority=priority)
        engine.step()
    assert [entry.id for entry in engine.scheduler._roster.running] == ["a", "b", "c"]
    preempted: list[str] = []
    while not preempted:
        preempted += engine.step().preempted_req_ids
    assert preempted == ["b"]


@pytest.mark.parametrize("pending", [False, True])
def test_nobody_is_preempted_while_the_connector_is_about_to_free(
    pending: bool,
) -> None:
    engine = Harness(4, connects=True)
    for i in range(2):
        engine.add(f"r{i}", range(10 * i, 10 * i + 7), 6)
    engine.connector.frees_pending = pending
    preempted = [name for _ in range(4) for name in engine.step().preempted_req_ids]
    assert bool(preempted) != pending
    engine.connector.frees_pending = False
    engine.run()


def test_blocks_that_must_be_zeroed_are_told_once() -> None:
    engine = Harness(30, [full(), mamba("all")])
    assert engine.kv.kv_cache_config.needs_kv_cache_zeroing
    engine.add("a", range(9), 9)
    told: list[int] = []
    owned: set[int] = set()
    while engine.scheduler.has_work():
        told += engine.schedule().new_block_ids_to_zero
        owned.update(block for row in engine.rows("a") for block in row if block)
        engine.land()
    assert told
    assert len(told) == len(set(told))
    assert set(told) <= owned


def test_the_common_prefix_is_told() -> None:
    engine = Harness(30, max_num_batched_tokens=64)
    engine.add("a", range(9), 9)
    assert engine.step().num_common_prefix_blocks == [3]
    engine.add("b", [*range(8), 50], 9)
    assert engine.step().num_common_prefix_blocks == [2]


def watched(engine: Harness, *names: str) -> None:
    for name in names:
        engine.connector.rows[name] = ()


def test_a_connector_hears_of_progress() -> None:
    """Of those that it watches: tokens, and the blocks that their rows grew by."""
    engine = Harness(connects=True, max_num_batched_tokens=10)
    watched(engine, "a")
    engine.add("a", range(14), 4)
    engine.add("b", range(50, 54), 4)
    for _ in range(4):
        engine.step()
    heard = [
        (r.request_id, r.num_computed_tokens, r.num_scheduled_tokens, r.new_block_ids)
        for step in engine.connector.steps
        for r in step.scheduled
    ]
    assert heard == [
        ("a", 0, 10, ()),
        ("a", 10, 4, ([4],)),
        ("a", 14, 1, ()),
        ("a", 15, 1, ()),
    ]
    assert [step.num_tokens for step in engine.connector.steps] == [10, 8, 2, 2]


def test_a_connector_hears_of_preemptions_once() -> None:
    engine = Harness(6, connects=True, max_num_batched_tokens=32)
    for i in range(2):
        engine.add(f"r{i}", range(10 * i, 10 * i + 7), 12)
    told: list[str] = []
    while engine.scheduler.has_work():
        told += engine.step().preempted_req_ids
    heard = [name for step in engine.connector.steps for name in step.preempted]
    assert heard == told != []


def test_encoder_tokens_have_blocks() -> None:
    """And those that the pool has no room for are refused."""
    groups = tuple(
        KVCacheGroupSpec((f"layer{i}",), spec)
        for i, spec in enumerate((full(), cross()))
    )
    manager = KVCacheManager(
        KVCacheConfig(8, (), groups),
        64,
        4,
        enable_caching=False,
        limits=EngineLimits(max_model_len=64, max_num_encoder_input_tokens=20),
    )
    scheduler = Scheduler(manager, SchedulerConfig())
    with pytest.raises(RequestError, match="needs 8 blocks"):
        scheduler.add_request(Request("b", range(9)), 3, num_encoder_tokens=17)
    scheduler.add_request(Request("a", range(9)), 3, num_encoder_tokens=9)
    (new,) = scheduler.schedule().scheduled_new_reqs
    assert list(map(len, new.block_ids)) == [3, 3]


@pytest.mark.parametrize(("hit", "external"), [(0, 0), (8, 0), (0, 12), (8, 4)])
def test_tokens_that_were_not_computed_are_told(hit: int, external: int) -> None:
    """Those of the first admission, also if there is another one."""
    engine = Harness(connects=True, max_num_batched_tokens=32)
    if hit:
        engine.add("first", range(hit))
        engine.run()
    request = engine.add("a", range(17), 3)
    engine.connector.offers["a"] = hit + external if external else 0
    told: list[int] = []
    for _ in range(10):
        engine.schedule()
        news = engine.scheduler._roster.news
        engine.land(loaded("a"))
        told += [item.num_cached_tokens for item in news]
        if len(told) == 1 and not request.num_preemptions:
            engine.scheduler.reset_prefix_cache(reset_running=True)
    assert told == [hit + external] * 3


class CountedIds(list[str]):
    """Counts how often it is looked through."""

    passes = 0

    def __iter__(self) -> Iterator[str]:
        self.passes += 1
        return super().__iter__()

    def __contains__(self, key: object) -> bool:
        self.passes += 1
        return super().__contains__(key)


def test_watched_ids_are_read_once_a_step() -> None:
    engine = Harness(60, connects=True, max_num_batched_tokens=64)
    ids = CountedIds(f"r{i}" for i in range(9))
    engine.connector.__class__ = type(
        "Watches", (Connector,), {"watched": property(lambda self: ids)}
    )
    for i in range(9):
        engine.add(f"r{i}", range(10 * i, 10 * i + 5), 9)
    for step in range(1, 5):
        engine.step()
        assert ids.passes == step
        assert len(engine.connector.steps[-1].scheduled) == 9
