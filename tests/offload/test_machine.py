"""Random lives of many requests over a small engine and a smaller host memory.

Jobs end well, badly, half-way, late, twice, on one rank before another; requests are
preempted and aborted; caches are reset. After every step the engine model's checks
hold, every read has found the right content, and in the end, once jobs are let go,
everybody finishes in a bounded number of steps and nothing is held.
"""

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvplugin.contract import MISS
from tests.offload.engine_model import Engine
from tests.offload.setup_model import Phase, Request, Setup, prompt

SETUPS = st.builds(
    Setup,
    block_size=st.sampled_from([1, 2, 4]),
    usable_blocks=st.integers(12, 32),
    token_budget=st.integers(1, 24),
    ranks=st.integers(1, 4),
    drafts=st.integers(0, 3),
    prefix_caching=st.booleans(),
    asks_pending_work=st.booleans(),
    announces_resumed=st.booleans(),
    on_failed_load=st.sampled_from(["recompute", "fail"]),
)
SETTINGS = st.fixed_dictionaries(
    {
        "host_blocks": st.integers(1, 40),
        "blocks_per_chunk": st.sampled_from([1, 2, 3]),
        "offload_prompt_only": st.booleans(),
        "min_load_tokens": st.sampled_from([None, 1, 5]),
        "lookup_wait_ms": st.sampled_from([0, 100]),
    }
)
DOCUMENTS = [prompt(40, seed) for seed in range(2)]
ANY = st.integers(0, 999)
"""Picks one of what there is at the time."""


def pick(some: list[Any], number: int) -> Any:
    return some[number % len(some)]


class OffloadMachine(RuleBasedStateMachine):
    """Drives the engine model; every rule is something that may happen to it."""

    engine: Engine

    @initialize(setup=SETUPS, settings=SETTINGS)
    def start(self, setup: Setup, settings: dict[str, Any]) -> None:
        chunk = settings["blocks_per_chunk"]
        settings["host_blocks"] = max(settings["host_blocks"], chunk)
        self.engine = Engine(setup, **settings)
        self.engine.deliver = self._overhear
        self.reports: list[bytes] = []
        self.questions = 10

    def _overhear(self, reports: list[bytes]) -> list[bytes]:
        self.reports += reports
        return reports

    # -- requests ------------------------------------------------------------------

    @rule(
        document=st.sampled_from(DOCUMENTS),
        shared=st.integers(0, 40),
        own=st.integers(1, 12),
        new_tokens=st.integers(1, 8),
        is_alone=st.booleans(),
    )
    def arrive(
        self,
        document: list[int],
        shared: int,
        own: int,
        new_tokens: int,
        is_alone: bool,
    ) -> None:
        self.questions += is_alone
        tokens = [*document[:shared], *prompt(own, self.questions)]
        setup = self.engine.setup
        room = setup.usable_blocks * setup.block_size - new_tokens - setup.drafts
        if room > 0:
            self.engine.add(tokens[:room], new_tokens)

    @precondition(lambda self: self.engine.running)
    @rule(number=ANY)
    def preempt(self, number: int) -> None:
        self.engine.preempt(pick(self.engine.running, number))

    @precondition(lambda self: self.unfinished)
    @rule(number=ANY)
    def abort(self, number: int) -> None:
        self.engine.abort(pick(self.unfinished, number))

    @property
    def unfinished(self) -> list[Request]:
        engine = self.engine
        return [*engine.waiting, *engine.holding, *engine.running]

    # -- time ----------------------------------------------------------------------

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        self.engine.steps(count)

    @rule(seconds=st.sampled_from([0.01, 0.1, 1.0]))
    def wait(self, seconds: float) -> None:
        self.engine.clock.now += seconds

    # -- jobs ----------------------------------------------------------------------

    @rule(is_held=st.booleans())
    def hold(self, is_held: bool) -> None:
        if is_held:
            self.engine.jobs.hold()
        else:
            self.engine.jobs.let_go()

    @rule(number=ANY, rank=ANY, how=st.sampled_from(["complete", "fail", "move"]))
    def end_a_job(self, number: int, rank: int, how: str) -> None:
        transport = pick(self.engine.transports, rank)
        if transport.pending:
            getattr(transport, how)(pick(transport.pending, number).id)

    @rule(number=ANY, rank=ANY, blocks=st.integers(0, 3))
    def tear_a_job(self, number: int, rank: int, blocks: int) -> None:
        transport = pick(self.engine.transports, rank)
        if transport.pending:
            transport.tear(pick(transport.pending, number).id, blocks)

    @rule(number=ANY, rank=ANY)
    def repeat_a_result(self, number: int, rank: int) -> None:
        transport = pick(self.engine.transports, rank)
        if transport.ended:
            transport.repeat(pick(transport.ended, number))

    @precondition(lambda self: self.reports)
    @rule(number=ANY)
    def repeat_a_report(self, number: int) -> None:
        self.engine.scheduler.apply([pick(self.reports, number)])

    @rule(rank=ANY)
    def drain(self, rank: int) -> None:
        self.engine.scheduler.apply([pick(self.engine.workers, rank).drain()])

    # -- caches --------------------------------------------------------------------

    @rule()
    def forget_local(self) -> None:
        self.engine.forget_local()

    @rule(blocks=st.lists(st.integers(1, 12), max_size=4))
    def evict_local(self, blocks: list[int]) -> None:
        self.engine.pool.evict_blocks(blocks)

    @rule()
    def reset(self) -> None:
        if self.engine.reset():
            for document in DOCUMENTS:
                assert self.engine.offered(document) == MISS
                assert self.engine.pool.num_keyed_blocks == 0

    # -- what must hold ------------------------------------------------------------

    @invariant()
    def all_is_well(self) -> None:
        self.engine.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.jobs.let_go()
        tokens = sum(len(r.tokens) + r.max_new_tokens for r in self.unfinished)
        for _ in range(20 + 4 * tokens):
            if not engine.has_work():
                break
            engine.step()
            engine.clock.now += 0.1
        assert not engine.has_work(), "no end in sight"
        # An engine that does not ask for pending work hears of stores that outlive
        # their request's load at the next request's step.
        engine.steps(2)
        engine.check_idle()
        assert all(r.phase is Phase.FINISHED for r in self.unfinished)


class TestMachine(OffloadMachine.TestCase):
    settings = settings(
        max_examples=120,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.full
class TestMachineAtLength(OffloadMachine.TestCase):
    settings = settings(
        max_examples=1500,
        stateful_step_count=80,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
