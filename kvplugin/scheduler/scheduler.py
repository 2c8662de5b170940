"""Scheduler: who computes what in the next step, and what became of the last one.

    add_request ──> schedule() ──> SchedulerOutput ──> the workers
                       ▲                                   │
    RequestOutput <── update_from_output(ModelOutput) <────┘

A step serves, in this order and while its token budget lasts: requests that run (if
blocks run out, the one that came last gives up its own), requests whose external tokens
have arrived, and waiting ones. Whoever needs blocks that are not there ends the step's
admissions: nobody overtakes (docs/scheduler.md, "Who goes first").

With `pipeline_depth=2` a step is scheduled before the last one's output is known. A
block that such a step may still write is not handed out (`holds.py`), windows give back
only what is settled, and the output of a step that a request did not survive is
discarded.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

from kvplugin.choices import Choices
from kvplugin.contract import SchedulerHalf
from kvplugin.errors import ConfigError, IntegrityError, check_count
from kvplugin.events import KVCacheEvent
from kvplugin.hooks import Hooks
from kvplugin.manager import KVCacheManager
from kvplugin.references import EngineReferences
from kvplugin.request import Request, RequestError
from kvplugin.scheduler.answers import check_answer, until_end
from kvplugin.scheduler.arrivals import check_arrival
from kvplugin.scheduler.config import SchedulerConfig
from kvplugin.scheduler.describe import describe
from kvplugin.scheduler.entry import Entry
from kvplugin.scheduler.output import ModelOutput, RequestOutput, SchedulerOutput
from kvplugin.scheduler.planner import Planner
from kvplugin.scheduler.recovery import Recovery
from kvplugin.scheduler.reports import hear
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
        clock: seconds, for deadlines and for how long blocks are worth keeping.
        hooks: the plugins to ask; the manager's if None.

    Raises:
        ConfigError: no rank, or steps that are too small for the model's states.
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
        check_count("num_ranks", num_ranks, 1)
        self.kv_cache_manager = manager
        self.config = config
        self.connector = connector
        roster = self._roster = Roster(manager, config, connector, num_ranks, clock)
        choices = Choices(hooks or manager.hooks, manager, config.policy)
        self._planner = Planner(roster, choices, loads_synchronously)
        self._clock = clock
        self._recovery = Recovery(roster)
        self._num_outcomes = 0 if connector is None else num_ranks
        self._weight_epoch = 0
        self._in_flight: deque[tuple[int, list[Entry]]] = deque()
        self._step = 0
        self.references = EngineReferences(manager.block_pool)
        """Of the connector."""
        if connector is not None:
            connector.bind_blocks(self.references)

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
            request: a new one. A connector may have the end of its prompt left away
                (`MeetsPeers.arrived`). It is brought to the last weight epoch that
                `reset_prefix_cache` was told; its hints count from now on, unless it
                has a `block_context` already.
            max_tokens: tokens to generate at most, 1 or more.
            stop_token_ids: tokens that end it.
            num_encoder_tokens: of its encoder input, for cross-attention.

        Raises:
            RequestError: its id is in use, or still names a transfer; or it can never
                be served.
            ConfigError: its hash format knows no epochs, and the weights have changed.
        """
        stops = frozenset(stop_token_ids)
        entry = Entry(request, max_tokens, stops, num_encoder_tokens)
        roster, id_ = self._roster, entry.id
        if id_ in roster.requests or id_ in roster.loads or id_ in roster.sends:
            raise RequestError(f"request id {entry.id!r} is in use")
        check_arrival(entry, self.kv_cache_manager, self.config.num_lookahead_tokens)
        if request.weight_epoch != self._weight_epoch:
            request.begin_weight_epoch(self._weight_epoch)
        request.take_hints(self._clock())
        request.leave_away(roster.answers.arrived(request))
        roster.add(entry)

    def abort_request(self, request_id: str) -> None:
        """Nobody wants the request any more; an unknown one is fine."""
        entry = self.requests.get(request_id)
        if entry is not None:
            self._roster.finish(entry, "abort")

    def has_work(self) -> bool:
        """Whether further steps are needed: requests, transfers, steps in flight, or
        news that workers and users have not heard."""
        roster, connector = self._roster, self.connector
        under_way = self._in_flight or len(roster.loads) or len(roster.holds)
        return bool(
            (self.requests or under_way or roster.finished or roster.news)
            or (connector is not None and connector.has_pending_work())
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
        for entry in self._roster.loads.overdue():
            self._recovery.load_is_overdue(entry)
        pool = self.kv_cache_manager.block_pool
        self._roster.demand.tell(pool, self._clock())
        step = StepPlan(self._step, self.config.max_num_batched_tokens)
        self._planner.fill(step)
        output = describe(step, self._roster)
        for share in step.shares.values():
            share.entry.take_off(step.number, share.num_tokens, len(share.drafts))
        entries = [share.entry for share in step.shares.values()]
        self._in_flight.append((step.number, entries))
        return output

    # -- a step has ended ----------------------------------------------------------

    def update_from_output(self, output: ModelOutput) -> list[RequestOutput]:
        """Take in what came of the oldest step in flight.

        Returns:
            News for the requests' users, of requests that ended meanwhile too.

        Raises:
            IntegrityError: it is another step's output, or says what cannot be;
                nothing has changed.
        """
        oldest, entries = self._in_flight[0] if self._in_flight else (None, [])
        if output.step != oldest:
            raise IntegrityError(
                f"the output of step {output.step} comes, in flight is step {oldest}"
            )
        num_blocks = self.kv_cache_manager.block_pool.num_blocks
        check_answer(output, entries, self._num_outcomes, num_blocks)
        if output.invalid_block_ids:
            in_flight = [entry for _, others in self._in_flight for entry in others]
            self._recovery.distrust(output.invalid_block_ids, in_flight)
        self._in_flight.popleft()
        for entry in entries:
            self._take_sample(entry, output)
        self._roster.holds.release(("step", output.step))
        hear(output.outcomes, self._roster, self._recovery)
        news, self._roster.news = self._roster.news, []
        return news

    def _take_sample(self, entry: Entry, output: ModelOutput) -> None:
        counts, part = entry.oldest_counts, entry.land()
        if not (counts and part.samples):
            return
        request = entry.request
        tokens = list(output.sampled_token_ids.get(entry.id, ()))
        # Of the drafts those are right that came out again.
        request.num_computed_tokens -= part.drafts - max(len(tokens) - 1, 0)
        entry.drafts = list(output.draft_token_ids.get(entry.id, ()))
        tokens, reason = until_end(entry, tokens)
        request.append_output_token_ids(tokens)
        if reason is None:
            news = RequestOutput(entry.id, tokens, None, entry.num_cached_tokens)
            self._roster.news.append(news)
        else:
            self._roster.finish(entry, reason, tokens)

    # -- questions and orders ------------------------------------------------------

    def reset_prefix_cache(
        self, *, reset_running: bool = False, weight_epoch: int | None = None
    ) -> bool:
        """Forget all cached KV, the connector's too.

        Args:
            reset_running: let requests that hold blocks begin anew.
            weight_epoch: the weights have changed: all requests begin anew, and what
                they and later ones compute is hashed under this epoch.

        Returns:
            False while something holds blocks or the connector still loads: call
            again after the next step, without `weight_epoch`.

        Raises:
            ConfigError: the epoch is no integer above the last one (0 at first), or a
                request's hash format knows none; nothing has changed.
        """
        roster = self._roster
        if weight_epoch is not None:
            self._begin_weight_epoch(weight_epoch)
        if reset_running or weight_epoch is not None:
            for entry in [*reversed(roster.running), *roster.loaded]:
                roster.preempt(entry)
        if weight_epoch is not None:
            for entry in list(roster.loading):  # bytes of the old weights
                self._roster.loads.abandon(entry)
                roster.wait_again(entry)
        local = self.kv_cache_manager.reset_prefix_cache()
        remote = self.connector is None or self.connector.reset()
        return local and remote

    def _begin_weight_epoch(self, epoch: int) -> None:
        """All requests, or none."""
        last = self._weight_epoch
        check_count("weight_epoch", epoch, last + 1)
        requests = [entry.request for entry in self.requests.values()]
        try:
            for request in requests:
                request.begin_weight_epoch(epoch)
        except ConfigError:
            for request in requests:
                request.begin_weight_epoch(last)
            raise
        self._weight_epoch = epoch
        self._roster.demand.renew(requests)

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
        """Where everything stands, without numbers that only count. Of two equal states
        with work left, the second has made no progress."""
        places, in_flight = self._roster.places, self._in_flight
        return {
            **{str(status): [e.id for e in place] for status, place in places.items()},
            "requests": [
                (e.id, e.request.num_tokens, e.request.num_computed_tokens)
                for e in self.requests.values()
            ],
            "computes": [e.id for e in self.requests.values() if e.skips_external],
            "free": self.kv_cache_manager.block_pool.get_num_free_blocks(),
            "held": sorted(self._roster.holds.blocks),
            "in_flight": [[entry.id for entry in entries] for _, entries in in_flight],
        }

    def check(self, pinned: Iterable[int] = ()) -> None:
        """Verify the cache, the queues, and that every reference is known.

        Args:
            pinned: blocks that a connector references, one entry a reference.

        Raises:
            IntegrityError: naming the invariant that does not hold.
        """
        self.kv_cache_manager.check([*self._roster.holds.blocks, *pinned])
        self._roster.check()
