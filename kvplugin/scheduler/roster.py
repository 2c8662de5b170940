"""Roster: every request, where it stands, and how it gets from one place to another.

All that changes a request's status or gives its blocks away is a method here; who is to
be moved is decided elsewhere (`planner.py`, `recovery.py`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvplugin.block import NULL_BLOCK
from kvplugin.connector_answers import ConnectorAnswers
from kvplugin.contract import SchedulerHalf
from kvplugin.demand import Demand, HitKeys
from kvplugin.errors import IntegrityError
from kvplugin.manager import KVCacheManager
from kvplugin.managers import MambaManager
from kvplugin.scheduler.config import SchedulerConfig
from kvplugin.scheduler.entry import Entry, Lost, Status
from kvplugin.scheduler.holds import Holds
from kvplugin.scheduler.loads import Loads
from kvplugin.scheduler.output import RequestOutput
from kvplugin.scheduler.queues import make_queue
from kvplugin.scheduler.rows import Rows, blocks_from
from kvplugin.scheduler.sends import Sends
from kvplugin.scheduler.step import StepPlan
from kvplugin.stats import PrefixCacheStats


class Roster:
    """The requests of a scheduler.

    Args:
        manager: the KV cache.
        config: settings.
        connector: brings and takes KV, if there is one.
        num_ranks: of the connector.
        clock: seconds, for deadlines.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        config: SchedulerConfig,
        connector: SchedulerHalf | None,
        num_ranks: int,
        clock: Callable[[], float],
    ) -> None:
        self.manager = manager
        self.config = config
        self.connector = connector
        self.answers = ConnectorAnswers(connector)
        self.holds = Holds(manager.block_pool)
        self.loads = Loads(self.holds, num_ranks, config.load_timeout_s, clock)
        self.sends = Sends(self.holds, num_ranks)
        groups = manager.coordinator.single_type_managers
        self.block_sizes = [group.block_size for group in groups]
        self.demand = Demand(HitKeys(manager))
        self.requests: dict[str, Entry] = {}
        self.waiting = make_queue(config.policy)
        self.loaded = make_queue(config.policy)
        self.running: list[Entry] = []
        self.preempted: set[str] = set()
        """Requests that the workers know and that lost their blocks since the last
        step."""
        self.finished: set[str] = set()
        """Requests that the workers may forget."""
        self.news: list[RequestOutput] = []
        self.external_stats = PrefixCacheStats()
        """Of admissions: tokens asked of the connector, and those it brings."""

    def rows(self, entry: Entry) -> Rows:
        """Its block ids, a new list a group."""
        return self.manager.get_block_ids(entry.id)

    def in_use(self, blocks: Iterable[int]) -> list[int]:
        """Of these blocks, once each, those that a request has: not the free ones, nor
        those that are only held until a step or a transfer ends."""
        held, pool = Counter(self.holds.blocks), self.manager.block_pool
        return [b for b in dict.fromkeys(blocks) if pool.ref_count(b) > held[b]]

    @property
    def loading(self) -> Iterator[Entry]:
        """Requests that wait for their external tokens."""
        return (e for e in self.requests.values() if e.status is Status.LOADING)

    @property
    def places(self) -> dict[Status, Iterable[Entry]]:
        """Where requests are to be found, each in the order in which they go on."""
        return {
            Status.WAITING: self.waiting,
            Status.LOADING: self.loading,
            Status.LOADED: self.loaded,
            Status.RUNNING: self.running,
        }

    # -- forwards ------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        """A request arrives."""
        self.requests[entry.id] = entry
        self.waiting.add(entry)
        self.demand.add(entry.request)

    def park(self, entry: Entry) -> None:
        """A waiting request has blocks, and its external tokens are on their way."""
        self.waiting.remove(entry)
        self.demand.remove(entry.request)
        self.loads.start(entry, self.rows(entry))

    def load_is_in(self, entry: Entry) -> None:
        """The external tokens of a parked request have arrived."""
        entry.status = Status.LOADED
        self.loaded.add(entry)

    def run(self, entry: Entry) -> None:
        """A waiting or loaded request is scheduled."""
        queue = self.loaded if entry.status is Status.LOADED else self.waiting
        queue.remove(entry)
        self.demand.remove(entry.request)
        entry.status = Status.RUNNING
        self.running.append(entry)

    # -- back ----------------------------------------------------------------------

    def preempt(self, entry: Entry, step: StepPlan | None = None) -> None:
        """Take a request's blocks and let it wait for its next turn.

        Args:
            entry: runs, or is loaded.
            step: the step that is being decided, if one is.
        """
        if step is not None:
            self._withdraw(entry, step)
            step.closed = True
        self._leave(entry)
        self.wait_again(entry)
        entry.request.num_preemptions += 1
        if entry.seen_by_workers:
            self.preempted.add(entry.id)

    def wait_again(self, entry: Entry) -> None:
        """A request that is in no queue gives its blocks back and waits."""
        self._give_blocks_back(entry)
        entry.lose_progress()
        entry.status = Status.WAITING
        self.waiting.put_back(entry)
        self.demand.add(entry.request)

    def finish(self, entry: Entry, reason: str, tokens: Sequence[int] = ()) -> None:
        """End a request in whatever state it is.

        Args:
            entry: the request.
            reason: stop, length, abort or error.
            tokens: its last ones, not told yet.
        """
        params = self._hand_over(entry) if reason in ("stop", "length") else None
        if self.connector is not None and self.connector.finished(entry.request):
            self.sends.start(entry.id, self.rows(entry))
        if entry.status is Status.LOADING and entry.id in self.loads:
            self.loads.abandon(entry)
        self._leave(entry)
        self._give_blocks_back(entry)
        entry.status = Status.FINISHED
        del self.requests[entry.id]
        if entry.seen_by_workers:
            self.finished.add(entry.id)
        cached = max(entry.num_cached_tokens, 0)
        self.news.append(RequestOutput(entry.id, tokens, reason, cached, params))

    def _hand_over(self, entry: Entry) -> Mapping[str, Any] | None:
        """What the connector has to say to whoever goes on with a request that ends as
        it should. A state that steps in flight or drafts have moved on is not there."""
        rows, groups = self.rows(entry), self.manager.coordinator.single_type_managers
        if not entry.states_are_settled:
            for row, group in zip(rows, groups, strict=True):
                if isinstance(group, MambaManager):
                    row[:] = [NULL_BLOCK] * len(row)
        return self.answers.handover(entry.request, rows, entry.num_settled_tokens)

    def _leave(self, entry: Entry) -> None:
        """Out of the queue in which it is; parked requests are in none."""
        if entry.status is Status.RUNNING:
            self.running.remove(entry)
        elif entry.status is not Status.LOADING:
            queue = self.loaded if entry.status is Status.LOADED else self.waiting
            queue.remove(entry)
            self.demand.remove(entry.request)

    def _withdraw(self, entry: Entry, step: StepPlan) -> None:
        """Take back what the step has promised. New blocks may have keys already, for
        bytes that will now never be written."""
        share = step.withdraw(entry)
        if share is None:
            return
        first = share.num_computed_tokens
        promised = blocks_from(first, self.rows(entry), self.block_sizes)
        self.manager.evict_blocks(promised)

    def _give_blocks_back(self, entry: Entry) -> None:
        """Free a request's blocks, but not for reuse while a step in flight writes."""
        if entry.in_flight:
            last, rows = entry.in_flight[-1].step, self.rows(entry)
            entry.lost.append(Lost(last, rows, entry.external_blocks))
            self.holds.hold(("step", last), rows)
        self.manager.free(entry.request)

    def check(self) -> None:
        """Verify that every request is in the one place that its status says.

        Raises:
            IntegrityError: one is not.
        """
        found = [(e.id, status) for status, es in self.places.items() for e in es]
        told = [(e.id, e.status) for e in self.requests.values()]
        if sorted(found) != sorted(told):
            raise IntegrityError(f"requests {told} are found in {found}")
        for entry in self.waiting:
            if any(block != NULL_BLOCK for row in self.rows(entry) for block in row):
                raise IntegrityError(f"request {entry.id} waits and has blocks")
