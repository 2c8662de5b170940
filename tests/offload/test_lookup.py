"""What a request is offered, what it waits for, and for how long."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.contract import LATER, MISS, Lookup
from tests.offload.engine_model import Engine
from tests.offload.jobs import blocks_of
from tests.offload.setup_model import Phase, Setup, prompt

DOCUMENT = prompt(16)


def loading(engine: Engine) -> None:
    """The document's load is under way, for a request that asks about it."""
    engine.serve(DOCUMENT)
    engine.forget_local()
    engine.jobs.hold()
    engine.add([*DOCUMENT, *prompt(3, seed=1)])
    engine.step()
    assert engine.jobs.loads


class TestWaiting:
    """Someone else's transfer would give a hit: wait for it, but not for ever."""

    def test_a_lookup_that_meets_a_store_waits_and_then_hits(self) -> None:
        engine = Engine(Setup(prefix_caching=False))
        engine.jobs.hold()
        engine.add(DOCUMENT)
        engine.step()
        second = engine.add(prompt(16))
        engine.steps(3)
        assert second.phase is Phase.WAITING
        engine.jobs.let_go()
        engine.run()
        assert engine.totals.counters["loaded_tokens"] == 12
        engine.check_idle()

    def test_a_store_that_takes_longer_than_the_wait_is_a_miss(self) -> None:
        engine = Engine(Setup(prefix_caching=False), lookup_wait_ms=500)
        engine.jobs.hold()
        engine.add(DOCUMENT)
        engine.step()
        second = engine.add(DOCUMENT)
        engine.step()
        engine.clock.now += 0.499
        engine.step()
        assert second.phase is Phase.WAITING
        engine.clock.now += 0.001
        engine.step()
        assert second.phase is Phase.FINISHED

    def test_a_load_that_takes_longer_than_the_wait_is_made_once_more(self) -> None:
        engine = Engine(lookup_wait_ms=500)
        loading(engine)
        second = engine.add([*DOCUMENT, *prompt(3, seed=2)])
        engine.step()
        assert second.phase is Phase.WAITING
        engine.clock.now += 0.5
        engine.step()
        assert second.phase is Phase.PARKED, "what is readable need not be recomputed"
        first, again = engine.jobs.loads
        assert again.parts[0][2] == first.parts[0][2]
        engine.jobs.complete(again)
        engine.steps(2)
        assert second.phase is Phase.FINISHED

    def test_a_request_whose_wait_is_over_takes_what_is_there_by_then(self) -> None:
        engine = Engine(Setup(prefix_caching=False, token_budget=8), lookup_wait_ms=500)
        engine.serve(prompt(8))
        engine.jobs.hold()
        engine.add(DOCUMENT)
        engine.step()
        engine.jobs.complete(*engine.jobs.loads)
        engine.steps(2)
        second = engine.add(DOCUMENT)
        engine.step()
        assert second.phase is Phase.WAITING
        engine.clock.now += 0.5
        engine.step()
        assert second.phase is Phase.PARKED
        assert len(blocks_of(engine.jobs.loads[0])) == 2

    def test_nobody_waits_if_told_not_to(self) -> None:
        engine = Engine(Setup(prefix_caching=False), lookup_wait_ms=0)
        engine.jobs.hold()
        engine.add(DOCUMENT)
        engine.step()
        assert engine.offered(DOCUMENT) == MISS

    def test_nobody_waits_for_what_lies_beyond_the_last_token_to_load(self) -> None:
        engine = Engine(Setup(token_budget=12))
        engine.serve(prompt(12))
        engine.forget_local()
        engine.jobs.hold()
        engine.add(prompt(17), max_new_tokens=3)
        engine.step()
        engine.jobs.complete(*engine.jobs.loads)
        engine.steps(2)
        assert len(engine.jobs.stores) == 1, "of the fourth block"
        engine.forget_local()
        second = engine.add(prompt(16))
        engine.step()
        assert second.phase is Phase.PARKED, "three blocks are all that it can load"

    def test_a_preempted_request_may_wait_anew(self) -> None:
        engine = Engine(Setup(prefix_caching=False), lookup_wait_ms=500)
        engine.jobs.hold()
        engine.add(prompt(8))
        engine.step()
        second = engine.add(DOCUMENT, max_new_tokens=9)
        engine.step()
        assert second.phase is Phase.WAITING, "for the store of its first half"
        engine.jobs.complete(*engine.jobs.stores)
        engine.steps(2)
        engine.jobs.complete(*engine.jobs.loads)
        engine.steps(2)
        engine.clock.now += 10
        engine.preempt(second)
        engine.step()
        assert second.phase is Phase.WAITING, "for the store of its second half"
        engine.jobs.let_go()
        engine.run()
        engine.check_idle()


class TestOneLoadForAll:
    """Requests with one prefix that arrive together."""

    def test_with_prefix_caching_the_prefix_is_loaded_once(self) -> None:
        engine = Engine()
        loading(engine)
        engine.add([*DOCUMENT, *prompt(5, seed=2)])
        engine.add([*DOCUMENT, *prompt(6, seed=3)])
        engine.steps(2)
        engine.jobs.let_go()
        engine.run()
        assert len(engine.jobs.all_loads) == 1
        engine.check_idle()

    def test_without_prefix_caching_each_request_loads_for_itself(self) -> None:
        engine = Engine(Setup(prefix_caching=False))
        loading(engine)
        engine.add([*DOCUMENT, *prompt(5, seed=2)])
        engine.add([*DOCUMENT, *prompt(6, seed=3)])
        engine.steps(2)
        assert len(engine.jobs.loads) == 3
        engine.jobs.let_go()
        engine.run()
        assert engine.totals.counters["loaded_tokens"] == 48
        engine.check_idle()

    def test_one_load_of_several_that_fails_leaves_the_others_good(self) -> None:
        engine = Engine(Setup(prefix_caching=False, on_failed_load="fail"))
        loading(engine)
        second = engine.add([*DOCUMENT, *prompt(5, seed=2)])
        engine.step()
        engine.jobs.fail(engine.jobs.loads[0])
        engine.step()
        assert engine.offered(DOCUMENT) == MISS, "the bytes are in doubt"
        engine.jobs.let_go()
        engine.run()
        assert not second.failed
        engine.check_idle()


class TestWhatIsOffered:
    """Tokens between the local hit and the end of what is stored."""

    def test_a_second_prompt_is_offered_the_document_it_shares(self) -> None:
        engine = Engine()
        engine.serve([*DOCUMENT, *prompt(9, seed=1)])
        engine.forget_local()
        assert engine.offered([*DOCUMENT, *prompt(9, seed=2)]) == Lookup(16)
        engine.serve([*DOCUMENT, *prompt(9, seed=2)])
        engine.check_idle()

    def test_what_stands_behind_other_tokens_is_not_offered(self) -> None:
        engine = Engine()
        engine.serve(DOCUMENT)
        assert engine.offered([*prompt(4, seed=1), *DOCUMENT]) == MISS

    @pytest.mark.parametrize(
        ("stored", "tokens", "loaded"),
        [(16, 12, 0), (16, 13, 12), (16, 40, 16), (8, 40, 0), (12, 40, 12)],
    )
    def test_less_than_min_load_tokens_is_computed(
        self, stored: int, tokens: int, loaded: int
    ) -> None:
        engine = Engine(min_load_tokens=12)
        engine.serve(prompt(stored))
        engine.forget_local()
        engine.serve(prompt(tokens))
        assert engine.totals.counters["loaded_tokens"] == loaded

    @pytest.mark.parametrize(("lost", "loaded"), [([4, 3], 8), ([4], 0)])
    def test_min_load_tokens_counts_what_lies_beyond_the_local_hit(
        self, lost: list[int], loaded: int
    ) -> None:
        engine = Engine(min_load_tokens=8)
        engine.serve(DOCUMENT)
        engine.pool.evict_blocks(lost)
        engine.serve([*DOCUMENT, 0])
        assert engine.totals.counters["loaded_tokens"] == loaded

    def test_one_block_is_worth_a_load_by_default(self) -> None:
        engine = Engine()
        engine.serve(prompt(4))
        engine.forget_local()
        engine.serve(prompt(5))
        assert engine.totals.counters["loaded_tokens"] == 4

    @pytest.mark.parametrize("hashes_per_block", [1, 2, 4])
    def test_hashes_may_be_finer_than_blocks(self, hashes_per_block: int) -> None:
        engine = Engine(Setup(hashes_per_block=hashes_per_block), blocks_per_chunk=2)
        engine.serve(prompt(27))
        engine.forget_local()
        assert engine.offered(prompt(27)) == Lookup(24)
        for shared, hit in ((23, 16), (16, 16), (15, 8), (7, 0)):
            tokens = [*prompt(shared), *prompt(9, seed=1)]
            assert engine.offered(tokens) == Lookup(hit)
        engine.serve(prompt(27))
        engine.check_idle()

    def test_a_preempted_request_loads_its_generated_tokens_as_well(self) -> None:
        engine = Engine(offload_prompt_only=False)
        request = engine.add(prompt(6), max_new_tokens=12)
        engine.steps(8)
        engine.preempt(request)
        engine.forget_local()
        engine.step()
        assert engine.totals.counters["loaded_tokens"] == 12
        engine.run()
        engine.check_idle()


class TestWhatIsStored:
    """Of prompts only, or of all that is computed; never of a guess."""

    def test_generated_blocks_are_not_stored_by_default(self) -> None:
        engine = Engine()
        (request,) = engine.serve(prompt(6), max_new_tokens=12)
        assert engine.offered(request.tokens) == Lookup(4)

    def test_generated_blocks_are_not_stored_after_a_preemption_either(self) -> None:
        engine = Engine()
        request = engine.add(prompt(6), max_new_tokens=12)
        engine.steps(8)
        engine.preempt(request)
        engine.run()
        assert engine.offered(request.tokens) == Lookup(4)

    def test_generated_blocks_are_stored_on_request(self) -> None:
        engine = Engine(offload_prompt_only=False)
        (request,) = engine.serve(prompt(6), max_new_tokens=12)
        assert len(request.tokens) == 18
        assert engine.offered(request.tokens) == Lookup(16)

    def test_the_last_token_has_no_kv_and_is_not_stored(self) -> None:
        engine = Engine(offload_prompt_only=False)
        (request,) = engine.serve(prompt(6), max_new_tokens=10)
        assert len(request.tokens) == 16
        assert engine.offered(request.tokens) == Lookup(12)

    @settings(max_examples=40, deadline=None)
    @given(
        drafts=st.integers(0, 9),
        hashes_per_block=st.sampled_from([1, 2]),
        tokens=st.integers(1, 20),
        new_tokens=st.integers(1, 30),
        budget=st.integers(1, 12),
    )
    def test_all_that_is_settled_is_stored_and_no_draft_is(
        self,
        drafts: int,
        hashes_per_block: int,
        tokens: int,
        new_tokens: int,
        budget: int,
    ) -> None:
        setup = Setup(
            drafts=drafts, hashes_per_block=hashes_per_block, token_budget=budget
        )
        engine = Engine(setup, offload_prompt_only=False)
        request = engine.add(prompt(tokens), max_new_tokens=new_tokens)
        settled = 0
        while request.phase is not Phase.FINISHED:
            settled = len(request.tokens)
            engine.step()
        assert engine.offered(request.tokens) == Lookup(settled // 4 * 4)
        engine.forget_local()
        engine.serve(request.tokens, [*request.tokens, *prompt(5, seed=1)])
        engine.check_idle()

    def test_an_admission_stores_what_was_lost_since_the_last_one(self) -> None:
        engine = Engine(Setup(token_budget=8))
        request = engine.add(prompt(24))
        engine.step()
        engine.preempt(request)
        engine.scheduler.reset()
        engine.run()
        assert engine.offered(prompt(24)) == Lookup(24)

    def test_a_preempted_request_is_not_watched(self) -> None:
        engine = Engine(Setup(usable_blocks=6), offload_prompt_only=False)
        first = engine.add(prompt(8, seed=1), max_new_tokens=8)
        second = engine.add(prompt(8, seed=2), max_new_tokens=8)
        while second.row or not second.output:
            engine.step()
        assert second.phase is Phase.WAITING
        assert list(engine.scheduler.watched) == [first.request_id]

    def test_only_requests_with_something_to_store_are_watched(self) -> None:
        engine = Engine()
        engine.add(prompt(9), max_new_tokens=5)
        engine.add(prompt(3, seed=1), max_new_tokens=5)
        engine.step()
        assert len(engine.running) == 2
        assert list(engine.scheduler.watched) == []

    def test_a_step_without_transfers_sends_no_plan(self) -> None:
        engine = Engine()
        request = engine.add(prompt(9), max_new_tokens=5)
        engine.steps(2)
        assert request.phase is Phase.RUNNING
        assert engine.plan == b""

    def test_a_lookup_is_later_only_while_a_transfer_is_under_way(self) -> None:
        engine = Engine(Setup(prefix_caching=False))
        assert engine.offered(DOCUMENT) == MISS
        engine.jobs.hold()
        engine.add(DOCUMENT)
        engine.step()
        assert engine.offered(DOCUMENT) == LATER
        engine.jobs.let_go()
        engine.run()
        assert engine.offered(DOCUMENT) == Lookup(16)
