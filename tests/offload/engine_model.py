"""A small engine that drives the two halves of offload: no vLLM, no torch, no time.

It schedules as vLLM does (running requests first, chunked prefill under a token
budget, preemption of the youngest, parked requests that await their load), keeps its
blocks in a `BlockPool`, and calls the halves in the order of `kvplugin.contract`.
What its attention reads is checked slot by slot by the content model, and `check`
holds after every step.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from kvplugin import BlockPool
from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.messages import HostPool
from kvplugin.connectors.offload.scheduler import OffloadScheduler
from kvplugin.connectors.offload.worker import OffloadWorker
from kvplugin.contract import (
    EngineBlocks,
    Lookup,
    Step,
    WorkerHalf,
    WorkerOutcome,
)
from kvplugin.testing.transport import FakeTransport
from tests.offload.content import BLOCK_BYTES, RankMemory, histories_of
from tests.offload.jobs import Jobs, Totals
from tests.offload.rows import PoolBlocks, Rows, Work
from tests.offload.setup_model import Phase, Request, Setup, View


@dataclass
class Load:
    """A load under way, as the engine knows it."""

    request: Request
    blocks: frozenset[int]
    ranks: set[int]
    failed: set[int] = field(default_factory=set)
    """Blocks that hold no valid bytes on some rank."""


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """The engine and its offload connector.

    Args:
        setup: the kind of engine.
        host_blocks: blocks that host memory holds.
        make_blocks: the references that the connector gets to the pool's blocks.
        settings: of the connector, beside the size of host memory.
    """

    def __init__(
        self,
        setup: Setup | None = None,
        *,
        host_blocks: int = 64,
        make_blocks: Callable[[BlockPool], EngineBlocks] | None = None,
        **settings: Any,
    ) -> None:
        self.setup = setup or Setup()
        self.clock = Clock()
        self.pool = BlockPool(self.setup.usable_blocks + 1)
        self.waiting: list[Request] = []
        self.holding: list[Request] = []
        """Parked and loaded requests: they have a row and do not run."""
        self.running: list[Request] = []
        self.totals = Totals()
        self.deliver: Callable[[list[bytes]], Iterable[bytes]] = lambda reports: reports
        """What becomes of the workers' reports on their way."""
        self._views: WeakSet[View] = WeakSet()
        self._ids = itertools.count()
        self._loads: dict[str, Load] = {}
        self._delayed: dict[str, tuple[Request, set[int]]] = {}
        self._preempted: set[str] = set()
        self._given_up: set[int] = set()
        """Blocks of loads that failed."""

        config = OffloadConfig(
            cpu_bytes_to_use=host_blocks * BLOCK_BYTES * self.setup.ranks, **settings
        )
        self.scheduler = OffloadScheduler(
            self.setup.info(), config, clock=self.clock, enable_events=True
        )
        self.blocks = PoolBlocks(self.pool)
        self.scheduler.bind_blocks(
            make_blocks(self.pool) if make_blocks else self.blocks
        )
        self.memories = [self._memory(rank) for rank in range(self.setup.ranks)]
        self._rows = Rows(self.setup, self.pool, self.memories)
        self.transports = [FakeTransport(memory.execute) for memory in self.memories]
        self.jobs = Jobs(self.transports)
        self.workers: list[WorkerHalf] = [
            OffloadWorker(self.setup.info(rank), config, self._giving(transport))
            for rank, transport in enumerate(self.transports)
        ]

    def _memory(self, rank: int) -> RankMemory:
        return RankMemory(
            rank,
            self.pool.num_blocks,
            self.setup.block_size,
            self.scheduler.host_blocks,
            in_use=lambda block: self.pool.ref_count(block) > 0,
            awaits_load=self._awaits_load,
        )

    def _awaits_load(self, block: int) -> bool:
        """Bytes of a load that was given up may come late, into blocks that the
        connector keeps until then."""
        if block in self._given_up and self.blocks.held[block]:
            return True
        return any(block in load.blocks for load in self._loads.values())

    def _giving(
        self, transport: FakeTransport
    ) -> Callable[[Sequence[HostPool]], FakeTransport]:
        def make_transport(pools: Sequence[HostPool]) -> FakeTransport:
            assert pools == self.scheduler.host_pools
            return transport

        return make_transport

    # -- what a test does ----------------------------------------------------------

    def add(self, prompt: Sequence[int], max_new_tokens: int = 1) -> Request:
        """A request arrives."""
        request = Request(f"r{next(self._ids)}", prompt, max_new_tokens, self.setup)
        assert request.longest_row <= self.setup.usable_blocks, "it can never fit"
        self.waiting.append(request)
        return request

    def preempt(self, request: Request) -> None:
        """Preempt between two steps: it may be admitted again in the next one."""
        self._preempt(request, self._preempted)

    def abort(self, request: Request) -> None:
        """The request's user has lost interest."""
        self._finish(request)

    def reset(self) -> bool:
        """Forget all cached KV, the connector's too."""
        engine, host = self.pool.reset_prefix_cache(), self.scheduler.reset()
        return engine and host

    def forget_local(self) -> None:
        """Lose the engine's own prefix cache, so that only host memory hits."""
        self.pool.drop_all_keys()

    def serve(self, *prompts: Sequence[int], max_new_tokens: int = 1) -> list[Request]:
        """Requests from arrival to end, one after the other, transfers included."""
        requests = []
        for prompt in prompts:
            requests.append(self.add(prompt, max_new_tokens))
            self.run()
        return requests

    def run(self, limit: int = 200) -> None:
        """Step until there is nothing left to do.

        Raises:
            AssertionError: there still is after `limit` steps.
        """
        for _ in range(limit):
            if not self.has_work():
                return
            self.step()
        raise AssertionError(f"still at work after {limit} steps")

    def steps(self, count: int) -> None:
        """That many steps, work or not."""
        for _ in range(count):
            self.step()

    def offered(self, tokens: Sequence[int]) -> Lookup:
        """What host memory has for a request that begins with `tokens`."""
        request = self.view(Request("question", [*tokens, 0], 1, self.setup))
        answer = self.scheduler.lookup(request, 0)
        assert not self.scheduler.finished(request)
        return answer

    def has_work(self) -> bool:
        """Whether the engine would go on stepping."""
        return bool(
            self.waiting
            or self.holding
            or self.running
            or self._loads
            or self._delayed
            or (self.setup.asks_pending_work and self.scheduler.has_pending_work())
        )

    # -- a step --------------------------------------------------------------------

    def step(self) -> None:
        """One step: schedule, execute on every rank, hear what came of it."""
        preempted, self._preempted = self._preempted, set()
        work = self._schedule(preempted)
        watched = self.scheduler.watched
        plan = self.scheduler.plan_step(
            Step(
                [w.progress for w in work if w.request.request_id in watched],
                preempted,
                sum(w.num_tokens for w in work),
            )
        )
        self.plan = plan
        outcomes = [self._execute(rank, plan, work) for rank in range(self.setup.ranks)]
        self._update(work, outcomes)
        self.check()

    def _schedule(self, preempted: set[str]) -> list[Work]:
        victims: set[str] = set()
        work: list[Work] = []
        for request in list(self.running):
            if request.phase is Phase.RUNNING:
                work += self._continue(request, self._budget(work), victims)
        preempted |= victims
        if victims:
            return work
        for request in list(self.holding):
            if request.phase is Phase.LOADED:
                work += self._resume(request, self._budget(work))
        for request in list(self.waiting):
            if not self._budget(work):
                break
            local = self._rows.local_hit(request)
            answer = self._lookup(request, len(local) * self.setup.block_size)
            if not answer.ready:
                continue
            admitted = self._admit(request, local, answer.tokens, self._budget(work))
            if admitted is None:
                break
            if admitted.num_tokens:
                work.append(admitted)
        return work

    def _budget(self, work: Iterable[Work]) -> int:
        """Tokens that nobody has taken yet."""
        return self.setup.token_budget - sum(item.num_tokens for item in work)

    def _continue(
        self, request: Request, budget: int, victims: set[str]
    ) -> Iterator[Work]:
        """Schedule a running request, at the cost of younger ones if need be."""
        if not budget:
            return
        work = self._next_work(request, budget)
        while not self._rows.grow(work):
            if self.scheduler.has_pending_frees():
                return
            victim = self.running[-1]
            self._preempt(victim, victims)
            if victim is request:
                return
        yield work

    def _resume(self, request: Request, budget: int) -> Iterator[Work]:
        """Schedule a request whose load has ended."""
        work = self._next_work(request, budget)
        if not budget or not self._rows.grow(work):
            return
        if self.setup.announces_resumed:
            self.scheduler.allocated(self.view(request), (request.row,), 0)
            work.new_blocks = []
        self.holding.remove(request)
        self._run(request)
        yield work

    def _admit(
        self, request: Request, local: list[int], external_tokens: int, budget: int
    ) -> Work | None:
        """Give a waiting request its row and run it, or park it until its load ends;
        None if there is no room.

        Who has a row and does not run cannot be preempted: all of them together must
        fit to their ends.
        """
        holding = [*self.holding, request] if external_tokens else []
        if sum(other.longest_row for other in holding) > self.setup.usable_blocks:
            return None
        request.num_computed = len(local) * self.setup.block_size + external_tokens
        work = self._next_work(request, 0 if external_tokens else budget)
        if not self._rows.give(work, local):
            request.num_computed = 0
            return None
        self.waiting.remove(request)
        if external_tokens:
            self._park(request)
        else:
            self._run(request)
        self.scheduler.allocated(self.view(request), (request.row,), external_tokens)
        work.new_blocks = []
        return work

    def _lookup(self, request: Request, num_local_tokens: int) -> Lookup:
        view = self.view(request)
        answer = self.scheduler.lookup(view, num_local_tokens)
        again = self.scheduler.lookup(view, num_local_tokens)
        assert answer == again, "a lookup has changed the next one"
        if answer.ready:
            assert answer.tokens % self.setup.block_size == 0, "not in whole blocks"
            left = view.num_tokens - num_local_tokens - answer.tokens
            assert left > 0, "nothing is left to compute"
        return answer

    def _next_work(self, request: Request, budget: int) -> Work:
        """The request's next tokens, with guesses if it decodes."""
        known, start = len(request.tokens), request.num_computed
        end = min(known, start + budget)
        drafts: list[int] = []
        if end == known == start + 1:
            drafts = request.guess(self.setup.drafts)[: budget - 1]
        guessed = histories_of(request.histories[-1], drafts)
        return Work(request, start, drafts, request.histories[:end] + guessed)

    def _run(self, request: Request) -> None:
        request.phase = Phase.RUNNING
        self.running.append(request)

    def _park(self, request: Request) -> None:
        request.phase = Phase.PARKED
        self.holding.append(request)
        self._loads[request.request_id] = Load(
            request,
            frozenset(request.row[request.num_local :]),
            set(range(self.setup.ranks)),
        )

    def _preempt(self, request: Request, preempted: set[str]) -> None:
        self.running.remove(request)
        self._rows.free(request)
        request.phase = Phase.WAITING
        self.waiting.insert(0, request)
        preempted.add(request.request_id)

    def view(self, request: Request) -> View:
        """The request as connectors see it."""
        view = View(request)
        self._views.add(view)
        return view

    # -- a step's other half -------------------------------------------------------

    def _execute(self, rank: int, plan: bytes, work: Sequence[Work]) -> WorkerOutcome:
        worker, memory = self.workers[rank], self.memories[rank]
        worker.begin_step(plan)
        for item in work:
            memory.write(item.request.row, item.histories, item.start)
        for item in work:
            memory.read(item.request.row, item.histories)
        outcome = worker.poll() if self.setup.polls_first else None
        worker.end_step()
        return outcome or worker.poll()

    def _update(self, work: Sequence[Work], outcomes: Sequence[WorkerOutcome]) -> None:
        for item in work:
            self._sample(item)
        reports = [outcome.report for outcome in outcomes if outcome.report]
        self.scheduler.apply(self.deliver(reports))
        for rank, outcome in enumerate(outcomes):
            for request_id in outcome.finished_loads:
                failed = outcome.failed_loads.get(request_id, ())
                self._load_reported(request_id, rank, failed)
            for request_id in outcome.finished_sends:
                self._send_reported(request_id, rank)
        if stats := self.scheduler.take_stats():
            self.totals.add(stats)

    def _sample(self, work: Work) -> None:
        request = work.request
        known = len(request.tokens)
        if len(work.histories) < known:
            request.num_computed = len(work.histories)
            return
        tokens = request.continuation(len(work.drafts) + 1)
        accepted = len(_common_prefix(work.drafts, tokens))
        left = request.max_new_tokens - len(request.output)
        request.num_computed = known + accepted
        request.append(tokens[: accepted + 1][:left])
        if len(request.output) >= request.max_new_tokens:
            self._finish(request)

    def _load_reported(self, request_id: str, rank: int, failed: Sequence[int]) -> None:
        load = self._loads.get(request_id)
        assert load is not None, f"no load of {request_id} is under way"
        load.ranks.remove(rank)
        load.failed.update(failed)
        self._given_up.update(failed)
        request = load.request
        must_fail = load.failed and self.setup.on_failed_load == "fail"
        if must_fail and request.phase is Phase.PARKED:
            request.failed = True
            self._finish(request)
        if not load.ranks:
            del self._loads[request_id]
            self._load_ended(load)

    def _load_ended(self, load: Load) -> None:
        """Free the row of a request that has gone; let the others go on, from before
        the first block that holds no valid bytes."""
        request = load.request
        if request.phase is Phase.FINISHED:
            self._rows.free(request)
            return
        valid = list(itertools.takewhile(lambda b: b not in load.failed, request.row))
        valid_tokens = len(valid) * self.setup.block_size
        request.num_computed = min(request.num_computed, valid_tokens)
        if request.num_computed:
            request.phase = Phase.LOADED
            self._rows.cache(request, request.num_computed)
        else:
            self._rows.free(request)
            request.phase = Phase.WAITING
            self.holding.remove(request)
            self.waiting.insert(0, request)

    def _finish(self, request: Request) -> None:
        for queue in (self.waiting, self.holding, self.running):
            if request in queue:
                queue.remove(request)
        request.phase = Phase.FINISHED
        is_loading = request.request_id in self._loads
        if self.scheduler.finished(self.view(request)):
            # vLLM forgets a request at the first of its two announcements, and dies
            # of the second.
            assert not is_loading, "its end would be announced twice"
            ranks = set(range(self.setup.ranks))
            self._delayed[request.request_id] = (request, ranks)
        elif not is_loading:
            self._rows.free(request)

    def _send_reported(self, request_id: str, rank: int) -> None:
        request, ranks = self._delayed[request_id]
        ranks.remove(rank)
        if not ranks:
            del self._delayed[request_id]
            self._rows.free(request)

    # -- oracles -------------------------------------------------------------------

    def check(self) -> None:
        """What holds after every step.

        Raises:
            AssertionError, IntegrityError: something does not.
        """
        self.pool.check()
        self.scheduler.check()
        delayed = (request for request, _ in self._delayed.values())
        loading = (load.request for load in self._loads.values())
        owners = {*self.running, *self.holding, *delayed, *loading}
        wanted = Counter(block for owner in owners for block in owner.row)
        blocks = range(1, self.pool.num_blocks)
        found = Counter({block: self.pool.ref_count(block) for block in blocks})
        assert +found == wanted + self.blocks.held, "blocks are in use for nobody"
        if self.blocks.held:
            is_overdue = self.totals.gauges["overdue_blocks"] > 0
            has_job = self.scheduler.has_pending_work() or is_overdue
            assert has_job, "blocks are held without a job"
        unfinished = (*self.waiting, *self.holding, *self.running)
        live = {request.request_id for request in unfinished}
        assert live.issuperset(self.scheduler.watched), "watches who has ended"

    def check_idle(self) -> None:
        """What holds once all has ended: nothing is held, nobody is remembered."""
        self.check()
        assert not self.has_work()
        assert not self.scheduler.has_pending_work()
        assert not self.scheduler.has_pending_frees()
        assert self.pool.num_used_blocks == 0
        assert not self.blocks.held
        assert not self.scheduler.watched
        assert not list(self.scheduler._admissions.uses()), "host memory is held"
        assert not self._views, "the connector remembers requests that have ended"


def _common_prefix(some: Sequence[int], others: Sequence[int]) -> list[int]:
    pairs = itertools.takewhile(
        lambda pair: pair[0] == pair[1], zip(some, others, strict=False)
    )
    return [token for token, _ in pairs]
