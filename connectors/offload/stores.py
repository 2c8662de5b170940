"""The storing half of the scheduler half: what is kept of a step, and came of it."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Final

from kvplugin.connectors.metrics import Counters
from kvplugin.connectors.offload.admissions import Admission, Admissions
from kvplugin.connectors.offload.boundary import Boundaries, behind, needed
from kvplugin.connectors.offload.checkpoints import Checkpoints
from kvplugin.connectors.offload.chunks import Chunking, hashed_tokens
from kvplugin.connectors.offload.holding import Holding
from kvplugin.connectors.offload.host_tier import HostTier, Reservation
from kvplugin.connectors.offload.jobs import JobTable, StoreJob
from kvplugin.connectors.offload.leavings import left_by
from kvplugin.connectors.offload.messages import BlockPairs, CopyOrder
from kvplugin.connectors.offload.requests import RequestState
from kvplugin.connectors.offload.step_parts import StepPart, StepParts, ends_of
from kvplugin.connectors.offload.store_filter import StoreFilter
from kvplugin.connectors.offload.store_room import StoreRoom
from kvplugin.contract import EngineBlocks, EngineInfo, ScheduledRequest
from kvplugin.errors import TransferError
from kvplugin.hooks import Hooks
from kvplugin.policies.eviction import context_of

logger = logging.getLogger("vllm.kvplugin.offload")

_ENDLESS: Final = 1 << 62
"""Chunks of a request that may be stored without end."""
_MOST_SAID: Final = 16
"""Warnings that the log has; some name what is different each time."""


class Stores:
    """From the engine's blocks into host memory.

    Dense groups are stored chunk by chunk, from the start: each chunk once all of its
    tokens are computed. Of a window every block that a step completes is stored, while
    the engine still has it; of a recurrent state what the step leaves at its end, and
    what the engine says it leaves besides.

    Args:
        engine: whose blocks they are.
        cuts: the groups that are kept.
        boundaries: of all of them.
        tier: where they go.
        jobs: all jobs under way.
        counters: of the connector.
        wanted: the offload policy.
        hooks: plugins that choose checkpoints.
        prompt_only: of prompts alone.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        engine: EngineInfo,
        cuts: Sequence[Chunking],
        boundaries: Boundaries,
        tier: HostTier,
        jobs: JobTable,
        counters: Counters,
        wanted: StoreFilter,
        hooks: Hooks,
        *,
        prompt_only: bool,
        clock: Callable[[], float],
    ) -> None:
        self.blocks: EngineBlocks | None = None
        checkpoints = Checkpoints(engine, cuts, hooks)
        self.admissions = Admissions(cuts, tier, checkpoints, prompt_only=prompt_only)
        """Of requests with something to store."""
        self._cuts = cuts
        self._dense = [cut for cut in cuts if cut.coverage.dense]
        self._sparse = [cut for cut in cuts if not cut.coverage.dense]
        self._boundaries = boundaries
        self._grain = math.gcd(*(cut.tokens for cut in cuts))
        self._parts = StepParts(tier, wanted, self._refuse)
        self._room = StoreRoom(tier, boundaries, self._skip)
        self._hash_block_size = engine.hash_block_size
        self._tier = tier
        self._jobs = jobs
        self._counters = counters
        self._prompt_only = prompt_only
        self._clock = clock
        self._said: set[str] = set()

    # -- a step --------------------------------------------------------------------

    def follow(self, state: RequestState, step: ScheduledRequest) -> None:
        """Store nothing in this step; the next one may store what is still there."""
        if state.admission is not None:
            state.admission.grow(step.new_block_ids)

    def plan(self, state: RequestState, step: ScheduledRequest) -> CopyOrder | None:
        """What to store of a request in this step, if anything."""
        admission = state.admission
        if admission is None:
            return None
        admission.grow(step.new_block_ids)
        computed = step.num_tokens_after
        if computed < admission.until and not step.states:
            return None
        if admission.is_new:
            admission.is_new = False
            if not admission.reaches(self._cuts, computed):
                self._say_once(
                    "the engine did not name all blocks of a request: not stored"
                )
                self.admissions.stop(state)
                return None
            self._hold_where_it_begins(state, admission, step.num_computed_tokens)
        end = self._storable(state, step)
        admission.until = (end // self._grain + 1) * self._grain
        order, is_over = self._store(state, admission, step, end)
        if is_over or end >= admission.last:
            self.admissions.stop(state)
        return order

    def _store(
        self,
        state: RequestState,
        admission: Admission,
        step: ScheduledRequest,
        end: int,
    ) -> tuple[CopyOrder | None, bool]:
        """Store what the step brings of all groups up to token `end`, and whether that
        is the last of the request: behind what the engine gives no memory, or what
        finds no room in host memory, nothing could be hit."""
        given = min((admission.given(cut, end) for cut in self._dense), default=end)
        parts = []
        for cut in self._dense:
            numbers = admission.new_chunks(cut, given)
            parts.append(self._parts.dense(state, admission, cut, numbers))
        for cut in self._sparse:
            found = left_by(step, admission, cut, self._useful(admission, cut, given))
            parts.append(self._parts.sparse(state, admission, cut, found))
        reservations, boundary = self._room.make(state, parts, given)
        self._hold_beside(admission, parts, reservations, boundary)
        blocks = [
            [block for chunk in kept.chunks for block in part.engine(chunk)]
            for part, kept in zip(parts, reservations, strict=True)
        ]
        order = self._order(state, admission, reservations, blocks)
        return order, given < end or boundary is not None

    def _useful(self, admission: Admission, cut: Chunking, end: int) -> int:
        """Tokens up to which blocks of windows and states may yet be hit: not behind
        the last whole chunk, once no other will be."""
        if end < admission.last:
            return end
        whole = min(
            (end // one.tokens * one.tokens for one in self._dense), default=end
        )
        return min(end, whole + behind(cut))

    def _storable(self, state: RequestState, step: ScheduledRequest) -> int:
        """Tokens that are computed after the step, hashed and wanted."""
        tokens = min(
            step.num_tokens_after,
            hashed_tokens(state.request, self._hash_block_size),
        )
        return (
            min(tokens, state.request.num_prompt_tokens)
            if self._prompt_only
            else tokens
        )

    # -- what is held --------------------------------------------------------------

    def _hold_where_it_begins(
        self, state: RequestState, admission: Admission, computed: int
    ) -> None:
        """What the request goes on from must not give way to what it stores."""
        for cut in self._sparse:
            last = computed // cut.tokens
            first = self._needed(cut, last * cut.tokens).start
            slots = self._parts.find(cut, cut.of(state.request, first, last))
            if slots:
                self._tier.hold(cut.index, list(slots.values()))
                self._take_tail(admission.holding, cut, slots)

    def _hold_beside(
        self,
        admission: Admission,
        parts: Sequence[StepPart],
        reservations: Sequence[Reservation],
        boundary: int | None,
    ) -> None:
        """Hold what is there already of a step's chunks, up to a boundary; what this
        very step stores is held when it has arrived."""
        for part, reservation in zip(parts, reservations, strict=True):
            cut = part.cut
            last = _ENDLESS if boundary is None else needed(cut, boundary).stop
            if cut.coverage.dense:
                self._hold_behind(admission.holding, part, reservation, last)
            else:
                self._keep_tail(admission.holding, part, last * cut.tokens)

    def _hold_behind(
        self, holding: Holding, part: StepPart, reservation: Reservation, last: int
    ) -> None:
        """Only now that room has been made: a tail without its head can never be hit,
        and gives way to it."""
        own = {chunk.key for chunk in reservation.chunks}
        others = [c for c in part.behind if c.number < last and c.key not in own]
        there = self._parts.find(part.cut, others)
        holding.hold(there, part.cut.index, list(there.values()))

    def _keep_tail(self, holding: Holding, part: StepPart, last: int) -> None:
        """Of a group that is not dense; what ends behind token `last` is let go."""
        gone = [slot for end, slot in part.there.items() if end > last]
        self._tier.release(part.cut.index, gone[::-1])
        there = {end: slot for end, slot in part.there.items() if end <= last}
        if there:
            self._take_tail(holding, part.cut, there)

    def _take_tail(
        self, holding: Holding, cut: Chunking, slots: dict[int, int]
    ) -> None:
        """Slots by the ends of their chunks, ascending."""
        ends = ends_of(cut, self._needed(cut, max(slots)))
        holding.take_tail(list(slots), cut.index, list(slots.values()), ends)

    def _needed(self, cut: Chunking, end: int) -> range:
        """Blocks of a group that the last boundary needs, if the group's blocks are
        there up to `end`."""
        return needed(cut, self._boundaries.served(cut, end))

    # -- an order ------------------------------------------------------------------

    def _skip(self, cut: Chunking, chunks: int) -> None:
        if chunks > 0:
            self._counters.add("skipped_blocks", chunks * cut.blocks)

    def _refuse(self, cut: Chunking, chunks: int) -> None:
        if chunks > 0:
            self._counters.add("refused_blocks", chunks * cut.blocks)

    def _order(
        self,
        state: RequestState,
        admission: Admission,
        reservations: list[Reservation],
        blocks: list[list[int]],
    ) -> CopyOrder | None:
        parts = [
            BlockPairs(r.cut.index, engine, _host_blocks(r))
            for r, engine in zip(reservations, blocks, strict=True)
            if engine
        ]
        if not parts:
            return None
        job = StoreJob(
            self._jobs.order(state, parts),
            state,
            self._jobs.new_ranks(),
            self._clock(),
            reservations=[r for r in reservations if r.chunks],
            admission=admission,
        )
        self.engine_blocks().acquire(job.engine_ids)
        self._jobs.add(job)
        state.stores.add(job.order.id)
        admission.holding.store_began()
        return job.order

    def engine_blocks(self) -> EngineBlocks:
        """References to the engine's blocks; without any nothing begins.

        Raises:
            TransferError: there are none.
        """
        if self.blocks is None:
            raise TransferError(
                "the engine has ordered a load that was not offered, before it has "
                "handed over its block pool (bind_blocks)"
            )
        return self.blocks

    # -- what became of it ---------------------------------------------------------

    def ended(self, job: StoreJob) -> None:
        """All ranks have reported it."""
        self.engine_blocks().release(job.engine_ids[::-1])
        job.state.stores.discard(job.order.id)
        if job.error:
            self._failed(job)
        else:
            self._arrived(job)
        job.admission.holding.store_ended()
        self.admissions.prune(job.admission.holding)

    def _failed(self, job: StoreJob) -> None:
        for reservation in job.reservations:
            self._tier.abandon(reservation)
        self._counters.add("failed_stores")
        self._say_once(f"a store failed and is not kept: {job.error}")

    def _say_once(self, what: str) -> None:
        if what not in self._said and len(self._said) < _MOST_SAID:
            self._said.add(what)
            logger.warning("%s (said once)", what)

    def _arrived(self, job: StoreJob) -> None:
        ctx, holding = context_of(job.state.request), job.admission.holding
        kept = [r for r in job.reservations if self._tier.commit(r, ctx)]
        for cut, chunks, slots, _ in kept:
            ends = [(chunk.number + 1) * cut.tokens for chunk in chunks]
            if cut.coverage.dense:
                holding.take(ends, cut.index, slots)
            else:
                by_end = dict(zip(ends, slots, strict=True))
                self._take_tail(holding, cut, by_end)
        if kept:
            self._counters.add("stored_blocks", len(job.engine_ids))
            self._counters.add("stored_bytes", job.nbytes)
            self._counters.observe("store_seconds", job.seconds)


def _host_blocks(reservation: Reservation) -> list[int]:
    cut = reservation.cut
    return [
        cut.host_block(slot, block)
        for chunk, slot in zip(reservation.chunks, reservation.slots, strict=True)
        for block in cut.engine_blocks(chunk)
    ]
