"""A host memory that is too small: what stays in it must be of use."""

from collections.abc import Sequence

import pytest

from kvplugin.connectors.offload import config as offload_config
from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.scheduler import OffloadScheduler
from kvplugin.contract import MISS, Lookup
from kvplugin.errors import CapacityError, ConfigError
from kvplugin.hooks import EvictionPolicyContext, Hooks, hookimpl
from kvplugin.policies.eviction import LRU, BlockContext
from tests.offload.content import BLOCK_BYTES
from tests.offload.engine_model import Engine
from tests.offload.jobs import blocks_of
from tests.offload.setup_model import Setup, prompt


class TestHeadBeforeTail:
    """A tail without its head can never be hit."""

    @pytest.mark.parametrize("budget", [4, 8, 12, 64])
    def test_a_prompt_larger_than_host_memory_keeps_its_head(self, budget: int) -> None:
        engine = Engine(Setup(token_budget=budget), host_blocks=4)
        engine.serve(prompt(40))
        assert engine.offered(prompt(40)) == Lookup(16)
        assert engine.totals.counters["evicted_blocks"] == 0
        engine.forget_local()
        engine.serve(prompt(40))
        assert engine.offered(prompt(40)) == Lookup(16)
        engine.check_idle()

    @pytest.mark.parametrize("budget", [4, 8, 32])
    def test_the_tail_of_an_old_prompt_leaves_before_its_head(
        self, budget: int
    ) -> None:
        engine = Engine(Setup(token_budget=budget), host_blocks=12)
        engine.serve(prompt(32, seed=1), prompt(32, seed=2))
        assert engine.offered(prompt(32, seed=2)) == Lookup(32)
        assert engine.offered(prompt(32, seed=1)) == Lookup(16)

    @pytest.mark.parametrize("budget", [4, 8, 32])
    def test_a_shared_head_outlives_the_tails_that_differ(self, budget: int) -> None:
        engine = Engine(Setup(token_budget=budget), host_blocks=8)
        document = prompt(16)
        for question in range(1, 6):
            engine.serve([*document, *prompt(8, seed=question)])
        assert engine.offered(document) == Lookup(16)

    def test_a_loaded_head_outlives_what_nobody_asked_for(self) -> None:
        engine = Engine(host_blocks=8)
        engine.serve(prompt(16, seed=1), prompt(16, seed=2))
        engine.forget_local()
        engine.serve(prompt(17, seed=1), prompt(16, seed=3))
        assert engine.offered(prompt(16, seed=1)) == Lookup(16)
        assert engine.offered(prompt(16, seed=2)) == MISS

    def test_what_an_aborted_load_has_held_leaves_tail_first(self) -> None:
        engine = Engine(host_blocks=8)
        engine.serve(prompt(16, seed=1), prompt(16, seed=2))
        engine.forget_local()
        engine.jobs.hold()
        request = engine.add(prompt(17, seed=1))
        engine.step()
        engine.abort(request)
        engine.jobs.let_go()
        engine.run()
        engine.serve(prompt(24, seed=3))
        assert engine.offered(prompt(16, seed=1)) == Lookup(8)
        assert engine.offered(prompt(16, seed=2)) == MISS

    def test_what_follows_a_block_without_room_is_not_stored(self) -> None:
        engine = Engine(Setup(token_budget=8), host_blocks=4)
        engine.jobs.hold()
        engine.add(prompt(16, seed=1))
        engine.steps(2)
        engine.add(prompt(24, seed=2))
        engine.step()
        assert engine.totals.counters["skipped_blocks"] == 2
        engine.jobs.let_go()
        engine.run()
        assert len(engine.jobs.all_stores) == 2
        assert engine.offered(prompt(16, seed=1)) == Lookup(16)

    def test_a_head_that_was_lost_takes_the_place_of_its_own_tail(self) -> None:
        engine = Engine(Setup(token_budget=16), host_blocks=4)
        engine.memories[0].broken = True
        engine.add(prompt(32))
        engine.step()
        engine.memories[0].broken = False
        engine.run()
        assert engine.offered(prompt(32)) == MISS, "the tail alone is there"
        engine.forget_local()
        engine.setup = Setup(token_budget=64)
        engine.serve(prompt(32))
        assert engine.offered(prompt(32)) == Lookup(16)


class HeardHits(LRU):
    """LRU that keeps account of what it is told of hits."""

    def __init__(self, heard: list[list[int]]) -> None:
        super().__init__()
        self._heard = heard

    def hit(self, ids: Sequence[int], ctx: BlockContext) -> None:
        self._heard.append(list(ids))
        super().hit(ids, ctx)


class Hearing:
    """A plugin with the policy `heard`; knows for what it was asked."""

    def __init__(self) -> None:
        self.hits: list[list[int]] = []
        self.asked: list[EvictionPolicyContext] = []

    @hookimpl
    def kvp_make_eviction_policy(self, ctx: EvictionPolicyContext) -> LRU | None:
        if ctx.name != "heard":
            return None
        self.asked.append(ctx)
        return HeardHits(self.hits)


@pytest.fixture
def hearing(monkeypatch: pytest.MonkeyPatch) -> Hearing:
    """Installed while the test runs."""
    plugin = Hearing()
    hooks = Hooks.of(plugin)
    monkeypatch.setattr(offload_config, "get_hooks", lambda: hooks)
    return plugin


class TestRoom:
    def test_room_is_made_of_what_was_used_least_recently(self) -> None:
        engine = Engine(host_blocks=8)
        engine.serve(*(prompt(16, seed=seed) for seed in (1, 2, 1, 3)))
        assert engine.offered(prompt(16, seed=1)) == Lookup(16)
        assert engine.offered(prompt(16, seed=2)) == MISS
        assert engine.totals.counters["evicted_blocks"] == 4

    def test_only_a_load_is_a_hit_for_the_eviction_policy(
        self, hearing: Hearing
    ) -> None:
        engine = Engine(eviction_policy="heard")
        engine.serve(prompt(16), prompt(16))
        assert hearing.hits == []
        engine.forget_local()
        engine.serve(prompt(16))
        assert hearing.hits == [[1, 2, 3]]

    def test_the_eviction_policy_is_told_its_options_and_its_pool(
        self, hearing: Hearing
    ) -> None:
        options = {"size": 3}
        Engine(host_blocks=8, eviction_policy="heard", eviction_policy_options=options)
        asked = hearing.asked[-1]
        assert (asked.options, asked.num_blocks, asked.medium) == (options, 9, "CPU")

    @pytest.mark.parametrize("ranks", [1, 2, 4])
    def test_host_memory_is_shared_by_all_ranks(self, ranks: int) -> None:
        setup = Setup(ranks=ranks)
        config = OffloadConfig(cpu_bytes_to_use=10.9 * BLOCK_BYTES * ranks)
        assert OffloadScheduler(setup.info(), config).host_blocks == 10

    def test_host_memory_holds_whole_chunks(self) -> None:
        config = OffloadConfig(cpu_bytes_to_use=11 * BLOCK_BYTES, blocks_per_chunk=4)
        assert OffloadScheduler(Setup().info(), config).host_blocks == 8

    def test_host_memory_for_less_than_a_chunk_is_refused(self) -> None:
        config = OffloadConfig(cpu_bytes_to_use=2 * BLOCK_BYTES, blocks_per_chunk=3)
        with pytest.raises(CapacityError, match="cpu_bytes_to_use=128 holds no chunk"):
            OffloadScheduler(Setup().info(), config)

    def test_an_unknown_eviction_policy_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="Did you mean 'lru'"):
            OffloadConfig(cpu_bytes_to_use=1024, eviction_policy="lur")

    def test_options_that_the_eviction_policy_does_not_know_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="'lru' takes no options, got size"):
            OffloadConfig(cpu_bytes_to_use=1024, eviction_policy_options={"size": 3})

    def test_host_ids_name_places_in_host_memory(self) -> None:
        engine = Engine(host_blocks=6, blocks_per_chunk=2)
        engine.serve(prompt(24))
        (store,) = engine.jobs.all_stores
        assert sorted(store.parts[0][2]) == list(range(6))
        assert len(set(blocks_of(store))) == 6
