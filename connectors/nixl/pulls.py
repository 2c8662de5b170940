"""The reading side of the scheduler half: who may read what, and what came of it.

A request that names another engine's lease has one `Pull`: its peer describes itself,
grants the lease, the engine gives blocks, the read is ordered, and all ranks report it.
Whatever goes wrong on the way, the request is computed, and the lease is given back.
There is one read a request: after it, well or not, nothing is offered any more.
"""

import logging
import secrets
from collections.abc import Callable, Iterable, Sequence

from kvplugin.connectors.metrics import Counters
from kvplugin.connectors.nixl.boundary import Boundaries
from kvplugin.connectors.nixl.channel import Channel
from kvplugin.connectors.nixl.config import NixlConfig
from kvplugin.connectors.nixl.messages import GroupRead, ReadOrder, Report
from kvplugin.connectors.nixl.openings import Openings
from kvplugin.connectors.nixl.params import ReadFrom
from kvplugin.connectors.nixl.peers import Peers
from kvplugin.connectors.nixl.questions import Questions
from kvplugin.connectors.nixl.reads_under_way import Read, ReadsUnderWay
from kvplugin.connectors.nixl.requests import Phase, Pull
from kvplugin.contract import (
    LATER,
    MISS,
    EngineBlocks,
    EngineInfo,
    Lookup,
    PeerRequestView,
    RequestView,
)
from kvplugin.errors import IntegrityError, TransferError

logger = logging.getLogger("vllm.kvplugin.nixl")


class Pulls:
    """All requests that read, and all reads.

    Args:
        engine: which reads.
        config: of its connector.
        boundaries: of the engine.
        peers: the others.
        questions: to them.
        channel: that carries these, and keeps leases.
        counters: of the connector.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        engine: EngineInfo,
        config: NixlConfig,
        boundaries: Boundaries,
        peers: Peers,
        questions: Questions,
        channel: Channel,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self.blocks: EngineBlocks | None = None
        """Nothing is offered before the engine has handed them over."""
        self.reads = ReadsUnderWay(engine.world_size, clock, config.transfer_timeout_s)
        self._most_overdue = config.max_overdue_fraction * engine.num_blocks
        self._config = config
        self._boundaries = boundaries
        self._peers = peers
        self._channel = channel
        self._counters = counters
        self._clock = clock
        self._pulls: dict[str, Pull] = {}
        self._openings = Openings(
            peers, questions, channel, config.handshake_timeout_s, self._miss, clock
        )
        self._orders: list[ReadOrder] = []
        self._step_may_wait = config.grant_wait_ms / 1e3
        """Seconds that are left to the lookups of this step."""
        self._unsound: dict[str, Pull] = {}
        self._name = secrets.token_hex(8)
        self._num_readers = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pulls

    def __len__(self) -> int:
        """Requests that are known."""
        return len(self._pulls)

    # -- a request's way in --------------------------------------------------------

    def begin(self, request: PeerRequestView, source: ReadFrom) -> None:
        """A request has come that another engine has prefilled."""
        now = self._clock()
        deadline = now + self._config.handshake_timeout_s
        pull = Pull(request, source, self._new_reader(), now, deadline)
        self._pulls[request.request_id] = pull
        self._openings.begin(pull)

    def give_back(self, source: ReadFrom) -> None:
        """A request has ended before anything else was known of it."""
        self._channel.drop(source.address, source.lease, self._new_reader())

    def _new_reader(self) -> str:
        self._num_readers += 1
        return f"{self._name}-{self._num_readers}"

    def hear(self) -> None:
        """Take in what other engines have answered."""
        self._openings.hear()

    def lookup(self, request: RequestView, local: int) -> Lookup:
        """See `kvplugin.contract.SchedulerHalf.lookup`."""
        pull = self._pulls.get(request.request_id)
        if pull is None:
            return MISS
        self._openings.advance(pull)
        if pull.grant is not None and not self._can_read(pull):
            self._miss(pull, "its peer is dead, or another one by now")
        if pull.waits:
            self._wait(pull)
        if pull.waits:
            if self._clock() < pull.deadline:
                return LATER
            self._openings.expire(pull)
        tokens = self._tokens(pull, request, local)
        if not tokens:
            return MISS
        pull.asked_at = local
        return Lookup(tokens)

    def _wait(self, pull: Pull) -> None:
        """A peer answers within less than a step takes: wait for it a little, once a
        request and `grant_wait_ms` a step, or the next step is the first to know."""
        if pull.has_held_a_step or self._step_may_wait <= 0:
            return
        pull.has_held_a_step = True
        began = self._clock()
        self._openings.wait_for(pull, self._step_may_wait)
        self._step_may_wait -= self._clock() - began

    def _can_read(self, pull: Pull) -> bool:
        """Whether worker halves know whom to read."""
        return pull.peer is not None and self._peers.knows(pull.peer)

    def _tokens(self, pull: Pull, request: RequestView, local: int) -> int:
        """Tokens that it can read beyond a local hit, if it is worth it."""
        too_many = self.reads.overdue_blocks > self._most_overdue
        if pull.grant is None or too_many or self.blocks is None:
            return 0
        question = local, request.num_tokens
        if pull.answer is None or pull.answer[0] != question:
            end = self._boundaries.largest(
                pull.grant, pull.agreed, local, request.num_tokens - 1
            )
            pull.answer = question, end
        tokens = pull.answer[1] - local
        least = self._config.min_load_tokens
        if pull.source.from_decoder:
            least = max(self._config.kv_recompute_threshold, 1)
        return tokens if tokens >= least else 0

    # -- a read --------------------------------------------------------------------

    def allocated(
        self, request: RequestView, rows: Sequence[Sequence[int]], num_tokens: int
    ) -> None:
        """See `kvplugin.contract.SchedulerHalf.allocated`."""
        pull = self._pulls.get(request.request_id)
        if num_tokens:
            self._order(request, pull, rows, num_tokens)
        elif pull is not None and pull.phase in (Phase.OPENING, Phase.GRANTED):
            self._over(pull)  # there is nothing that it needs
        elif pull is not None:
            self._goes_on(pull)

    def _goes_on(self, pull: Pull) -> None:
        """The request goes on after its read: its blocks have their hashes by now."""
        self._unsound.pop(pull.request.request_id, None)
        self._forget(pull.unsound)
        pull.unsound = []

    def _forget(self, block_ids: Sequence[int]) -> None:
        if block_ids and self.blocks is not None:
            self.blocks.forget(block_ids)

    def _order(
        self,
        request: RequestView,
        pull: Pull | None,
        rows: Sequence[Sequence[int]],
        num_tokens: int,
    ) -> None:
        if self.blocks is None:
            raise TransferError("the engine loads before it has handed over its blocks")
        local = None if pull is None else pull.asked_at
        if local is None:
            local = max(self._boundaries.row_tokens(rows) - num_tokens, 0)
        end = local + num_tokens
        try:
            read = self._begun(pull, rows, local, end)
        except TransferError as error:
            if pull is not None:
                self._over(pull)
            blocks = self._boundaries.to_fill(rows, local, end)
            read = self.reads.begin(
                request.request_id,
                [GroupRead(0, local, end, [], blocks)],
                pull=pull,
                refusal=str(error),
            )
        # From the start: at the deadline the engine may know of an end that has not
        # been reported here, and have given the blocks to somebody else.
        self.blocks.acquire(read.order.engine_ids)
        self._orders.append(read.order)

    def _begun(
        self, pull: Pull | None, rows: Sequence[Sequence[int]], local: int, end: int
    ) -> Read:
        if pull is None or pull.peer is None or pull.grant is None:
            raise TransferError("nothing was offered to this request")
        if not self._can_read(pull):
            raise TransferError("its peer is dead, or another one by now")
        cut = self._boundaries.cut(pull.grant, rows, local, end)
        pull.phase, pull.grant, pull.asked_at = Phase.ORDERED, None, None
        self._peers.begins(pull.peer)
        return self.reads.begin(
            pull.request.request_id,
            cut.parts,
            peer=pull.peer,
            pull=pull,
            generations=cut.generations,
            num_tokens=end - local,
            unsound=cut.unsound,
        )

    def take_orders(self) -> list[ReadOrder]:
        """Reads ordered since the last call: a step has been decided."""
        self._step_may_wait = self._config.grant_wait_ms / 1e3
        for pull in self._unsound.values():
            self._forget(pull.unsound)
        orders, self._orders = self._orders, []
        return orders

    @property
    def has_pending_work(self) -> bool:
        """Reads are under way that are not overdue."""
        return bool(self.reads.num_in_time)

    # -- what became of it ---------------------------------------------------------

    def give_up(self, plan: int) -> list[int]:
        """Act on deadlines that have passed: requests are told that their reads failed,
        while the blocks stay referenced until these really end.

        Args:
            plan: number of the plan that says so.

        Returns:
            Ids of reads that nobody waits for any more.
        """
        late = self.reads.pop_overdue()
        for read in late:
            read.given_up_by = plan
            self._counters.add("given_up_reads")
            self._failed(read, "it does not end (transfer_timeout_s)")
            if read.peer is not None and self.reads.is_silent(read):
                self._peers.died(read.peer, "a read from it does not end")
        if late:
            self._counters.set("overdue_blocks", self.reads.overdue_blocks)
        return [read.order.id for read in late]

    def apply(self, reports: Iterable[Report]) -> None:
        """Count completions over ranks."""
        for report in reports:
            for read in self.reads.ended(report):
                self._ended(read)

    def _ended(self, read: Read) -> None:
        """All ranks have reported it."""
        if self.blocks is not None:
            self.blocks.release(read.order.engine_ids[::-1])
        if read.peer is not None:
            # How one ends that was given up was our doing: `give_up` has judged.
            is_ours = read.discarded or read.given_up_by is not None
            self._peers.ended(read.peer, "" if is_ours else read.error)
        if read.given_up_by is not None:
            self._counters.set("overdue_blocks", self.reads.overdue_blocks)
        elif read.error or read.order.refusal:
            if read.discarded:
                self._counters.add("discarded_reads")
            self._failed(read, read.error or read.order.refusal)
        else:
            self._arrived(read)

    def _arrived(self, read: Read) -> None:
        self._counters.add("reads")
        self._counters.add("read_tokens", read.num_tokens)
        self._counters.add("read_bytes", read.nbytes)
        self._counters.observe("read_seconds", read.seconds)
        if read.seconds > 0:
            speed = read.nbytes / read.seconds / 1e9
            self._counters.observe("read_gigabytes_per_second", speed)
        pull = read.pull
        if pull is None:
            return
        is_awaited = pull.phase is Phase.ORDERED and self._knows(pull)
        self._over(pull)
        if is_awaited and read.unsound:
            pull.unsound = read.unsound
            self._unsound[pull.request.request_id] = pull

    def _knows(self, pull: Pull) -> bool:
        return self._pulls.get(pull.request.request_id) is pull

    def _failed(self, read: Read, why: str) -> None:
        self._counters.add("failed_reads")
        request_id = read.order.request_id
        logger.warning("a read failed for request %.128r: %s", request_id, why)
        if read.pull is not None:
            self._over(read.pull)

    def _miss(self, pull: Pull, why: str, *, tell: bool = True) -> None:
        """Nothing will be read for the request: it is computed."""
        self._counters.add("missed_reads")
        logger.debug("request %.128r is not read: %s", pull.request.request_id, why)
        pull.is_closed = pull.is_closed or not tell
        self._over(pull)

    def _over(self, pull: Pull) -> None:
        """The pull has ended: its lease is given back, once."""
        if pull.phase is not Phase.OVER:
            self._counters.observe("wait_seconds", self._clock() - pull.came)
            pull.phase = Phase.OVER
        self._openings.end(pull)
        pull.grant = None
        if not pull.is_closed:
            pull.is_closed = True
            source = pull.source
            self._channel.drop(source.address, source.lease, pull.reader)

    # -- the ends of requests ------------------------------------------------------

    def preempted(self, request_id: str) -> None:
        """The request has lost its blocks: it computes when it comes back."""
        pull = self._pulls.get(request_id)
        if pull is not None:
            self._leaves(pull)

    def finished(self, request_id: str) -> None:
        """The request has ended, in whatever phase."""
        pull = self._pulls.pop(request_id, None)
        if pull is not None:
            self._leaves(pull)

    def _leaves(self, pull: Pull) -> None:
        """Its blocks are not the request's any more; a read under way ends by itself,
        and keeps its lease until then."""
        self._unsound.pop(pull.request.request_id, None)
        pull.unsound = []
        if pull.phase is Phase.ORDERED:
            self._counters.observe("wait_seconds", self._clock() - pull.came)
            pull.phase = Phase.OVER
        elif pull.phase is not Phase.OVER:
            self._over(pull)

    def reset(self) -> bool:
        """Forget what was granted.

        Returns:
            False while a read is under way that may yet appear in the engine.
        """
        for pull in self._pulls.values():
            if pull.phase in (Phase.OPENING, Phase.GRANTED):
                self._miss(pull, "the engine's cache was reset")
        return not any(self.reads.awaited)

    def close(self) -> None:
        """Give every lease back."""
        for pull in self._pulls.values():
            self._over(pull)
        for read in self.reads:
            if read.pull is not None:
                self._over(read.pull)

    def check(self) -> None:
        """Verify that what is known of requests and of reads agrees.

        Raises:
            IntegrityError: it does not.
        """
        self.reads.check()
        ordered = {id(read.pull) for read in self.reads if read.pull is not None}
        for request_id, pull in self._pulls.items():
            if pull.request.request_id != request_id:
                raise IntegrityError(f"{request_id} is known under another name")
            if (pull.phase is Phase.ORDERED) and id(pull) not in ordered:
                raise IntegrityError(f"request {request_id} waits for no read")
            if (pull.phase is Phase.GRANTED) != (pull.grant is not None):
                raise IntegrityError(f"request {request_id} is {pull.phase}")
        if not self._unsound.keys() <= self._pulls.keys():
            raise IntegrityError("a forgotten request has unsound blocks")
