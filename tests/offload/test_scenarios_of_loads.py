"""Faults that users of offload met, each as a rule with a small input: loads.

Numbers are those of the list of scenarios that these tests were written from.
"""

from dataclasses import replace

import pytest

from kvplugin.contract import MISS, Lookup
from tests.offload.engine_model import Engine
from tests.offload.jobs import blocks_of
from tests.offload.setup_model import Phase, Setup, prompt
from tests.offload.situations import B, held_load


class TestWholePromptIsStored:
    """Scenario 5: something is left to compute, and what is credited is loaded."""

    @pytest.mark.parametrize("tokens", [17, 31, 32, 33, 48])
    def test_whole_blocks_before_the_last_token_are_loaded(self, tokens: int) -> None:
        engine = Engine(Setup(block_size=16))
        engine.serve(prompt(48))
        engine.forget_local()
        engine.serve(prompt(tokens))
        credited = (tokens - 1) // 16 * 16
        assert engine.totals.counters["loaded_tokens"] == credited
        assert engine.totals.counters["loaded_blocks"] == credited // 16
        engine.check_idle()


class TestFailedLoad:
    """Scenario 32: a load is good only if all of it is there."""

    @pytest.mark.parametrize("policy", ["recompute", "fail"])
    @pytest.mark.parametrize("moved", [0, 1, 2])
    def test_nothing_of_a_torn_load_is_used(self, policy: str, moved: int) -> None:
        engine = Engine(Setup(on_failed_load=policy))  # type: ignore[arg-type]
        request, load = held_load(engine)
        engine.jobs.tear(load, moved)
        engine.jobs.let_go()
        engine.run()
        assert request.failed == (policy == "fail")
        assert engine.totals.counters["failed_loads"] == 1
        assert engine.totals.counters["loaded_blocks"] == 0
        engine.check_idle()

    def test_the_keys_of_a_failed_load_are_gone(self) -> None:
        engine = Engine()
        _, load = held_load(engine)
        engine.jobs.fail(load)
        engine.step()
        assert engine.offered(prompt(16)) == MISS

    def test_the_keys_that_a_failed_load_did_not_read_stay(self) -> None:
        engine = Engine()
        engine.serve(B)
        _, load = held_load(engine)
        engine.jobs.fail(load)
        engine.step()
        assert engine.offered(B) == Lookup(len(B))

    def test_a_request_is_not_offered_a_second_load_after_one_has_failed(self) -> None:
        engine = Engine(Setup(prefix_caching=False))
        request, load = held_load(engine)
        engine.scheduler.reset()
        engine.add(prompt(16))
        engine.step()
        engine.jobs.complete(*engine.jobs.stores)
        engine.step()
        assert engine.offered(prompt(16)) == Lookup(16), "another has stored it again"
        engine.jobs.fail(load)
        engine.jobs.let_go()
        engine.run()
        assert request.phase is Phase.FINISHED
        assert engine.jobs.all_loads == [load]
        assert engine.offered(prompt(16)) == Lookup(16), "not what had failed"

    def test_a_load_starts_where_the_local_hit_ends_and_fails_from_there(self) -> None:
        engine = Engine()
        engine.serve(prompt(16))
        engine.pool.evict_blocks([4, 3, 2])
        engine.jobs.hold()
        request = engine.add(prompt(16))
        engine.step()
        (load,) = engine.jobs.loads
        assert len(blocks_of(load)) == 2
        engine.jobs.fail(load)
        engine.step()
        assert request.num_computed == 4, "the local hit is still good"
        engine.jobs.let_go()
        engine.run()
        engine.check_idle()

    def test_requests_that_load_something_else_are_not_affected(self) -> None:
        engine = Engine()
        engine.serve(B)
        request, load = held_load(engine)
        other = engine.add(B)
        engine.step()
        engine.jobs.fail(load)
        engine.jobs.let_go()
        engine.run()
        assert (request.failed, other.failed) == (False, False)
        assert engine.totals.counters["loaded_blocks"] == 2
        engine.check_idle()

    def test_one_who_waited_for_a_load_that_failed_computes(self) -> None:
        engine = Engine(Setup(on_failed_load="fail"))
        _, load = held_load(engine)
        second = engine.add(prompt(16))
        engine.step()
        assert second.phase is Phase.WAITING
        engine.jobs.fail(load)
        engine.steps(2)
        assert second.phase is Phase.FINISHED
        assert len(engine.jobs.all_loads) == 1


class TestAbortDuringALoad:
    """Scenario 34: blocks are nobody else's until the load is quiescent."""

    setup = Setup(usable_blocks=4)

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_abort_then_completion(self, ranks: int) -> None:
        engine = Engine(replace(self.setup, ranks=ranks))
        request, load = held_load(engine, length=12)
        engine.abort(request)
        engine.add(B)
        engine.steps(2)
        assert engine.running == [], "B got blocks that a load still writes"
        engine.jobs.complete(load)
        engine.jobs.let_go()
        engine.run()
        engine.check_idle()

    def test_completion_then_abort(self) -> None:
        engine = Engine(self.setup)
        request, load = held_load(engine, length=12)
        engine.jobs.complete(load)
        engine.step()
        assert request.phase is Phase.LOADED
        engine.abort(request)
        engine.jobs.let_go()
        engine.run()
        engine.check_idle()

    def test_abort_and_completion_in_one_step(self) -> None:
        engine = Engine(self.setup)
        request, load = held_load(engine, length=12)
        engine.jobs.complete(load)
        engine.abort(request)
        engine.run()
        engine.check_idle()

    @pytest.mark.parametrize("is_aborted", [True, False])
    def test_completion_twice(self, is_aborted: bool) -> None:
        engine = Engine(self.setup)
        request, load = held_load(engine, length=12)
        if is_aborted:
            engine.abort(request)
        engine.jobs.complete(load)
        engine.transports[0].repeat(load.id)
        engine.step()
        engine.transports[0].repeat(load.id)
        engine.jobs.let_go()
        engine.run()
        engine.check_idle()

    def test_a_failure_after_the_abort_frees_the_blocks_all_the_same(self) -> None:
        engine = Engine(self.setup)
        request, load = held_load(engine, length=12)
        engine.abort(request)
        engine.jobs.fail(load)
        engine.jobs.let_go()
        engine.run()
        engine.check_idle()

    def test_a_request_that_is_aborted_while_it_waits_is_forgotten(self) -> None:
        engine = Engine()
        _, load = held_load(engine)
        second = engine.add(prompt(16))
        engine.step()
        assert second.phase is Phase.WAITING, "for the load of the first"
        engine.abort(second)
        engine.jobs.complete(load)
        engine.run()
        engine.check_idle()


class TestChunks:
    """Scenario 53: several engine blocks are kept as one; hits start anywhere."""

    def test_a_hit_inside_a_chunk_loads_exactly_the_rest_of_it(self) -> None:
        engine = Engine(blocks_per_chunk=16)
        engine.serve(prompt(64))
        engine.pool.evict_blocks(range(4, 17))
        engine.serve([*prompt(64), *B])
        (load,) = engine.jobs.all_loads
        assert len(blocks_of(load)) == 13
        engine.check_idle()

    @pytest.mark.parametrize("chunk", [1, 2, 16])
    @pytest.mark.parametrize("local", [0, 1, 2, 3, 5, 15, 16, 17, 31])
    def test_a_load_is_what_lies_between_local_hit_and_stored_end(
        self, chunk: int, local: int
    ) -> None:
        engine = Engine(Setup(usable_blocks=40), host_blocks=48, blocks_per_chunk=chunk)
        engine.serve(prompt(132))
        engine.pool.evict_blocks(range(local + 1, 41))
        engine.serve(prompt(132))
        loaded = sum(len(blocks_of(job)) for job in engine.jobs.all_loads)
        assert loaded == 32 - local
        engine.check_idle()

    def test_a_prompt_of_less_than_a_chunk_is_not_stored(self) -> None:
        engine = Engine(blocks_per_chunk=2)
        engine.serve(prompt(7))
        assert engine.jobs.all_stores == []
        engine.check_idle()

    def test_a_prompt_that_is_stored_whole_loads_its_last_chunk_in_part(self) -> None:
        engine = Engine(blocks_per_chunk=16)
        engine.serve(prompt(64))
        engine.forget_local()
        engine.serve(prompt(64))
        assert engine.totals.counters["loaded_blocks"] == 15

    def test_chunks_are_evicted_as_one(self) -> None:
        engine = Engine(host_blocks=8, blocks_per_chunk=4)
        engine.serve(prompt(16, seed=1), prompt(16, seed=2), prompt(16, seed=3))
        assert engine.totals.counters["evicted_blocks"] == 4
        assert engine.offered(prompt(16, seed=1)) == MISS
        assert engine.offered(prompt(16, seed=2)) == Lookup(16)
