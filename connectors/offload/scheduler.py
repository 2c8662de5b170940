"""The scheduler half of offload: what is stored, loaded, waited for and dropped."""

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet

from kvplugin.connectors.metrics import Counters
from kvplugin.connectors.offload.capacity import host_slots
from kvplugin.connectors.offload.chunks import Chunk, Chunking
from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.host_tier import HostTier
from kvplugin.connectors.offload.jobs import LoadJob, RequestState, StoreJob
from kvplugin.connectors.offload.messages import (
    VERSION,
    BlockPairs,
    CopyOrder,
    Plan,
    Report,
)
from kvplugin.connectors.offload.metrics import METRICS
from kvplugin.connectors.offload.recompute import RecomputeRate
from kvplugin.connectors.offload.store_filter import StoreFilter
from kvplugin.contract import (
    LATER,
    MISS,
    EngineBlocks,
    EngineInfo,
    Lookup,
    RequestView,
    ScheduledRequest,
    Stats,
    Step,
)
from kvplugin.errors import IntegrityError
from kvplugin.events import KVCacheEvent
from kvplugin.policies.eviction import context_of
from kvplugin.wire import decode, encode

logger = logging.getLogger("vllm.kvplugin.offload")


class OffloadScheduler:
    """Implements `kvplugin.contract.SchedulerHalf` for one group of layers whose
    blocks form a prefix.

    Every hit is asynchronous: the engine's blocks get their hashes only after all
    ranks reported that the bytes are in. A store reads blocks that it references, so
    neither the end nor the preemption of their request changes what it reads.

    Args:
        engine: the engine; its only group is the one that is served.
        config: the connector's configuration.
        clock: monotonic seconds, as the engine's scheduler counts them.
        enable_events: collect KV events of the host tier.

    Raises:
        CapacityError: `cpu_bytes_to_use` holds not even one chunk.
        ConfigError: no eviction or offload policy of this name and options.
    """

    def __init__(
        self,
        engine: EngineInfo,
        config: OffloadConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        enable_events: bool = False,
    ) -> None:
        (group,) = engine.groups
        self._engine = engine
        self._config = config
        self._clock = clock
        self._wait = config.lookup_wait_ms / 1e3
        self._chunking = Chunking(
            group, config.blocks_per_chunk, engine.hash_block_size
        )
        self._min_load = config.min_load_tokens or group.block_size
        self._num_slots = host_slots(engine, config)
        self._tier = HostTier(
            self._num_slots,
            config.make_eviction_policy(self._num_slots + 1),
            self._chunking.tokens,
            enable_events=enable_events,
        )
        self._filter = StoreFilter(
            config.make_offload_policy(self._num_slots),
            self._chunking,
            prompt_only=config.offload_prompt_only,
        )
        self._blocks: EngineBlocks | None = None
        self._requests: dict[str, RequestState] = {}
        self._watched: dict[str, None] = {}
        self._jobs: dict[int, StoreJob | LoadJob] = {}
        self._loading: dict[bytes, int] = {}
        self._new_loads: list[CopyOrder] = []
        self._delayed: dict[str, RequestState] = {}
        self._finished_sends: list[str] = []
        self._job_ids = itertools.count()
        self._step = 0
        self._said: set[str] = set()
        self._rate = RecomputeRate(clock)
        self._counters = Counters(METRICS)
        self._counters.set("host_blocks", self.host_blocks)
        self._counters.set("host_blocks_stored", 0)
        self._counters.set("policy_failures", 0)

    @property
    def host_blocks(self) -> int:
        """Engine blocks that host memory holds."""
        return self._num_slots * self._config.blocks_per_chunk

    @property
    def watched(self) -> Collection[str]:
        """Running requests that still have something to store."""
        return self._watched.keys()

    def bind_blocks(self, blocks: EngineBlocks) -> None:
        """References to the engine's blocks; required before the first store."""
        self._blocks = blocks

    # -- a request's way in --------------------------------------------------------

    def lookup(self, request: RequestView, num_local_tokens: int) -> Lookup:
        """Tokens stored beyond the local hit, at most all but the last one."""
        limit = self._chunking.whole_blocks(request.num_tokens - 1)
        if limit - num_local_tokens < self._min_load:
            return MISS
        state = self._requests.get(request.request_id)
        if state is not None and state.load_failed:
            return MISS
        end, in_flight = self._stored_until(request, num_local_tokens, limit)
        if in_flight and self._may_wait(request):
            return LATER
        tokens = min(end, limit) - num_local_tokens
        return Lookup(tokens) if tokens >= self._min_load else MISS

    def _stored_until(
        self, request: RequestView, start: int, limit: int
    ) -> tuple[int, bool]:
        """End of the stored run from the chunk that holds token `start`, in tokens,
        as far as `limit`, and whether a transfer under way would change the answer.
        """
        first = start // self._chunking.tokens
        last = -(-limit // self._chunking.tokens)
        end = first * self._chunking.tokens
        for chunk in self._chunking.of(request, first, last):
            if self._engine.prefix_caching and chunk.key in self._loading:
                return end, True  # soon a local hit: no second copy of the blocks
            if self._tier.slot_of(chunk.key) is None:
                return end, self._tier.is_writing(chunk.key)
            end += self._chunking.tokens
        return end, False

    def _may_wait(self, request: RequestView) -> bool:
        state = self._state(request)
        if state.wait_until is None:
            state.wait_until = self._clock() + self._wait
        return self._clock() < state.wait_until

    def allocated(
        self,
        request: RequestView,
        block_ids: tuple[Sequence[int], ...],
        num_external_tokens: int,
    ) -> None:
        """The request has its row; order the load of its last external tokens."""
        state = self._state(request)
        state.row = list(block_ids[self._chunking.group.index])
        state.admitted_after = self._step
        state.next_chunk = 0
        state.has_hole = False
        state.wait_until = None
        if not self._nothing_left_to_store(state):
            self._watched[request.request_id] = None
        if num_external_tokens:
            self._order_load(state, num_external_tokens)

    def _order_load(self, state: RequestState, num_tokens: int) -> None:
        per_chunk = self._chunking.blocks
        end = len(state.row)
        first = end - num_tokens // self._chunking.group.block_size
        chunks = list(
            self._chunking.of(state.request, first // per_chunk, -(-end // per_chunk))
        )
        slots = {chunk.number: self._tier.slot_of(chunk.key) for chunk in chunks}
        host = []
        for block in range(first, end):
            slot = slots.get(block // per_chunk)
            if slot is None:
                raise IntegrityError(
                    f"block {block} of request {state.request.request_id} left host "
                    "memory between lookup and load"
                )
            host.append(self._chunking.host_block(slot, block))
        job = LoadJob(
            self._order(state, state.row[first:], host),
            state,
            set(range(self._engine.world_size)),
            self._clock(),
            slots=[slot for slot in slots.values() if slot is not None],
            keys=[chunk.key for chunk in chunks],
            num_tokens=num_tokens,
        )
        self._tier.pin(job.slots, context_of(state.request))
        for key in job.keys:
            self._loading[key] = self._loading.get(key, 0) + 1
        self._jobs[job.order.id] = job
        self._new_loads.append(job.order)

    # -- a step --------------------------------------------------------------------

    def plan_step(self, step: Step) -> bytes:
        """Loads of requests admitted since the last plan, stores of this step."""
        self._tier.step(self._clock())
        for request_id in step.preempted:
            self._preempted(request_id)
        stores = [
            order
            for scheduled in step.scheduled
            if (order := self._plan_store(scheduled)) is not None
        ]
        loads, self._new_loads = self._new_loads, []
        sends, self._finished_sends = self._finished_sends, []
        self._step += 1
        timed = self._rate.started(self._step, step.num_tokens)
        if not (loads or stores or sends or timed):
            return b""
        self._update_gauges()
        return encode(Plan(VERSION, self._step, self.host_blocks, loads, stores, sends))

    def _plan_store(self, scheduled: ScheduledRequest) -> CopyOrder | None:
        state = self._requests.get(scheduled.request_id)
        if state is None or not state.row:
            return None
        if scheduled.new_block_ids:
            state.row += scheduled.new_block_ids[self._chunking.group.index]
        end = self._storable_chunks(
            state.request,
            scheduled.num_computed_tokens + scheduled.num_scheduled_tokens,
        )
        if end <= state.next_chunk:
            return None
        chunks = list(self._chunking.of(state.request, 0, end))
        missing = [c for c in chunks[state.next_chunk :] if not self._tier.holds(c.key)]
        missing = self._wanted(state, missing)
        state.next_chunk = end
        # Chunks of others leave first. A tail without its head can never be hit: the
        # tail gives way to what is missing, what comes before that does not.
        self._tier.refresh(chunk.key for chunk in chunks)
        head = chunks[: missing[0].number] if missing else []
        with self._tier.protecting(chunk.key for chunk in head):
            order = self._order_store(state, missing) if missing else None
        if self._nothing_left_to_store(state):
            self._stop_storing(state)
        return order

    def _wanted(self, state: RequestState, missing: list[Chunk]) -> list[Chunk]:
        """Of these chunks those that the offload policy wants, up to the first one that
        it does not. It hears of those behind a hole too."""
        if not missing:
            return missing
        wanted = self._filter.num_wanted(state.request, missing)
        if state.has_hole:
            wanted = 0
        state.has_hole |= wanted < len(missing)
        refused = (len(missing) - wanted) * self._chunking.blocks
        if refused:
            self._counters.add("refused_blocks", refused)
        return missing[:wanted]

    def _order_store(
        self, state: RequestState, chunks: Sequence[Chunk]
    ) -> CopyOrder | None:
        reservation, row = self._tier.reserve(chunks), state.row
        skipped = len(chunks) - len(reservation.chunks)
        if skipped:
            self._counters.add("skipped_blocks", skipped * self._chunking.blocks)
            self._stop_storing(state)  # what follows could never be hit
        if not reservation.chunks:
            return None
        engine, host = [], []
        for chunk, slot in zip(reservation.chunks, reservation.slots, strict=True):
            for block in self._chunking.engine_blocks(chunk):
                engine.append(row[block])
                host.append(self._chunking.host_block(slot, block))
        job = StoreJob(
            self._order(state, engine, host),
            state,
            set(range(self._engine.world_size)),
            self._clock(),
            reservation=reservation,
        )
        self._engine_blocks().acquire(engine)
        self._jobs[job.order.id] = job
        state.stores.add(job.order.id)
        return job.order

    def _storable_chunks(self, request: RequestView, num_computed: int) -> int:
        """Whole chunks that are computed, hashed and wanted."""
        tokens = min(num_computed, self._chunking.hashed_tokens(request))
        if self._config.offload_prompt_only:
            tokens = min(tokens, request.num_prompt_tokens)
        return tokens // self._chunking.tokens

    def _nothing_left_to_store(self, state: RequestState) -> bool:
        last = state.request.num_prompt_tokens // self._chunking.tokens
        return self._config.offload_prompt_only and state.next_chunk >= last

    def _preempted(self, request_id: str) -> None:
        state = self._requests.get(request_id)
        # Who was admitted again in this very step keeps its new row.
        if state is not None and state.admitted_after != self._step:
            self._stop_storing(state)

    def _stop_storing(self, state: RequestState) -> None:
        """Nothing more is stored of this admission."""
        state.row = []
        self._watched.pop(state.request.request_id, None)

    # -- what became of it ---------------------------------------------------------

    def apply(self, reports: Iterable[bytes]) -> None:
        """Count completions over ranks; late and repeated ones are ignored."""
        for data in reports:
            report = decode(data, Report)
            self._rate.ended(report.step)
            for done in report.completions:
                job = self._jobs.get(done.id)
                if job is not None and job.report(report.rank, done):
                    del self._jobs[done.id]
                    self._ended(job)

    def distrust(self, block_ids: AbstractSet[int]) -> None:
        """The engine says that these blocks of its own hold no valid bytes: what is
        being stored from them will not be kept."""
        for job in self._jobs.values():
            if isinstance(job, StoreJob) and not block_ids.isdisjoint(job.engine_ids):
                job.error = "the engine reported a source block as invalid"

    def _ended(self, job: StoreJob | LoadJob) -> None:
        if isinstance(job, StoreJob):
            self._store_ended(job)
        else:
            self._load_ended(job)
        self._update_gauges()

    def _store_ended(self, job: StoreJob) -> None:
        self._engine_blocks().release(job.engine_ids[::-1])
        job.state.stores.discard(job.order.id)
        self._announce_if_drained(job.state)
        if job.error:
            self._tier.abandon(job.reservation)
            self._counters.add("failed_stores")
            if job.error not in self._said:
                self._said.add(job.error)
                logger.warning(
                    "a store failed and is not kept (said once): %s", job.error
                )
        elif self._tier.commit(job.reservation, context_of(job.state.request)):
            self._counters.add("stored_blocks", len(job.engine_ids))
            self._counters.add("stored_bytes", job.nbytes)
            self._counters.observe("store_seconds", job.seconds)

    def _load_ended(self, job: LoadJob) -> None:
        self._tier.unpin(job.slots)
        for key in job.keys:
            self._loading[key] -= 1
            if not self._loading[key]:
                del self._loading[key]
        if job.error:
            self._tier.drop(job.slots)
            job.state.load_failed = True
            self._counters.add("failed_loads")
            logger.error(
                "a load failed for request %s: %s", job.order.request_id, job.error
            )
            return
        self._counters.add("loaded_blocks", len(job.engine_ids))
        self._counters.add("loaded_tokens", job.num_tokens)
        self._counters.add("loaded_bytes", job.nbytes)
        self._counters.observe("load_seconds", self._clock() - job.started)
        self._counters.observe(
            "recompute_seconds_saved", self._rate.seconds_for(job.num_tokens)
        )

    def finished(self, request: RequestView) -> bool:
        """Forget the request; its jobs go on by themselves.

        Returns:
            True if the engine has to be kept stepping by delaying the request's end
            (engines that do not ask `has_pending_work`). Not while it loads: an
            engine waits for loads by itself, and must hear of one end only.
        """
        self._watched.pop(request.request_id, None)
        state = self._requests.pop(request.request_id, None)
        if state is None or not state.stores or self._engine.asks_pending_work:
            return False
        if any(
            isinstance(j, LoadJob) and j.state is state for j in self._jobs.values()
        ):
            return False
        self._delayed[request.request_id] = state
        return True

    def _announce_if_drained(self, state: RequestState) -> None:
        request_id = state.request.request_id
        if not state.stores and self._delayed.get(request_id) is state:
            del self._delayed[request_id]
            self._finished_sends.append(request_id)

    # -- the tier as a whole -------------------------------------------------------

    def reset(self) -> bool:
        """Empty the host tier; stores under way are dropped when they end.

        Returns:
            False while a load is under way: its bytes, from before the reset, may
            still appear in the engine.
        """
        self._tier.clear()
        self._update_gauges()
        return not any(isinstance(job, LoadJob) for job in self._jobs.values())

    def has_pending_work(self) -> bool:
        """Transfers under way, or an end that is to be announced."""
        return bool(self._jobs or self._finished_sends)

    def has_pending_frees(self) -> bool:
        """Stores that have just begun: waiting for them is cheaper than preempting.
        One that takes longer than a lookup would wait is not waited for."""
        oldest = self._clock() - self._wait
        return any(
            isinstance(job, StoreJob) and job.started > oldest
            for job in self._jobs.values()
        )

    def take_events(self) -> list[KVCacheEvent]:
        """KV events of the host tier since the last call."""
        return self._tier.take_events()

    def take_stats(self) -> Stats | None:
        """Metrics that changed since the last call."""
        return self._counters.take()

    def check(self) -> None:
        """Verify that what is busy is exactly what jobs under way use.

        Raises:
            IntegrityError: an invariant does not hold.
        """
        self._tier.check()
        busy = {slot for job in self._jobs.values() for slot in job.slots}
        if len(busy) != self._tier.num_busy:
            raise IntegrityError(
                f"{self._tier.num_busy} host slots busy, jobs use {len(busy)}"
            )
        if not self._watched.keys() <= self._requests.keys():
            raise IntegrityError("a forgotten request is still watched")

    def close(self) -> None:
        """Nothing to stop: this half owns no thread and no memory."""

    # -- inside --------------------------------------------------------------------

    def _state(self, request: RequestView) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            state = self._requests[request.request_id] = RequestState(request)
        return state

    def _order(
        self, state: RequestState, engine: list[int], host: list[int]
    ) -> CopyOrder:
        pairs = BlockPairs(self._chunking.group.index, engine, host)
        return CopyOrder(next(self._job_ids), state.request.request_id, [pairs])

    def _engine_blocks(self) -> EngineBlocks:
        if self._blocks is None:
            raise IntegrityError("bind_blocks was not called before the first store")
        return self._blocks

    def _update_gauges(self) -> None:
        per_chunk = self._chunking.blocks
        self._counters.set("host_blocks_stored", self._tier.num_stored * per_chunk)
        self._counters.set("pending_jobs", len(self._jobs))
        failures = self._tier.policy_failures + self._filter.failures
        self._counters.set("policy_failures", failures)
        evicted = self._tier.take_evictions()
        if evicted:
            self._counters.add("evicted_blocks", evicted * per_chunk)
