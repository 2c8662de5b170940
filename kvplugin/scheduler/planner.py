"""Planner: who gets tokens and blocks in a step."""

from collections.abc import Iterable

from kvplugin.choices import Choices
from kvplugin.contract import MISS, Lookup
from kvplugin.errors import ConfigError
from kvplugin.kv_cache_blocks import KVCacheBlocks
from kvplugin.manager import KVCacheManager
from kvplugin.managers import AlignedMambaManager
from kvplugin.request import Request
from kvplugin.scheduler.config import SchedulerConfig
from kvplugin.scheduler.entry import Entry, Status
from kvplugin.scheduler.roster import Roster
from kvplugin.scheduler.rows import blocks_from
from kvplugin.scheduler.step import StepPlan


class Planner:
    """Fills a step, in this order: requests that run, requests whose external tokens
    have arrived, waiting ones.

    Args:
        roster: the requests.
        choices: what plugins may decide.
        loads_synchronously: external tokens count as computed at admission.

    Raises:
        ConfigError: steps are too small for the model's states.
    """

    def __init__(
        self, roster: Roster, choices: Choices, loads_synchronously: bool
    ) -> None:
        self._roster = roster
        self._choices = choices
        self._manager = roster.manager
        self._config = roster.config
        self._loads_synchronously = loads_synchronously
        self._unit = _unit(self._manager, self._config)

    def fill(self, step: StepPlan) -> None:
        """Give the step's tokens away. Nobody overtakes: once somebody who has blocks
        cannot get what it needs, room is left for it alone."""
        self._schedule_running(step)
        if not step.closed:
            self._schedule_loaded(step)
        if not step.closed:
            self._schedule_waiting(step)

    # -- requests with blocks ------------------------------------------------------

    def _schedule_running(self, step: StepPlan) -> None:
        for entry in list(self._roster.running):
            if not step.budget:
                return
            if entry.status is not Status.RUNNING or entry.waits_for_drafts:
                continue
            if entry.num_output_tokens >= entry.max_tokens:
                continue  # its last token is under way
            num_tokens, drafts = self._next_tokens(entry, step.budget)
            if not num_tokens:
                continue
            blocks = self._allocate(step, entry, num_tokens)
            if blocks is not None:
                step.add(entry, num_tokens, blocks, drafts=drafts)
            elif entry not in self._roster.running:
                return

    def _schedule_loaded(self, step: StepPlan) -> None:
        """Requests that hold blocks come before those that need some."""
        roster = self._roster
        for entry in roster.loaded:
            if step.closed or not self._has_room(step):
                return
            num_tokens, _ = self._next_tokens(entry, step.budget)
            blocks = self._allocate(step, entry, num_tokens) if num_tokens else None
            if blocks is None:
                step.closed = True
                return
            roster.run(entry)
            if roster.connector is not None:
                roster.connector.allocated(entry.request, roster.rows(entry), 0)
            step.add(entry, num_tokens, blocks, admitted=True, heard=True)

    def _next_tokens(self, entry: Entry, budget: int) -> tuple[int, list[int]]:
        """Tokens to compute next, and which of them are drafts."""
        request = entry.request
        known = request.num_tokens + entry.num_placeholders
        computed = request.num_computed_tokens
        num_tokens = self._cut(entry, computed, budget)
        if computed + num_tokens < known:
            return num_tokens, []
        room = min(self._manager.max_model_len - 1 - known, budget - num_tokens)
        drafts = entry.drafts[: max(room, 0)]
        return num_tokens + len(drafts), drafts

    def _cut(self, entry: Entry, computed: int, budget: int) -> int:
        """How many of the tokens left after those computed a step takes."""
        left = entry.request.num_tokens + entry.num_placeholders - computed
        num_tokens = min(left, budget)
        if self._config.long_prefill_token_threshold:
            num_tokens = min(num_tokens, self._config.long_prefill_token_threshold)
        unit, known = self._unit, entry.request.num_tokens
        if unit == 1 or computed >= max(entry.request.num_prompt_tokens, known - 1):
            return num_tokens
        if computed % unit:
            # A state was loaded into the block; its key is for the one at its end.
            return min(num_tokens, unit - computed % unit)
        last = known - known % unit
        end = computed + num_tokens
        if end < last:
            return num_tokens // unit * unit
        return last - computed if computed < last < end else num_tokens

    def _allocate(
        self, step: StepPlan, entry: Entry, num_tokens: int
    ) -> KVCacheBlocks | None:
        """Slots for a request that has blocks, at the cost of others if need be; None
        if it has to wait itself."""
        lookahead = self._config.num_lookahead_tokens
        while True:
            blocks = self._manager.allocate_slots(
                entry.request, num_tokens, num_lookahead_tokens=lookahead
            )
            if blocks is not None:
                return blocks
            step.closed = True
            victim = None if self._frees_are_coming() else self._victim(entry)
            if victim is None:
                return None
            self._roster.preempt(victim, step)
            if victim is entry:
                return None

    def _frees_are_coming(self) -> bool:
        """Blocks are free as soon as a step or a transfer ends: more victims would
        lose theirs for nothing."""
        connector = self._roster.connector
        return self._roster.holds.any_step or (
            connector is not None and connector.has_pending_frees()
        )

    def _victim(self, entry: Entry) -> Entry | None:
        """Who loses its blocks to `entry`, itself perhaps; None if it had better wait:
        loaded requests take nothing from those that run, which will end."""
        roster = self._roster
        if entry.status is not Status.RUNNING:
            others = [other for other in roster.loaded if other is not entry]
            return None if roster.running or not others else others[-1]
        running = [other.request for other in roster.running]
        victim = roster.requests[self._choices.victim(entry.request, running)]
        return self._instead_of(entry) if victim is entry else victim

    def _instead_of(self, entry: Entry) -> Entry | None:
        """Who runs loses its own blocks last: loaded requests give theirs first, those
        whose load is under way when it has ended. Two who take turns at losing what
        they have computed would get nowhere."""
        loaded = list(self._roster.loaded)
        by_priority = self._config.policy == "priority"
        if loaded and not (by_priority and loaded[-1].rank < entry.rank):
            return loaded[-1]
        return None if self._roster.loads.any_awaited else entry

    # -- requests without blocks ---------------------------------------------------

    def _schedule_waiting(self, step: StepPlan) -> None:
        for entry in self._in_order(step):
            if not self._has_room(step) or not self._is_open(step, entry):
                return
            hit_blocks, hit = self._manager.find_computed_blocks(entry.request)
            answer = self._ask_connector(entry, hit)
            found = hit_blocks, hit, answer.tokens
            if answer.ready and not self._admit(step, entry, *found):
                return

    def _has_room(self, step: StepPlan) -> bool:
        return step.budget > 0 and len(self._roster.running) < self._config.max_num_seqs

    def _in_order(self, step: StepPlan) -> Iterable[Entry]:
        """Waiting requests as the policy wants them, or a plugin."""
        queue = self._roster.waiting
        if not (self._choices.orders_waiting and len(queue) and self._has_room(step)):
            return queue
        ids = self._choices.order([entry.request for entry in queue], step.number)
        return (self._roster.requests[id_] for id_ in ids)

    def _is_open(self, step: StepPlan, entry: Entry) -> bool:
        """Whether a waiting request may be admitted, as far as plugins go."""
        running, waiting = len(self._roster.running), len(self._roster.waiting)
        return self._choices.admits(entry.request, step.number, running, waiting)

    def _ask_connector(self, entry: Entry, hit: int) -> Lookup:
        """Tokens that the connector can bring beyond the local hit."""
        loads, most = self._roster.loads, self._config.max_overdue_fraction
        most *= self._manager.block_pool.num_usable_blocks
        # Its id may still name a transfer, into blocks that it gave up.
        if entry.skips_external or entry.id in loads or loads.num_overdue_blocks > most:
            return MISS
        return self._roster.answers.lookup(entry.request, hit)

    def _credit(self, request: Request, hit: int, external: int) -> tuple[int, int]:
        """Tokens to load, and those of them that count as computed; the last token of
        all is computed in any case, for its logits."""
        credited = min(external, request.num_tokens - 1 - hit)
        return (external, credited) if credited > 0 else (0, 0)

    def _admit(
        self,
        step: StepPlan,
        entry: Entry,
        hit_blocks: KVCacheBlocks,
        hit: int,
        external: int,
    ) -> bool:
        """Give a waiting request its blocks; False if it must go on waiting."""
        request = entry.request
        external, credited = self._credit(request, hit, external)
        parks = credited > 0 and not self._loads_synchronously
        computed = hit + credited
        num_tokens = self._cut(entry, computed, step.budget)
        if parks:
            num_tokens = external - credited  # only room for it, where it comes too
        elif not num_tokens:
            return False
        num_encoder = entry.num_encoder_tokens
        reserves = self._config.scheduler_reserve_full_isl
        if reserves and not self._manager.can_fit_full_sequence(
            request, hit, hit_blocks, credited, num_encoder
        ):
            return False
        blocks = self._manager.allocate_slots(
            request,
            num_tokens,
            hit,
            hit_blocks,
            num_external_computed_tokens=credited,
            delay_cache_blocks=parks,
            num_encoder_tokens=num_encoder,
        )
        if blocks is None:
            return False
        self._manager.record_prefix_cache_stats(request, hit)
        request.num_computed_tokens = computed
        self._tell_connector(entry, hit, external)
        if entry.num_cached_tokens < 0:
            entry.num_cached_tokens = computed
        if parks:
            self._roster.park(entry)
        else:
            self._roster.run(entry)
            step.add(entry, num_tokens, blocks, admitted=True, heard=True)
        return True

    def _tell_connector(self, entry: Entry, hit: int, external: int) -> None:
        roster = self._roster
        rows = roster.rows(entry)
        new = blocks_from(hit, rows, roster.block_sizes) if external else ()
        entry.external_blocks = frozenset(new)
        if roster.connector is not None:
            request = entry.request
            roster.external_stats.record(
                request.num_tokens - hit, external, request.num_preemptions > 0
            )
            roster.connector.allocated(request, rows, external)


def _unit(manager: KVCacheManager, config: SchedulerConfig) -> int:
    """Tokens of which a step of a prefill computes a multiple: aligned states are kept
    where steps end, so prefills end at blocks' ends."""
    groups = manager.coordinator.single_type_managers
    aligned = [g.block_size for g in groups if isinstance(g, AlignedMambaManager)]
    unit = max(aligned, default=1)
    for key in ("max_num_batched_tokens", "long_prefill_token_threshold"):
        if 0 < getattr(config, key) < unit:
            raise ConfigError(
                f"{key}={getattr(config, key)} is less than the {unit} tokens of a "
                f"block of aligned states: no step could compute one; make it at "
                f"least {unit}, or use smaller blocks"
            )
    return unit
