"""The storing half of the scheduler half: what is kept of a step, and came of it."""

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from kvplugin.connectors.metrics import Counters
from kvplugin.connectors.offload.admissions import Admission, Admissions
from kvplugin.connectors.offload.chunks import (
    Chunk,
    Chunking,
    alignment,
    hashed_tokens,
)
from kvplugin.connectors.offload.holding import Holding
from kvplugin.connectors.offload.host_tier import HostTier, Reservation
from kvplugin.connectors.offload.jobs import JobTable, StoreJob
from kvplugin.connectors.offload.leavings import left_by
from kvplugin.connectors.offload.messages import BlockPairs, CopyOrder
from kvplugin.connectors.offload.requests import RequestState
from kvplugin.connectors.offload.store_filter import StoreFilter
from kvplugin.contract import EngineBlocks, EngineInfo, ScheduledRequest
from kvplugin.errors import IntegrityError
from kvplugin.policies.eviction import context_of

logger = logging.getLogger("vllm.kvplugin.offload")


class Stores:
    """From the engine's blocks into host memory.

    Dense groups are stored chunk by chunk, from the start: each chunk once all of its
    tokens are computed. Of a window every block that a step completes is stored, while
    the engine still has it; of a recurrent state what the step leaves at its end, and
    what the engine says it leaves besides.

    Args:
        engine: whose blocks they are.
        cuts: the groups that are kept.
        tier: where they go.
        jobs: all jobs under way.
        counters: of the connector.
        wanted: the offload policy.
        prompt_only: of prompts alone.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        engine: EngineInfo,
        cuts: Sequence[Chunking],
        tier: HostTier,
        jobs: JobTable,
        counters: Counters,
        wanted: StoreFilter,
        *,
        prompt_only: bool,
        clock: Callable[[], float],
    ) -> None:
        self.blocks: EngineBlocks | None = None
        self.admissions = Admissions(cuts, tier, prompt_only=prompt_only)
        """Of requests with something to store."""
        self._dense = [cut for cut in cuts if cut.coverage.dense]
        self._sparse = [cut for cut in cuts if not cut.coverage.dense]
        self._unit = alignment(cuts)
        self._hash_block_size = engine.hash_block_size
        self._tier = tier
        self._jobs = jobs
        self._counters = counters
        self._wanted = wanted
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
        if admission.is_new:
            admission.is_new = False
            self._hold_where_it_begins(state, admission, step.num_computed_tokens)
        end = self._storable(state, step)
        reservations: list[Reservation] = []
        blocks: list[list[int]] = []
        is_over = False
        for cut in self._dense:
            kept, reach = self._dense_chunks(state, admission, cut, end)
            if reach < end // cut.tokens:  # then nothing behind it can be hit
                is_over, end = True, reach * cut.tokens
            reservations.append(kept)
            blocks.append([b for c in kept.chunks for b in admission.blocks(cut, c)])
        for cut in self._sparse:
            found = left_by(step, admission, cut, end)
            kept = self._sparse_chunks(state, admission, cut, found)
            reservations.append(kept)
            blocks.append([found[chunk.number] for chunk in kept.chunks])
        order = self._order(state, admission, reservations, blocks)
        if is_over or end >= admission.last:
            self.admissions.stop(state)
        return order

    def _storable(self, state: RequestState, step: ScheduledRequest) -> int:
        """Tokens that are computed after the step, hashed and wanted."""
        tokens = min(
            step.num_computed_tokens + step.num_scheduled_tokens,
            hashed_tokens(state.request, self._hash_block_size),
        )
        return (
            min(tokens, state.request.num_prompt_tokens)
            if self._prompt_only
            else tokens
        )

    # -- dense groups --------------------------------------------------------------

    def _dense_chunks(
        self, state: RequestState, admission: Admission, cut: Chunking, end: int
    ) -> tuple[Reservation, int]:
        """Slots for the new chunks of one group, and how many chunks are there with
        them: fewer than computed if there was too little room for them. Those that are
        there already are held.

        What comes before a missing chunk is held before room is made for that one, what
        comes behind it after: a tail without its head can never be hit, and gives way.
        """
        first = admission.next_chunk[cut.index]
        admission.next_chunk[cut.index] = last = max(first, end // cut.tokens)
        chunks = list(
            takewhile(
                lambda chunk: admission.has(cut, chunk),
                cut.of(state.request, first, last),
            )
        )
        reach = first + len(chunks)
        missing = [chunk for chunk in chunks if self._tier.find(chunk.key) is None]
        head = missing[0].number if missing else last
        self._hold(admission, cut, chunks, range(first, head))
        wanted = self._dense_wanted(state, admission, cut, missing)
        room = self._room(cut)
        reservation = self._tier.reserve(cut, wanted[:room])
        self._skip(cut, len(wanted) - room)
        self._hold(admission, cut, chunks, range(head, last), reservation)
        if len(wanted) > room:
            reach = wanted[room].number
        return reservation, reach

    def _hold(
        self,
        admission: Admission,
        cut: Chunking,
        chunks: Sequence[Chunk],
        numbers: range,
        reserved: Reservation | None = None,
    ) -> None:
        """Hold those of the chunks in `numbers` that are there, but for those that
        this very step stores: they are held when they have arrived."""
        own = {chunk.key for chunk in reserved.chunks} if reserved else ()
        for chunk in chunks:
            if chunk.number in numbers and chunk.key not in own:
                slot = self._tier.find(chunk.key)
                if slot is not None:
                    end = (chunk.number + 1) * cut.tokens
                    admission.holding.hold(end, cut.index, slot)

    def _dense_wanted(
        self,
        state: RequestState,
        admission: Admission,
        cut: Chunking,
        missing: list[Chunk],
    ) -> list[Chunk]:
        """Of these chunks those that the offload policy wants, up to the first one that
        it does not. It hears of those behind a hole too."""
        if not missing:
            return missing
        mask = self._wanted.mask(state.request, cut, missing)
        count = mask.index(False) if False in mask else len(mask)
        if count < len(missing):
            start = missing[count].number * cut.tokens
            hole = admission.hole
            admission.hole = start if hole is None else min(hole, start)
        wanted = _before(cut, missing[:count], admission.hole)
        self._refuse(cut, len(missing) - len(wanted))
        return wanted

    # -- windows and states --------------------------------------------------------

    def _sparse_chunks(
        self,
        state: RequestState,
        admission: Admission,
        cut: Chunking,
        found: dict[int, int],
    ) -> Reservation:
        """Slots for those of the blocks that are missing and wanted; if there is too
        little room, for the last of them. Those that are there become recent."""
        chunks = [
            chunk
            for number in sorted(found)
            for chunk in cut.of(state.request, number, number + 1)
        ]
        missing = [chunk for chunk in chunks if self._tier.find(chunk.key) is None]
        if len(missing) < len(chunks):
            self._hold_tail(admission, cut, chunks)
        wanted = missing
        if missing:
            mask = self._wanted.mask(state.request, cut, missing)
            wanted = [
                c for c, is_wanted in zip(missing, mask, strict=True) if is_wanted
            ]
            wanted = _before(cut, wanted, admission.hole)
            self._refuse(cut, len(missing) - len(wanted))
        skipped = max(0, len(wanted) - self._room(cut))
        self._skip(cut, skipped)
        return self._tier.reserve(cut, wanted[skipped:])

    def _hold_where_it_begins(
        self, state: RequestState, admission: Admission, computed: int
    ) -> None:
        """What the request goes on from must not give way to what it stores."""
        for cut in self._sparse:
            needed = self._needed(cut, computed // cut.tokens * cut.tokens)
            first, last = needed.start // cut.tokens - 1, computed // cut.tokens
            self._hold_tail(admission, cut, cut.of(state.request, first, last))

    def _hold_tail(
        self, admission: Admission, cut: Chunking, chunks: Iterable[Chunk]
    ) -> None:
        """Hold those of the chunks that are there or being written."""
        found = [(c, self._tier.find(c.key)) for c in chunks]
        slots = {(c.number + 1) * cut.tokens: slot for c, slot in found if slot}
        if slots:
            self._tier.hold(cut.index, list(slots.values()))
            self._take_tail(admission.holding, cut, slots)

    def _take_tail(
        self, holding: Holding, cut: Chunking, slots: dict[int, int]
    ) -> None:
        """Slots by the ends of their chunks, ascending."""
        needed = self._needed(cut, max(slots))
        holding.take_tail(list(slots), cut.index, list(slots.values()), needed)

    def _needed(self, cut: Chunking, end: int) -> range:
        """Ends of the blocks of a group that the last boundary needs, if the group's
        blocks are there up to `end`."""
        behind = cut.tokens * cut.group.has_drafter
        boundary = max(end - behind, 0) // self._unit * self._unit
        first = cut.coverage.first(0, boundary)
        return range((first + 1) * cut.tokens, boundary + behind + 1, cut.tokens)

    # -- an order ------------------------------------------------------------------

    def _room(self, cut: Chunking) -> int:
        return self._tier.room(cut.index)

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
            holding=admission.holding,
        )
        self.engine_blocks().acquire(job.engine_ids)
        self._jobs.add(job)
        state.stores.add(job.order.id)
        admission.holding.store_began()
        return job.order

    def engine_blocks(self) -> EngineBlocks:
        """References to the engine's blocks.

        Raises:
            IntegrityError: there are none.
        """
        if self.blocks is None:
            raise IntegrityError("bind_blocks was not called before the first store")
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
        job.holding.store_ended()
        self.admissions.prune(job.holding)

    def _failed(self, job: StoreJob) -> None:
        for reservation in job.reservations:
            self._tier.abandon(reservation)
        self._counters.add("failed_stores")
        if job.error not in self._said:
            self._said.add(job.error)
            logger.warning("a store failed and is not kept (said once): %s", job.error)

    def _arrived(self, job: StoreJob) -> None:
        ctx = context_of(job.state.request)
        kept = [r for r in job.reservations if self._tier.commit(r, ctx)]
        for cut, chunks, slots, _ in kept:
            ends = [(chunk.number + 1) * cut.tokens for chunk in chunks]
            if cut.coverage.dense:
                job.holding.take(ends, cut.index, slots)
            else:
                by_end = dict(zip(ends, slots, strict=True))
                self._take_tail(job.holding, cut, by_end)
        if kept:
            self._counters.add("stored_blocks", len(job.engine_ids))
            self._counters.add("stored_bytes", job.nbytes)
            self._counters.observe("store_seconds", job.seconds)


def _before(cut: Chunking, chunks: list[Chunk], hole: int | None) -> list[Chunk]:
    """Those of the chunks that end before a hole, or where it begins."""
    if hole is None:
        return chunks
    return [chunk for chunk in chunks if (chunk.number + 1) * cut.tokens <= hole]


def _host_blocks(reservation: Reservation) -> list[int]:
    cut = reservation.cut
    return [
        cut.host_block(slot, block)
        for chunk, slot in zip(reservation.chunks, reservation.slots, strict=True)
        for block in cut.engine_blocks(chunk)
    ]
