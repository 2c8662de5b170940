"""Faults that users of offload met, each as a rule with a small input: requests.

Numbers are those of the list of scenarios that these tests were written from.
"""

import random
from dataclasses import replace

import pytest

from tests.offload.engine_model import Engine
from tests.offload.setup_model import Phase, Setup, prompt
from tests.offload.situations import A, B, held_store


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
