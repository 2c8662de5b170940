"""The loading half of the scheduler half: what is offered, ordered, and came of it."""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvplugin.connectors.metrics import Counters
from kvplugin.connectors.offload.boundary import Boundaries
from kvplugin.connectors.offload.chunks import Chunking
from kvplugin.connectors.offload.host_tier import HostTier
from kvplugin.connectors.offload.jobs import JobTable, LoadJob
from kvplugin.connectors.offload.messages import BlockPairs
from kvplugin.connectors.offload.recompute import RecomputeRate
from kvplugin.connectors.offload.requests import RequestState
from kvplugin.contract import EngineInfo, RequestView
from kvplugin.errors import TransferError
from kvplugin.policies.eviction import context_of
from kvplugin.spec import cdiv

logger = logging.getLogger("vllm.kvplugin.offload")


class Reach(NamedTuple):
    """How far a request could be loaded, in tokens from its start."""

    now: int
    soon: int
    """Further where it needs chunks that are being stored."""
    pays_to_wait: bool
    """Soon is further, or the first chunk beyond the local hit is being loaded for
    another request: that will be a local hit, and a second copy of it in vain."""


class Loads:
    """From host memory into the engine's blocks.

    Args:
        engine: whose blocks they are.
        cuts: the groups that are kept.
        boundaries: of all of them.
        tier: where they are.
        jobs: all jobs under way.
        counters: of the connector.
        rate: how long recomputing takes.
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
        rate: RecomputeRate,
        clock: Callable[[], float],
    ) -> None:
        self._boundaries = boundaries
        self._engine = engine
        self._cuts = cuts
        self._tier = tier
        self._jobs = jobs
        self._counters = counters
        self._rate = rate
        self._clock = clock
        self._readable = {cut.index: tier.readable(cut.index) for cut in cuts}
        self._loading: dict[bytes, int] = {}

    # -- a lookup ------------------------------------------------------------------

    def reach(self, state: RequestState, local: int) -> Reach:
        """How far the request could be loaded."""
        request = state.request
        hashes = request.block_hashes
        question = self._tier.version, local, request.num_tokens, len(hashes)
        if state.answer is None or state.answer[0] != question:
            state.answer = question, self._ends(request, local)
        now, soon = state.answer[1]
        is_coming = soon > local and self._is_loading(request, local, soon)
        return Reach(now, soon, pays_to_wait=soon > now or is_coming)

    def _ends(self, request: RequestView, local: int) -> tuple[int, int]:
        """Tokens up to which the tier has all that is needed: now, and soon."""
        limit = request.num_tokens - 1
        hashes, readable = request.block_hashes, self._readable
        known = len(hashes)
        is_writing = False

        def holds_now(cut: Chunking, number: int) -> bool:
            last = (number + 1) * cut.hashes - 1
            return last < known and hashes[last] in readable[cut.index]

        def holds_soon(cut: Chunking, number: int) -> bool:
            nonlocal is_writing
            if holds_now(cut, number):
                return True
            key = cut.key(request, number)
            if key is None or not self._tier.is_writing(key):
                return False
            is_writing = True
            return True

        now = soon = self._boundaries.largest(local, limit, holds_soon)
        if is_writing:
            now = self._boundaries.largest(local, limit, holds_now)
        return now, soon

    def _is_loading(self, request: RequestView, local: int, end: int) -> bool:
        if not (self._engine.prefix_caching and self._loading):
            return False
        cut = next((cut for cut in self._cuts if cut.coverage.dense), self._cuts[0])
        first = cut.coverage.first(local, end) // cut.blocks
        return cut.key(request, first) in self._loading

    # -- an order ------------------------------------------------------------------

    def order(
        self, state: RequestState, rows: Sequence[Sequence[int]], local: int, end: int
    ) -> LoadJob:
        """Order what fills the rows from token `local` to `end`.

        Raises:
            TransferError: that is impossible, and the engine cannot be told.
        """
        parts: list[BlockPairs] = []
        found: dict[int, dict[bytes, int]] = {}
        refusal = self._misplaced(local, end)
        for cut in self._cuts:
            part, slots, why = self._part(state, cut, rows[cut.index], local, end)
            refusal = refusal or why
            if part.engine_ids:
                parts.append(part)
                found[cut.index] = slots
        if refusal:
            if not self._engine.reports_failed_loads:
                raise TransferError(f"request {state.request.request_id}: {refusal}")
            parts = [BlockPairs(part.group, part.engine_ids, []) for part in parts]
            found = {}
        job = LoadJob(
            self._jobs.order(state, parts, refusal),
            state,
            self._jobs.new_ranks(),
            self._clock(),
            slots={group: list(slots.values()) for group, slots in found.items()},
            keys=[key for slots in found.values() for key in slots],
            num_tokens=end - local,
        )
        self._began(job)
        return job

    def _began(self, job: LoadJob) -> None:
        ctx = context_of(job.state.request)
        for group, slots in job.slots.items():
            self._tier.pin(group, slots, ctx)
        for key in job.keys:
            self._loading[key] = self._loading.get(key, 0) + 1
        self._jobs.add(job)

    def row_tokens(self, rows: Sequence[Sequence[int]]) -> int:
        """Tokens that rows of this length have room for in every group."""
        return min(len(rows[cut.index]) * cut.group.block_size for cut in self._cuts)

    def _misplaced(self, local: int, end: int) -> str:
        floor = self._boundaries.floor
        if 0 <= local == floor(local) and end == floor(end):
            return ""
        unit = self._boundaries.unit
        return f"tokens {local} to {end} do not begin and end at multiples of {unit}"

    def _part(
        self,
        state: RequestState,
        cut: Chunking,
        row: Sequence[int],
        local: int,
        end: int,
    ) -> tuple[BlockPairs, dict[bytes, int], str]:
        """What fills one group's row, the slots by key, and why it cannot be filled.

        The engine will give every block of the row its hash, so those that it needs
        and any others must be filled.
        """
        size = cut.group.block_size
        needed = cut.coverage.first(local, end)
        engine, host, found, why = [], [], {}, ""
        for number in range(max(local, 0) // size, cdiv(end, size)):
            block = row[number] if number < len(row) else 0
            if not block:
                if number >= needed:
                    why = why or f"block {number} of group {cut.index} has no memory"
                continue
            engine.append(block)
            key = cut.key(state.request, number // cut.blocks)
            slot = None if key is None else self._tier.slot_of(key)
            if key is None or slot is None:
                why = (
                    why or f"block {number} of group {cut.index} is not in host memory"
                )
                continue
            found[key] = slot
            host.append(cut.host_block(slot, number))
        return BlockPairs(cut.index, engine, host), found, why

    # -- what became of it ---------------------------------------------------------

    def give_up(self, job: LoadJob, plan: int) -> None:
        """The load is overdue: its request is told that it failed. Its blocks must
        have been referenced: they are written until it really ends. What it reads is
        not offered again, as the next load of it might hang as well.

        Args:
            job: the load.
            plan: number of the plan that says so.
        """
        job.given_up_by = plan
        self._forget(job)
        for group, slots in job.slots.items():
            self._tier.drop(group, slots)
        self._counters.add("given_up_loads")
        self._failed(job, "it does not end (transfer_timeout_s)")

    def ended(self, job: LoadJob) -> None:
        """All ranks have reported it."""
        for group, slots in job.slots.items():
            self._tier.release(group, slots[::-1])
            if job.error:
                self._tier.drop(group, slots)
        if job.given_up_by is not None:
            return
        self._forget(job)
        if job.error:
            self._failed(job, job.error)
            return
        self._counters.add("loaded_blocks", len(job.engine_ids))
        self._counters.add("loaded_tokens", job.num_tokens)
        self._counters.add("loaded_bytes", job.nbytes)
        self._counters.observe("load_seconds", self._clock() - job.started)
        saved = self._rate.seconds_for(job.num_tokens)
        self._counters.observe("recompute_seconds_saved", saved)

    def _forget(self, job: LoadJob) -> None:
        """Nobody waits for what it loads any more."""
        for key in job.keys:
            self._loading[key] -= 1
            if not self._loading[key]:
                del self._loading[key]

    def _failed(self, job: LoadJob, why: str) -> None:
        job.state.load_failed = True
        self._counters.add("failed_loads")
        logger.error("a load failed for request %s: %s", job.order.request_id, why)
