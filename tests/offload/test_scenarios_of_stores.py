"""Faults that users of offload met, each as a rule with a small input: stores.

Numbers are those of the list of scenarios that these tests were written from.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.contract import MISS, Lookup
from tests.offload.engine_model import Engine
from tests.offload.jobs import blocks_of
from tests.offload.setup_model import Phase, Setup, prompt
from tests.offload.situations import A, B, held_store


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
