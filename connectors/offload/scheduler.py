"""The scheduler half of offload: who is served, what waits, what is told to whom.

`loads.py` and `stores.py` decide what moves, `host_tier.py` knows what is there.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain

from kvplugin.connectors.identity import StoreIdentity
from kvplugin.connectors.metrics import Counters
from kvplugin.connectors.offload.boundary import Boundaries
from kvplugin.connectors.offload.capacity import host_pools
from kvplugin.connectors.offload.chunks import chunkings
from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.delayed_ends import DelayedEnds
from kvplugin.connectors.offload.host_tier import HostTier
from kvplugin.connectors.offload.jobs import Job, JobTable, LoadJob, StoreJob
from kvplugin.connectors.offload.loads import Loads
from kvplugin.connectors.offload.memory import warn_of_shared_machine
from kvplugin.connectors.offload.messages import VERSION, CopyOrder, Plan, Report
from kvplugin.connectors.offload.metrics import METRICS
from kvplugin.connectors.offload.prospects import hopeless
from kvplugin.connectors.offload.recompute import RecomputeRate
from kvplugin.connectors.offload.requests import RequestState
from kvplugin.connectors.offload.store_filter import StoreFilter
from kvplugin.connectors.offload.stores import Stores
from kvplugin.contract import (
    LATER,
    MISS,
    EngineBlocks,
    EngineInfo,
    Lookup,
    RequestView,
    Stats,
    Step,
)
from kvplugin.errors import IntegrityError
from kvplugin.events import KVCacheEvent
from kvplugin.hooks import Hooks, get_hooks
from kvplugin.wire import decode, encode

logger = logging.getLogger("vllm.kvplugin.offload")


class OffloadScheduler:
    """Implements `kvplugin.contract.SchedulerHalf` for every group that can be hit.

    Every hit is asynchronous: the engine's blocks get their hashes only after all
    ranks reported that the bytes are in. A store reads blocks that it references, so
    neither the end nor the preemption of their request changes what it reads.

    Args:
        engine: the engine.
        config: the connector's configuration.
        clock: monotonic seconds, as the engine's scheduler counts them.
        enable_events: collect KV events of the host tier.
        hooks: plugins that choose checkpoints; those that are installed if None.

    Raises:
        CapacityError: `cpu_bytes_to_use` holds not even one chunk of each kind.
        ConfigError: the model has a kind of group that is not served, or there is no
            eviction or offload policy of this name and options.
    """

    def __init__(
        self,
        engine: EngineInfo,
        config: OffloadConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        enable_events: bool = False,
        hooks: Hooks | None = None,
    ) -> None:
        self.host_pools = host_pools(engine, config)
        """What each pool of host memory holds."""
        for reason in hopeless(engine, config, self.host_pools):
            logger.warning("kvplugin offload will never hit: %s", reason)
        warn_of_shared_machine(int(config.cpu_bytes_to_use), engine.world_size)
        self._engine = engine
        self._config = config
        self._clock = clock
        self._wait = config.lookup_wait_ms / 1e3
        self._identity = StoreIdentity.of(engine).shared
        cuts = chunkings(engine, config.blocks_per_chunk)
        self._tier = HostTier(
            cuts,
            self.host_pools,
            config.make_eviction_policy,
            enable_events=enable_events,
        )
        prompt_only = config.offload_prompt_only
        policy = config.make_offload_policy(self._tier.num_slots)
        self._filter = StoreFilter(policy, prompt_only=prompt_only)
        self._counters = Counters(METRICS)
        self._rate = RecomputeRate(clock)
        self._jobs = JobTable(engine.world_size, clock, config.transfer_timeout_s)
        self._boundaries = Boundaries(cuts)
        shared = engine, cuts, self._boundaries, self._tier, self._jobs, self._counters
        self._loads = Loads(*shared, self._rate, clock)
        self._stores = Stores(
            *shared,
            self._filter,
            hooks or get_hooks(),
            prompt_only=prompt_only,
            clock=clock,
        )
        self._admissions = self._stores.admissions
        self._min_load = config.min_load_tokens or self._boundaries.unit
        self._requests: dict[str, RequestState] = {}
        self._new_loads: list[CopyOrder] = []
        self._ends = DelayedEnds()
        self._step = 0
        self._said_unbound = False
        self._counters.set("host_blocks", self.host_blocks)
        self._update_gauges()

    @property
    def host_blocks(self) -> int:
        """Engine blocks that host memory holds."""
        return sum(pool.host_blocks for pool in self.host_pools)

    @property
    def watched(self) -> Collection[str]:
        """Running requests that still have something to store."""
        return self._admissions.watched.keys()

    def bind_blocks(self, blocks: EngineBlocks) -> None:
        """References to the engine's blocks; before that, nothing is offered or
        stored."""
        self._stores.blocks = blocks

    @property
    def _is_bound(self) -> bool:
        is_bound = self._stores.blocks is not None
        if not (is_bound or self._said_unbound):
            self._said_unbound = True
            logger.warning(
                "kvplugin offload is idle: the engine has not handed over its block "
                "pool, without which nothing can be kept safe while it is copied "
                "(vLLM 0.19 does not hand it to a connector inside a MultiConnector: "
                "use this one alone, or a newer vLLM)"
            )
        return is_bound

    # -- a request's way in --------------------------------------------------------

    def lookup(self, request: RequestView, num_local_tokens: int) -> Lookup:
        """Tokens stored beyond the local hit, at most all but the last one."""
        state = self._state(request)
        state.asked_at = num_local_tokens
        limit = self._boundaries.floor(request.num_tokens - 1)
        is_aligned = self._boundaries.floor(num_local_tokens) == num_local_tokens
        if limit - num_local_tokens < self._min_load or not is_aligned:
            return MISS
        if state.load_failed or self._has_too_many_overdue() or not self._is_bound:
            return MISS
        reach = self._loads.reach(state, num_local_tokens)
        is_worth_it = reach.soon - num_local_tokens >= self._min_load
        if reach.pays_to_wait and is_worth_it and self._may_wait(state):
            return LATER
        tokens = reach.now - num_local_tokens
        return Lookup(tokens) if tokens >= self._min_load else MISS

    def _may_wait(self, state: RequestState) -> bool:
        if state.wait_until is None:
            state.wait_until = self._clock() + self._wait
        return self._clock() < state.wait_until

    def _has_too_many_overdue(self) -> bool:
        most = self._config.max_overdue_fraction * self._engine.num_blocks
        return self._jobs.overdue_blocks > most

    def allocated(
        self,
        request: RequestView,
        block_ids: tuple[Sequence[int], ...],
        num_external_tokens: int,
    ) -> None:
        """The request has its row; order the load of its last external tokens."""
        state = self._state(request)
        local, state.asked_at = state.asked_at, None
        state.wait_until = None
        state.admitted_after = self._step
        if local is not None:
            self._counters.add("lookups")
        # Without a question it may be one that was parked, for us or somebody else.
        if local is not None or state.epoch is None:
            state.epoch = self._tier.epoch
        if state.epoch == self._tier.epoch and self._is_bound:
            self._admissions.begin(state, block_ids)
        if num_external_tokens:
            self._order_load(state, block_ids, local, num_external_tokens)

    def _order_load(
        self,
        state: RequestState,
        block_ids: Sequence[Sequence[int]],
        local: int | None,
        num_tokens: int,
    ) -> None:
        if local is None:  # nobody asked: then all of the row is to be loaded
            local = self._loads.row_tokens(block_ids) - num_tokens
        job = self._loads.order(state, block_ids, local, local + num_tokens)
        # From the start: at the deadline the engine may know of an end that has not
        # been reported here, and have given the blocks to somebody else.
        self._stores.engine_blocks().acquire(job.engine_ids)
        self._counters.add("hits")
        self._counters.add("hit_tokens", num_tokens)
        self._new_loads.append(job.order)

    # -- a step --------------------------------------------------------------------

    def plan_step(self, step: Step) -> bytes:
        """Loads of requests admitted since the last plan, stores of this step."""
        self._tier.step(self._clock())
        given_up = self._overdue()
        for request_id in step.preempted:
            self._preempted(request_id)
        stores = self._plan_stores(step)
        loads, self._new_loads = self._new_loads, []
        sends = self._ends.take()
        self._step += 1
        timed = self._rate.started(self._step, step.num_tokens)
        if not (loads or stores or sends or given_up or timed):
            return b""
        self._update_gauges()
        return encode(
            Plan(
                VERSION,
                self._step,
                self._identity,
                self.host_pools,
                loads,
                stores,
                sends,
                given_up,
            )
        )

    def _plan_stores(self, step: Step) -> list[CopyOrder]:
        plan = (
            self._stores.follow if self._has_too_many_overdue() else self._stores.plan
        )
        orders = []
        for scheduled in step.scheduled:
            state = self._requests.get(scheduled.request_id)
            if state is not None and (order := plan(state, scheduled)) is not None:
                orders.append(order)
        return orders

    def _overdue(self) -> list[int]:
        """Act on deadlines that have passed; loads that are given up.

        What a transfer uses stays referenced until it really ends. Nobody waits so
        long: not a request for its load (but in an engine that cannot be told that it
        failed), nor the end of one for its stores.
        """
        given_up: list[int] = []
        late = self._jobs.pop_overdue()
        for job in late:
            if isinstance(job, LoadJob):
                given_up.append(job.order.id)
                if self._engine.reports_failed_loads:
                    self._loads.give_up(job, self._step + 1)
            elif isinstance(job, StoreJob):
                job.state.stores.discard(job.order.id)
                self._ends.store_ended(job.state)
        if late:
            self._update_gauges()
        return given_up

    def _preempted(self, request_id: str) -> None:
        state = self._requests.get(request_id)
        if state is not None:
            self._gives_back(state)
        # Who was admitted again in this very step keeps its new row.
        if state is not None and state.admitted_after != self._step:
            self._admissions.stop(state)
            state.epoch = None

    def _gives_back(self, state: RequestState) -> None:
        """The request leaves its blocks: stores under way are their last users."""
        for job_id in state.stores:
            job = self._jobs.get(job_id)
            if isinstance(job, StoreJob):
                job.frees = True

    # -- what became of it ---------------------------------------------------------

    def apply(self, reports: Iterable[bytes]) -> None:
        """Count completions over ranks; late and repeated ones are ignored."""
        for data in reports:
            report = decode(data, Report)
            self._rate.ended(report.step)
            for job in self._jobs.ended(report):
                self._ended(job)

    def distrust(self, block_ids: AbstractSet[int]) -> None:
        """The engine says that these blocks of its own hold no valid bytes: of who has
        one of them, what is being stored will not be kept, as it may have been computed
        on top, and nothing more is stored."""
        for job in self._jobs.of_kind(StoreJob):
            if job.admission.is_based_on(block_ids):
                job.error = "the engine reported blocks of its request as invalid"
        for state in self._requests.values():
            if state.admission is not None and state.admission.is_based_on(block_ids):
                self._admissions.stop(state)

    def _ended(self, job: Job) -> None:
        if isinstance(job, StoreJob):
            self._stores.ended(job)
            self._ends.store_ended(job.state)
        elif isinstance(job, LoadJob):
            self._stores.engine_blocks().release(job.engine_ids[::-1])
            self._loads.ended(job)
        self._update_gauges()

    def finished(self, request: RequestView) -> bool:
        """Forget the request; its jobs go on by themselves.

        Returns:
            True if the engine has to be kept stepping by delaying the request's end
            (engines that do not ask `has_pending_work`). Not while it loads: an
            engine waits for loads by itself, and must hear of one end only.
        """
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return False
        self._admissions.stop(state)
        self._gives_back(state)
        if not state.stores or self._engine.asks_pending_work:
            return False
        if any(job.state is state for job in self._jobs.awaited_loads):
            return False
        self._ends.delay(state)
        return True

    # -- the tier as a whole -------------------------------------------------------

    def reset(self) -> bool:
        """Empty the host tier; stores under way are dropped when they end. Requests
        that run store nothing more: what they read may be of older weights.

        Returns:
            False while a load is under way: its bytes, from before the reset, may
            still appear in the engine. Not so of one that was given up, once every
            rank has told the engine.
        """
        self._tier.clear()
        self._admissions.forget_all(self._requests.values())
        self._update_gauges()
        return not any(self._jobs.awaited_loads)

    def has_pending_work(self) -> bool:
        """Transfers under way, or an end that is to be announced. One that is overdue
        is not waited for: the next step will do to notice its end."""
        return bool(self._jobs.num_in_time or self._ends.are_due)

    def has_pending_frees(self) -> bool:
        """Stores that have just begun, of blocks that nobody else has: waiting for them
        is cheaper than preempting. One that takes longer than a lookup would wait is
        not waited for."""
        oldest = self._clock() - self._wait
        stores = self._jobs.of_kind(StoreJob)
        return any(job.frees and job.started > oldest for job in stores)

    def take_events(self) -> list[KVCacheEvent]:
        """KV events of the host tier since the last call."""
        return self._tier.take_events()

    def take_stats(self) -> Stats | None:
        """Metrics that changed since the last call."""
        return self._counters.take()

    def check(self) -> None:
        """Verify that what is referenced is exactly what jobs under way and running
        requests use.

        Raises:
            IntegrityError: an invariant does not hold.
        """
        self._tier.check(chain(self._job_uses(), self._admissions.uses()))
        if not self._admissions.watched.keys() <= self._requests.keys():
            raise IntegrityError("a forgotten request is still watched")
        self._jobs.check()

    def _job_uses(self) -> Iterator[tuple[int, int]]:
        for job in self._jobs:
            yield from job.uses()

    def close(self) -> None:
        """Nothing to stop: this half owns no thread and no memory."""

    # -- inside --------------------------------------------------------------------

    def _state(self, request: RequestView) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            state = self._requests[request.request_id] = RequestState(request)
        return state

    def _update_gauges(self) -> None:
        self._counters.set("host_blocks_stored", self._tier.num_stored_blocks)
        self._counters.set("pending_jobs", len(self._jobs))
        self._counters.set("overdue_blocks", self._jobs.overdue_blocks)
        failures = self._tier.policy_failures + self._filter.failures
        self._counters.set("policy_failures", failures)
        evicted = self._tier.take_evictions()
        if evicted:
            self._counters.add("evicted_blocks", evicted)
