"""Scheduler: who computes what in the next step, and what became of the last one.

    add_request ──> schedule() ──> SchedulerOutput ──> the workers
                       ▲                                   │
    RequestOutput <── update_from_output(ModelOutput) <────┘

A step serves, in this order and while its token budget lasts: requests that run (if
blocks run out, the one that came last gives up its own), requests whose external tokens
have arrived, and waiting ones. Whoever needs blocks that are not there ends the step's
admissions: nobody overtakes.

With `pipeline_depth=2` a step is scheduled before the last one's output is known. A
block that such a step may still write is not handed out (`holds.py`), windows give back
only what is settled, and the output of a step that a request did not survive is
discarded.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

from kvplugin.contract import SchedulerHalf, Step, WorkerOutcome
from kvplugin.errors import IntegrityError
from kvplugin.events import KVCacheEvent
from kvplugin.hooks import Hooks
from kvplugin.manager import KVCacheManager
from kvplugin.request import Request, RequestError
from kvplugin.scheduler.config import SchedulerConfig
from kvplugin.scheduler.entry import Entry, Status
from kvplugin.scheduler.holds import EngineReferences, Holds
from kvplugin.scheduler.loads import Loads
from kvplugin.scheduler.output import ModelOutput, RequestOutput, SchedulerOutput
from kvplugin.scheduler.planner import Planner
from kvplugin.scheduler.recovery import Recovery
from kvplugin.scheduler.roster import Roster
from kvplugin.scheduler.step import StepPlan
from kvplugin.stats import PrefixCacheStats


class Scheduler:
    """The step loop over a KVCacheManager and, if there is one, a connector.

    Args:
        manager: the KV cache.
        config: settings.
        connector: brings and takes KV; its scheduler half.
        num_ranks: worker halves of the connector.
        loads_synchronously: external tokens are there when the step computes, as far
            as anybody knows before; failures come as `ModelOutput.invalid_block_ids`.
        clock: seconds, for deadlines.
        hooks: the plugins to ask; the manager's if None.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        config: SchedulerConfig,
        *,
        connector: SchedulerHalf | None = None,
        num_ranks: int = 1,
        loads_synchronously: bool = False,
        clock: Callable[[], float] = time.monotonic,
        hooks: Hooks | None = None,
    ) -> None:
        self.kv_cache_manager = manager
        self.config = config
        self.connector = connector
        self._holds = Holds(manager.block_pool)
        self._loads = Loads(self._holds, num_ranks, config.load_timeout_s, clock)
        self._roster = Roster(manager, config, connector, self._holds, self._loads)
        asked = manager.hooks if hooks is None else hooks
        self._planner = Planner(self._roster, asked, loads_synchronously)
        self._recovery = Recovery(self._roster)
        self._in_flight: deque[tuple[int, list[Entry]]] = deque()
        self._step = 0
        if connector is not None:
            connector.bind_blocks(EngineReferences(manager.block_pool))

    # -- requests come and go ------------------------------------------------------

    @property
    def requests(self) -> dict[str, Entry]:
        """Requests that have not ended, by id."""
        return self._roster.requests

    def add_request(
        self,
        request: Request,
        max_tokens: int,
        *,
        stop_token_ids: Collection[int] = (),
        num_encoder_tokens: int = 0,
    ) -> None:
        """A request arrives.

        Args:
            request: not known yet.
            max_tokens: tokens to generate at most.
            stop_token_ids: tokens that end it.
            num_encoder_tokens: of its encoder input, for cross-attention.

        Raises:
            RequestError: its id is in use, or it can never be served.
        """
        entry = Entry(
            request, max_tokens, frozenset(stop_token_ids), num_encoder_tokens
        )
        if entry.id in self.requests or entry.id in self._loads:
            raise RequestError(f"request id {entry.id!r} is in use")
        self._refuse_what_never_fits(entry)
        self._roster.add(entry)

    def _refuse_what_never_fits(self, entry: Entry) -> None:
        request, manager = entry.request, self.kv_cache_manager
        length = request.num_tokens + entry.max_tokens
        if entry.max_tokens < 1 or length > manager.max_model_len:
            raise RequestError(
                f"request {entry.id!r} has {request.num_tokens} tokens and asks for "
                f"{entry.max_tokens}: it must ask for at least one, and together they "
                f"must be at most max_model_len={manager.max_model_len}"
            )
        # The last token is not computed: its slot counts among those for drafts.
        lookahead = max(self.config.num_lookahead_tokens - 1, 0)
        needed = manager.coordinator.get_num_blocks_to_allocate(
            entry.id,
            min(length + lookahead, manager.max_model_len),
            manager.empty_kv_cache_blocks.ids,
            entry.num_encoder_tokens,
            0,
            length,
            whole_request=True,
        )
        usable = manager.block_pool.num_usable_blocks
        if needed > usable:
            raise RequestError(
                f"request {entry.id!r} needs {needed} blocks for {length} tokens, the "
                f"pool has {usable}: shorten it, or give the cache more memory"
            )

    def abort_request(self, request_id: str) -> None:
        """Nobody wants the request any more; an unknown one is fine."""
        entry = self.requests.get(request_id)
        if entry is not None:
            self._roster.finish(entry, "abort")

    def has_work(self) -> bool:
        """Whether further steps are needed: requests, transfers, steps in flight, or
        news that workers and users have not heard."""
        return bool(
            self.requests
            or self._in_flight
            or len(self._loads)
            or len(self._holds)
            or self._roster.finished
            or self._roster.news
            or (self.connector is not None and self.connector.has_pending_work())
        )

    # -- a step is decided ---------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """The next step; empty if nothing can be computed now.

        Raises:
            IntegrityError: more steps in flight than `pipeline_depth` allows.
        """
        if len(self._in_flight) >= self.config.pipeline_depth:
            raise IntegrityError(
                f"{len(self._in_flight)} steps are in flight: pass the oldest one's "
                f"output to update_from_output first"
            )
        self._step += 1
        self.kv_cache_manager.new_step_starts()
        for entry in self._loads.overdue():
            self._recovery.load_is_overdue(entry)
        step = StepPlan(self._step, self.config.max_num_batched_tokens)
        self._planner.fill(step)
        output = self._describe(step)
        for share in step.shares.values():
            share.entry.take_off(step.number, share.num_tokens, len(share.drafts))
        entries = [share.entry for share in step.shares.values()]
        self._in_flight.append((step.number, entries))
        return output

    def _describe(self, step: StepPlan) -> SchedulerOutput:
        """The step in the workers' words."""
        roster, manager = self._roster, self.kv_cache_manager
        shares = step.shares
        rows = {
            id_: manager.get_block_ids(id_) for id_, s in shares.items() if s.admitted
        }
        to_zero = manager.take_new_block_ids()
        if step.took_back:
            to_zero = roster.in_use(to_zero)
        common: list[int] = []
        if roster.running:
            common = manager.get_num_common_prefix_blocks(roster.running[0].id)
        preempted, roster.preempted = roster.preempted, set()
        finished, roster.finished = roster.finished, set()
        plan = b""
        if self.connector is not None:
            progress = step.progress(self.connector.watched)
            num_tokens = sum(share.num_tokens for share in shares.values())
            plan = self.connector.plan_step(Step(progress, preempted, num_tokens))
        return SchedulerOutput(
            step=step.number,
            scheduled_new_reqs=step.new_requests(rows),
            scheduled_cached_reqs=step.known_requests(rows),
            num_scheduled_tokens={id_: s.num_tokens for id_, s in shares.items()},
            scheduled_spec_decode_tokens={
                id_: s.drafts for id_, s in shares.items() if s.drafts
            },
            num_common_prefix_blocks=common,
            new_block_ids_to_zero=to_zero,
            preempted_req_ids=frozenset(preempted),
            finished_req_ids=frozenset(finished),
            connector_plan=plan,
        )

    # -- a step has ended ----------------------------------------------------------

    def update_from_output(self, output: ModelOutput) -> list[RequestOutput]:
        """Take in what came of the oldest step in flight.

        Returns:
            News for the requests' users, of requests that ended meanwhile too.

        Raises:
            IntegrityError: it is another step's output.
        """
        oldest = self._in_flight[0][0] if self._in_flight else None
        if output.step != oldest:
            raise IntegrityError(
                f"the output of step {output.step} comes, in flight is step {oldest}"
            )
        if output.invalid_block_ids:
            in_flight = [entry for _, entries in self._in_flight for entry in entries]
            self._recovery.distrust(output.invalid_block_ids, in_flight)
        _, entries = self._in_flight.popleft()
        for entry in entries:
            self._take_sample(entry, output)
        self._holds.release(("step", output.step))
        self._hear_connector(output.outcomes)
        news, self._roster.news = self._roster.news, []
        return news

    def _take_sample(self, entry: Entry, output: ModelOutput) -> None:
        part = entry.land()
        if entry.status is Status.FINISHED or part.step <= entry.discard_until:
            return
        if not part.samples:
            return
        request = entry.request
        tokens = list(output.sampled_token_ids.get(entry.id, ()))
        # Of the drafts those are right that came out again.
        request.num_computed_tokens -= part.drafts - max(len(tokens) - 1, 0)
        entry.drafts = list(output.draft_token_ids.get(entry.id, ()))
        tokens, reason = _until_end(entry, tokens)
        request.append_output_token_ids(tokens)
        if reason is None:
            news = RequestOutput(entry.id, tokens, None, entry.num_cached_tokens)
            self._roster.news.append(news)
        else:
            self._roster.finish(entry, reason, tokens)

    def _hear_connector(self, outcomes: Iterable[WorkerOutcome]) -> None:
        if self.connector is None:
            return
        outcomes = list(outcomes)
        failed = [blocks for o in outcomes for blocks in o.failed_loads.values()]
        if failed:
            self.connector.distrust({block for blocks in failed for block in blocks})
        self.connector.apply([o.report for o in outcomes if o.report])
        for rank, outcome in enumerate(outcomes):
            for request_id in outcome.finished_loads:
                blocks = outcome.failed_loads.get(request_id, ())
                load = self._loads.reported(rank, request_id, blocks)
                if load is not None:
                    self._recovery.load_ended(load)
            for request_id in outcome.finished_sends:
                self._holds.release(("send", request_id))

    # -- questions and orders ------------------------------------------------------

    def reset_prefix_cache(
        self, *, reset_running: bool = False, weight_epoch: int | None = None
    ) -> bool:
        """Forget all cached KV, the connector's too.

        Args:
            reset_running: let requests that hold blocks begin anew.
            weight_epoch: the weights have changed: all requests begin anew, and what
                they compute is hashed under this epoch.

        Returns:
            False while something holds blocks or the connector still loads: call
            again after the next step.
        """
        roster = self._roster
        if reset_running or weight_epoch is not None:
            for entry in [*reversed(roster.running), *roster.loaded]:
                roster.preempt(entry)
        if weight_epoch is not None:
            for entry in list(roster.loading):  # bytes of the old weights
                self._loads.abandon(entry)
                roster.wait_again(entry)
            for entry in self.requests.values():
                entry.request.begin_weight_epoch(weight_epoch)
        local = self.kv_cache_manager.reset_prefix_cache()
        return local and (self.connector is None or self.connector.reset())

    def take_events(self) -> list[KVCacheEvent]:
        """KV events of the cache and of the connector since the last call."""
        events = self.kv_cache_manager.take_events()
        if self.connector is not None:
            events = [*events, *self.connector.take_events()]
        return events

    def make_connector_prefix_cache_stats(self) -> PrefixCacheStats:
        """Tokens asked of the connector and brought by it, since the last call."""
        roster = self._roster
        stats, roster.external_stats = roster.external_stats, PrefixCacheStats()
        return stats

    def state(self) -> dict[str, Any]:
        """Where everything stands. Of two equal states with work left, the second has
        made no progress."""
        roster = self._roster
        return {
            "waiting": [entry.id for entry in roster.waiting],
            "loading": [entry.id for entry in roster.loading],
            "loaded": [entry.id for entry in roster.loaded],
            "running": [entry.id for entry in roster.running],
            "computes": [e.id for e in self.requests.values() if e.skips_external],
            "tokens": {
                id_: (entry.request.num_tokens, entry.request.num_computed_tokens)
                for id_, entry in self.requests.items()
            },
            "free": self.kv_cache_manager.block_pool.get_num_free_blocks(),
            "held": sorted(self._holds.blocks),
            "in_flight": [number for number, _ in self._in_flight],
        }

    def check(self, pinned: Iterable[int] = ()) -> None:
        """Verify the cache, the queues, and that every reference is known.

        Args:
            pinned: blocks that a connector references, one entry a reference.

        Raises:
            IntegrityError: naming the invariant that does not hold.
        """
        self.kv_cache_manager.check([*self._holds.blocks, *pinned])
        self._roster.check()


def _until_end(entry: Entry, tokens: list[int]) -> tuple[list[int], str | None]:
    """The tokens that count, and why there are no more."""
    left = entry.max_tokens - entry.request.num_output_tokens
    for i, token in enumerate(tokens[:left]):
        if token in entry.stop_token_ids:
            return tokens[: i + 1], "stop"
    return tokens[:left], "length" if len(tokens) >= left else None
