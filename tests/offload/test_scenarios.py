"""Faults that users of offload met, each as a rule with a small input.

Numbers are those of the list of scenarios that these tests were written from.
"""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.contract import LATER, MISS, CopyJob, Lookup
from tests.offload.engine_model import Engine
from tests.offload.jobs import blocks_of
from tests.offload.setup_model import Phase, Request, Setup, prompt

A, B = prompt(8, seed=1), prompt(12, seed=2)


def held_store(engine: Engine) -> tuple[Request, CopyJob]:
    """A has been computed and still runs; its store is under way."""
    engine.jobs.hold()
    a = engine.add(A, max_new_tokens=4)
    engine.step()
    (store,) = engine.jobs.stores
    return a, store


def held_load(engine: Engine, length: int = 16) -> tuple[Request, CopyJob]:
    """A request is parked; its load, of all blocks but the last, is under way."""
    engine.serve(prompt(length))
    engine.forget_local()
    engine.jobs.hold()
    request = engine.add(prompt(length), max_new_tokens=2)
    engine.step()
    (load,) = engine.jobs.loads
    return request, load


class TestStoreReadsBlocksThatMayBeReused:
    """Scenario 1: 4 usable blocks; A has two of them, B wants three."""

    setup = Setup(usable_blocks=4)

    def test_a_preempted_request_keeps_what_its_store_reads(self) -> None:
        engine = Engine(self.setup)
        a, store = held_store(engine)
        engine.preempt(a)
        b = engine.add(B)
        engine.steps(3)
        assert b.phase is Phase.WAITING, "B got blocks that a store still reads"
        engine.jobs.complete(store)
        engine.jobs.let_go()
        engine.run()
        engine.forget_local()
        assert engine.offered(A) == Lookup(len(A))
        engine.serve(A)
        engine.check_idle()

    def test_a_cancelled_store_leaves_no_key(self) -> None:
        engine = Engine(self.setup)
        a, store = held_store(engine)
        engine.abort(a)
        engine.add(B)
        engine.step()
        engine.jobs.fail(store)
        engine.jobs.let_go()
        engine.run()
        assert engine.offered(A) == MISS
        engine.check_idle()

    def test_a_store_goes_on_after_the_end_of_its_request(self) -> None:
        engine = Engine(self.setup)
        a, store = held_store(engine)
        engine.abort(a)
        engine.add(B)
        engine.steps(2)
        engine.jobs.complete(store)
        engine.jobs.let_go()
        engine.run()
        engine.forget_local()
        engine.serve(A)
        assert engine.totals.counters["loaded_blocks"] == 1
        engine.check_idle()

    def test_a_running_request_waits_for_a_young_store(self) -> None:
        engine = Engine(self.setup)
        a, store = held_store(engine)
        engine.abort(a)
        b = engine.add(prompt(8, seed=2), max_new_tokens=4)
        engine.steps(3)
        assert b.phase is Phase.RUNNING
        assert len(b.output) == 1, "the ninth token has no block yet"
        engine.jobs.complete(store)
        engine.steps(2)
        assert len(b.output) == 2

    def test_blocks_that_a_store_has_held_leave_tail_first(self) -> None:
        engine = Engine(Setup(usable_blocks=8))
        engine.jobs.hold()
        engine.add(prompt(16, seed=1))
        engine.step()
        engine.jobs.complete(*engine.jobs.stores)
        engine.jobs.let_go()
        engine.run()
        engine.serve(prompt(23, seed=2))
        engine.serve(prompt(16, seed=1))
        (load,) = engine.jobs.all_loads
        assert len(blocks_of(load)) == 1, "two blocks of the head are a local hit"

    def test_a_running_request_does_not_wait_for_an_old_store(self) -> None:
        engine = Engine(self.setup, lookup_wait_ms=1000)
        a, _ = held_store(engine)
        engine.abort(a)
        b = engine.add(prompt(8, seed=2), max_new_tokens=4)
        engine.step()
        engine.clock.now += 1.0
        engine.step()
        assert b.phase is Phase.WAITING

    @pytest.mark.parametrize("seed", range(10))
    def test_no_order_of_reuse_and_store_mixes_up_their_bytes(self, seed: int) -> None:
        chance = random.Random(seed)
        engine = Engine(Setup(usable_blocks=12), lookup_wait_ms=0)
        engine.jobs.hold()
        for turn in range(40):
            if len(engine.running) + len(engine.waiting) < 3:
                engine.add(prompt(chance.randint(4, 20), seed=turn % 4), 2)
            if engine.running and chance.random() < 0.3:
                engine.preempt(chance.choice(engine.running))
            engine.step()
            engine.jobs.complete(*engine.jobs.loads)
            late = [job for job in engine.jobs.stores if chance.random() < 0.3]
            engine.jobs.complete(*late)
        engine.jobs.let_go()
        engine.run()
        engine.check_idle()


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


class TestFailedStore:
    """Scenario 31: what was not stored whole is not stored at all."""

    @pytest.mark.parametrize("moved", [0, 1, 3])
    def test_lookups_miss_after_a_store_that_broke_off(self, moved: int) -> None:
        engine = Engine()
        engine.jobs.hold()
        engine.add(prompt(16))
        engine.step()
        engine.jobs.tear(engine.jobs.stores[0], moved)
        engine.step()
        assert engine.offered(prompt(16)) == MISS
        assert engine.totals.counters["failed_stores"] == 1
        assert engine.totals.counters["stored_blocks"] == 0
        engine.check_idle()

    def test_lookups_miss_after_a_store_that_raised(self) -> None:
        engine = Engine()
        engine.memories[0].broken = True
        engine.serve(prompt(16))
        assert engine.offered(prompt(16)) == MISS
        assert engine.totals.counters["failed_stores"] == 1
        engine.check_idle()

    def test_the_next_request_stores_what_a_failed_store_lost(self) -> None:
        engine = Engine()
        engine.memories[0].broken = True
        engine.serve(prompt(16))
        engine.memories[0].broken = False
        engine.serve(prompt(16))
        assert engine.offered(prompt(16)) == Lookup(16)
        engine.forget_local()
        engine.serve(prompt(16))
        engine.check_idle()

    def test_a_failed_store_does_not_harm_what_was_stored_before(self) -> None:
        engine = Engine()
        engine.serve(prompt(16))
        engine.memories[0].broken = True
        engine.serve([*prompt(16), *B])
        assert engine.offered([*prompt(16), *B]) == Lookup(16)


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

    def test_an_abort_before_the_load_was_even_planned(self) -> None:
        engine = Engine(replace(self.setup, asks_pending_work=False))
        _, load = held_load(engine, length=12)
        engine.jobs.complete(load)
        engine.jobs.let_go()
        request = engine.add(B, max_new_tokens=2)
        engine.abort(request)
        engine.run()
        engine.check_idle()


class TestStoredBlocksAreFound:
    """Scenario 38: 10 blocks, 4 a step."""

    def test_all_full_blocks_of_a_chunked_prompt_are_found(self) -> None:
        engine = Engine(Setup(token_budget=16))
        engine.serve(prompt(40))
        assert [len(blocks_of(job)) for job in engine.jobs.all_stores] == [4, 4, 2]
        assert engine.offered(prompt(40)) == Lookup(40)

    @settings(max_examples=60, deadline=None)
    @given(
        tokens=st.integers(1, 60),
        budget=st.integers(1, 70),
        chunk=st.sampled_from([1, 2, 3, 16]),
        host_chunks=st.integers(1, 8),
        prompt_only=st.booleans(),
        new_tokens=st.integers(1, 9),
    )
    def test_whoever_stored_something_hits_when_it_comes_again(
        self,
        tokens: int,
        budget: int,
        chunk: int,
        host_chunks: int,
        prompt_only: bool,
        new_tokens: int,
    ) -> None:
        engine = Engine(
            Setup(token_budget=budget),
            host_blocks=host_chunks * chunk,
            blocks_per_chunk=chunk,
            offload_prompt_only=prompt_only,
        )
        (request,) = engine.serve(prompt(tokens), max_new_tokens=new_tokens)
        engine.check_idle()
        kept = tokens if prompt_only else tokens + new_tokens - 1
        chunks = min(kept // (4 * chunk), host_chunks)
        assert engine.totals.counters["stored_blocks"] == chunks * chunk
        assert engine.offered(request.tokens) == Lookup(chunks * chunk * 4)


class TestSameBlockTwice:
    """Scenario 39: a block on its way is not sent again."""

    @pytest.mark.parametrize("prefix_caching", [True, False])
    def test_a_hit_on_a_block_being_stored_starts_no_second_store(
        self, prefix_caching: bool
    ) -> None:
        engine = Engine(Setup(prefix_caching=prefix_caching), lookup_wait_ms=0)
        held_store(engine)
        engine.add(A)
        engine.steps(2)
        assert len(engine.jobs.all_stores) == 1

    def test_only_what_the_first_store_lacks_is_stored(self) -> None:
        engine = Engine()
        held_store(engine)
        engine.add([*A, *B])
        engine.step()
        first, second = engine.jobs.all_stores
        assert (len(blocks_of(first)), len(blocks_of(second))) == (2, 3)

    def test_two_requests_of_one_step_store_their_prefix_once(self) -> None:
        engine = Engine(Setup(prefix_caching=False))
        engine.add(A)
        engine.add([*A, *B])
        engine.run()
        assert engine.totals.counters["stored_blocks"] == 5


class TestPreemption:
    """Scenario 41: jobs belong to an admission, not to a request."""

    def test_a_request_admitted_again_beside_its_own_store_ends_well(self) -> None:
        engine = Engine()
        a, store = held_store(engine)
        engine.preempt(a)
        engine.step()
        assert a.phase is Phase.RUNNING
        engine.jobs.complete(store)
        engine.run()
        assert engine.totals.counters["stored_blocks"] == 2
        engine.check_idle()

    def test_a_request_admitted_again_in_the_step_that_tells_of_its_preemption(
        self,
    ) -> None:
        engine = Engine(Setup(token_budget=4))
        a = engine.add(prompt(16))
        engine.step()
        engine.preempt(a)
        engine.run()
        assert engine.totals.counters["stored_blocks"] == 4, "also of its new row"

    @pytest.mark.parametrize("asks", [True, False])
    @pytest.mark.parametrize("seed", range(50))
    def test_preempted_at_random_beside_held_jobs_all_ends_well(
        self, seed: int, asks: bool
    ) -> None:
        chance = random.Random(seed)
        engine = Engine(
            Setup(usable_blocks=16, token_budget=8, asks_pending_work=asks),
            host_blocks=8,
            lookup_wait_ms=0,
        )
        engine.jobs.hold()
        for turn in range(15):
            if len(engine.running) + len(engine.waiting) < 3:
                engine.add(prompt(chance.randint(4, 24), seed=turn % 3), 3)
            if engine.running:
                engine.preempt(chance.choice(engine.running))
            engine.step()
            jobs = [*engine.jobs.stores, *engine.jobs.loads]
            engine.jobs.complete(*(job for job in jobs if chance.random() < 0.2))
            jobs = [*engine.jobs.stores, *engine.jobs.loads]
            engine.jobs.fail(*(job for job in jobs if chance.random() < 0.1))
        engine.jobs.let_go()
        engine.run()
        engine.steps(2)
        engine.check_idle()


class TestDelayedEnd:
    """Scenario 43: an engine that asks for nothing is told when a request may go."""

    setup = Setup(asks_pending_work=False)

    def test_a_request_ends_when_its_stores_have(self) -> None:
        engine = Engine(self.setup)
        a, store = held_store(engine)
        engine.abort(a)
        engine.steps(3)
        assert engine.has_work(), "nobody would hear of the store's end"
        engine.jobs.complete(store)
        engine.run(limit=3)
        engine.check_idle()

    def test_a_request_ends_with_the_last_of_its_stores(self) -> None:
        engine = Engine(replace(self.setup, token_budget=8))
        engine.jobs.hold()
        a = engine.add(prompt(16), max_new_tokens=4)
        engine.steps(2)
        engine.abort(a)
        first, second = engine.jobs.stores
        engine.jobs.complete(second)
        engine.steps(2)
        assert engine.has_work()
        engine.jobs.complete(first)
        engine.step()
        assert engine.scheduler.has_pending_work(), "the end is not announced yet"
        engine.run(limit=2)
        engine.check_idle()

    @pytest.mark.parametrize("ranks", [1, 2, 4])
    def test_every_rank_announces_the_end_once(self, ranks: int) -> None:
        engine = Engine(replace(self.setup, ranks=ranks))
        a, store = held_store(engine)
        engine.abort(a)
        engine.jobs.fail(store)
        engine.run(limit=3)
        engine.check_idle()

    @pytest.mark.parametrize("tokens", [1, 3])
    def test_a_prompt_shorter_than_a_block_ends_at_once(self, tokens: int) -> None:
        engine = Engine(self.setup)
        engine.jobs.hold()
        engine.add(prompt(tokens))
        engine.step()
        assert not engine.has_work()
        engine.check_idle()

    def test_a_request_whose_blocks_are_all_stored_ends_at_once(self) -> None:
        engine = Engine(self.setup)
        engine.serve(A)
        engine.jobs.hold()
        engine.add(A)
        engine.step()
        assert not engine.has_work()
        engine.check_idle()

    def test_a_request_whose_blocks_another_is_storing_ends_at_once(self) -> None:
        engine = Engine(self.setup)
        a, store = held_store(engine)
        second = engine.add(A)
        engine.step()
        assert second.phase is Phase.FINISHED
        engine.abort(a)
        engine.jobs.complete(store)
        engine.run(limit=3)
        engine.check_idle()

    def test_a_request_that_is_aborted_beside_a_store_and_a_load_ends_once(
        self,
    ) -> None:
        engine = Engine(replace(self.setup, prefix_caching=False), lookup_wait_ms=0)
        engine.serve(A)
        engine.jobs.hold()
        request = engine.add([*A, *B], max_new_tokens=2)
        engine.step()
        engine.jobs.complete(*engine.jobs.loads)
        engine.steps(2)
        assert len(engine.jobs.stores) == 1
        engine.preempt(request)
        engine.step()
        assert request.phase is Phase.PARKED
        engine.abort(request)
        engine.jobs.let_go()
        engine.run()
        engine.steps(2)
        engine.check_idle()

    def test_a_reset_does_not_lose_the_end_of_a_request(self) -> None:
        engine = Engine(self.setup)
        a, store = held_store(engine)
        engine.abort(a)
        engine.scheduler.reset()
        engine.jobs.complete(store)
        engine.run(limit=3)
        engine.check_idle()


class TestEvictionBesideTransfers:
    """Scenario 47: a host of 4 blocks, two of them being loaded."""

    def test_what_is_being_loaded_is_not_evicted(self) -> None:
        engine = Engine(host_blocks=4)
        engine.serve(prompt(16))
        engine.forget_local()
        engine.jobs.hold()
        first = engine.add(prompt(12))
        engine.step()
        (load,) = engine.jobs.loads
        assert len(blocks_of(load)) == 2
        engine.add(B)
        engine.step()
        (store,) = engine.jobs.stores
        assert len(blocks_of(store)) == 2
        assert engine.totals.counters["skipped_blocks"] == 1
        engine.jobs.complete(store, load)
        engine.jobs.let_go()
        engine.run()
        assert first.phase is Phase.FINISHED
        engine.check_idle()

    def test_a_block_for_which_there_was_no_room_is_not_taken_for_stored(self) -> None:
        engine = Engine(host_blocks=2)
        held_store(engine)
        engine.add(B)
        engine.steps(2)
        assert engine.totals.counters["skipped_blocks"] == 3
        engine.jobs.let_go()
        engine.run()
        assert engine.offered(B) == MISS
        engine.serve(B)
        assert engine.offered(B) == Lookup(8), "the next request stores what fits"


class TestChunkedPrefill:
    """Scenario 52: a prompt of 48 tokens in three steps of 16."""

    def test_every_allocation_of_a_prefill_is_stored_in_order(self) -> None:
        engine = Engine(Setup(block_size=16, token_budget=16))
        request = engine.add(prompt(48), max_new_tokens=2)
        engine.steps(3)
        stored = [blocks_of(job) for job in engine.jobs.all_stores]
        assert stored == [[block] for block in request.row]
        engine.run()
        engine.check_idle()

    @pytest.mark.parametrize("budget", [1, 3, 7, 16, 17, 100])
    def test_blocks_are_stored_in_the_step_that_fills_them(self, budget: int) -> None:
        engine = Engine(Setup(token_budget=budget))
        request = engine.add(prompt(48), max_new_tokens=2)
        while request.phase is not Phase.FINISHED:
            engine.step()
            computed = min(request.num_computed, 48)
            stored = sum(len(blocks_of(job)) for job in engine.jobs.all_stores)
            assert stored == computed // 4 or request.phase is Phase.FINISHED
        assert engine.offered(prompt(48)) == Lookup(48)

    def test_two_prompts_that_share_a_step_store_their_own_blocks(self) -> None:
        engine = Engine(Setup(token_budget=12))
        engine.add(prompt(20, seed=1), max_new_tokens=2)
        engine.add(prompt(20, seed=2), max_new_tokens=2)
        engine.run()
        engine.forget_local()
        engine.serve(prompt(20, seed=1), prompt(20, seed=2))
        assert engine.totals.counters["loaded_blocks"] == 8


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


def test_later_is_a_word_for_transfers_under_way_only() -> None:
    engine = Engine()
    assert engine.offered(A) == MISS
    held_store(engine)
    assert engine.offered(A) == LATER
    engine.jobs.let_go()
    engine.run()
    assert engine.offered(A) == Lookup(len(A))
