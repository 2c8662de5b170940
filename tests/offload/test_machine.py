"""Random lives of many requests over a small engine and a smaller host memory.

Jobs end well, badly, half-way, late, twice, on one rank before another; reports are
delayed and repeated; requests are preempted and aborted; caches are lost. After every
step the engine model's checks hold, every read has found the right content, and in
the end, once jobs are let go, everybody finishes in a bounded number of steps and
nothing is held.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvplugin.contract import MISS
from kvplugin.testing.transport import FakeTransport
from tests.offload.engine_model import Engine
from tests.offload.setup_model import Request, Setup, prompt

T = TypeVar("T")

SETUPS = st.builds(
    Setup,
    block_size=st.sampled_from([4, 2, 1]),
    usable_blocks=st.integers(12, 32),
    token_budget=st.sampled_from([24, 10, 7, 3]),
    ranks=st.integers(1, 4),
    drafts=st.sampled_from([0, 0, 1, 3]),
    polls_first=st.booleans(),
    prefix_caching=st.booleans(),
    asks_pending_work=st.booleans(),
    announces_resumed=st.booleans(),
    on_failed_load=st.sampled_from(["recompute", "fail"]),
)
SETTINGS = st.fixed_dictionaries(
    {
        "host_blocks": st.sampled_from([24, 8, 5, 3]),
        "blocks_per_chunk": st.sampled_from([1, 2, 3]),
        "offload_prompt_only": st.booleans(),
        "min_load_tokens": st.sampled_from([None, 1, 5]),
        "lookup_wait_ms": st.sampled_from([0, 100]),
        "transfer_timeout_s": st.sampled_from([30.0, 0.1]),
        "max_overdue_fraction": st.sampled_from([0.1, 1.0]),
    }
)
FATES = st.sampled_from(["complete", "", "fail", "complete", "move", 1, 3])
"""Of a job: a verb of the fake transport, blocks to tear it after, or none yet."""
ANY = st.integers(0, 99)
"""Picks one of what there is at the time."""
DOCUMENTS = [prompt(40, seed) for seed in range(2)]


@dataclass(frozen=True)
class Arrival:
    """A question on a document."""

    document: int
    shared: int
    """Tokens of the document."""
    question: int
    tokens: int
    new_tokens: int

    @property
    def prompt(self) -> list[int]:
        own = prompt(self.tokens, 10 + self.question)
        return [*DOCUMENTS[self.document][: self.shared], *own]


ARRIVALS = st.builds(
    Arrival,
    document=st.sampled_from([0, 0, 1]),
    shared=st.sampled_from([40, 33, 17, 8, 0]),
    question=st.integers(0, 3),
    tokens=st.integers(1, 12),
    new_tokens=st.integers(1, 8),
)


def pick(some: Sequence[T], number: int) -> T:
    return some[number % len(some)]


class OffloadMachine(RuleBasedStateMachine):
    """Drives the engine model. Few rules, each of several things that may happen:
    with many small ones, few runs would get as far as a load."""

    engine: Engine

    @initialize(setup=SETUPS, settings=SETTINGS, served=st.lists(ARRIVALS, max_size=2))
    def start(
        self, setup: Setup, settings: dict[str, Any], served: list[Arrival]
    ) -> None:
        self.engine = Engine(setup, **settings)
        self.engine.deliver = self.overhear
        self.reports: list[bytes] = []
        self.late_reports: list[bytes] = []
        self.is_late = False
        self.arrive(served, is_local_lost=False, steps=0)
        self.engine.run()
        self.engine.forget_local()
        self.engine.jobs.hold()

    def overhear(self, reports: list[bytes]) -> list[bytes]:
        """Note the reports, and keep them back while they are to be late."""
        self.reports += reports
        self.late_reports += reports
        if self.is_late:
            return []
        delivered, self.late_reports = self.late_reports, []
        return delivered

    @property
    def unfinished(self) -> list[Request]:
        engine = self.engine
        return [*engine.waiting, *engine.holding, *engine.running]

    # -- rules ---------------------------------------------------------------------

    @rule(
        arrivals=st.lists(ARRIVALS, min_size=1, max_size=3),
        is_local_lost=st.booleans(),
        steps=st.integers(0, 3),
    )
    def arrive(self, arrivals: list[Arrival], is_local_lost: bool, steps: int) -> None:
        if is_local_lost:
            self.engine.forget_local()
        setup = self.engine.setup
        for arrival in arrivals:
            room = setup.usable_blocks * setup.block_size
            tokens = arrival.prompt[: room - arrival.new_tokens - setup.drafts]
            self.engine.add(tokens, arrival.new_tokens)
        self.engine.steps(steps)

    @rule(
        fates=st.lists(FATES, min_size=1, max_size=6),
        steps=st.integers(1, 5),
        seconds=st.sampled_from([0.01, 0.05, 0.2]),
        is_late=st.booleans(),
    )
    def go_on(
        self, fates: list[str | int], steps: int, seconds: float, is_late: bool
    ) -> None:
        """Steps, and before each the jobs under way meet their fates: in turn over
        those of the first rank, then the second, ..."""
        self.is_late = is_late
        turns = itertools.cycle(fates)
        for _ in range(steps):
            self.engine.clock.now += seconds
            for transport in self.engine.transports:
                for job in transport.pending:
                    self._end(transport, job.id, next(turns))
            self.engine.step()

    @staticmethod
    def _end(transport: FakeTransport, job_id: int, fate: str | int) -> None:
        if isinstance(fate, int):
            transport.tear(job_id, blocks=fate)
        elif fate:
            getattr(transport, fate)(job_id)

    @rule(
        what=st.sampled_from(["result", "report", "drain", "hold", "let go"]),
        number=ANY,
        rank=ANY,
    )
    def disturb_jobs(self, what: str, number: int, rank: int) -> None:
        engine = self.engine
        transport = pick(engine.transports, rank)
        if what == "result" and transport.ended:
            transport.repeat(pick(transport.ended, number))
        elif what == "report" and self.reports:
            engine.scheduler.apply([pick(self.reports, number)])
        elif what == "drain":
            engine.scheduler.apply([pick(engine.workers, rank).drain()])
        elif what == "hold":
            engine.jobs.hold()
        elif what == "let go":
            engine.jobs.let_go()

    @rule(is_preempted=st.booleans(), number=ANY, steps=st.integers(0, 2))
    def disturb_requests(self, is_preempted: bool, number: int, steps: int) -> None:
        if is_preempted and self.engine.running:
            self.engine.preempt(pick(self.engine.running, number))
        elif self.unfinished:
            self.engine.abort(pick(self.unfinished, number))
        self.engine.steps(steps)

    @rule(lost=st.none() | st.lists(st.integers(1, 12), max_size=4))
    def lose(self, lost: list[int] | None) -> None:
        if lost is not None:
            self.engine.pool.evict_blocks(lost)
        elif self.engine.reset():
            for document in DOCUMENTS:
                assert self.engine.offered(document) == MISS

    # -- what must hold ------------------------------------------------------------

    @invariant()
    def all_is_well(self) -> None:
        self.engine.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.jobs.let_go()
        self.is_late = False
        tokens = sum(len(r.tokens) + r.max_new_tokens for r in self.unfinished)
        for _ in range(20 + 4 * tokens):
            if not engine.has_work():
                break
            engine.step()
            engine.clock.now += 0.1
        assert not engine.has_work(), "no end in sight"
        # An engine that does not ask for pending work hears of a store that outlives
        # its request's load at the next request's step.
        engine.steps(2)
        engine.check_idle()


BOUNDED = settings(
    deadline=None,
    stateful_step_count=30,
    suppress_health_check=list(HealthCheck),
)


class TestMachine(OffloadMachine.TestCase):
    settings = settings(BOUNDED, max_examples=300)


@pytest.mark.full
class TestMachineAtLength(OffloadMachine.TestCase):
    settings = settings(BOUNDED, max_examples=3000)
