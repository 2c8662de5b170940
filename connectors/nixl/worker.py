"""The worker half of P/D: one rank's memory, and its reads from other engines."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

from kvplugin.connectors.load_book import LoadBook
from kvplugin.connectors.nixl.config import NixlConfig
from kvplugin.connectors.nixl.connection import Connection
from kvplugin.connectors.nixl.describe import decode_engine, encode_rank
from kvplugin.connectors.nixl.messages import (
    VERSION,
    Completion,
    Plan,
    ReadOrder,
    Report,
)
from kvplugin.connectors.nixl.peer_thread import IN_FLIGHT
from kvplugin.connectors.nixl.rank_memory import RankMemory
from kvplugin.connectors.nixl.read_thread import Reads, ReadThreads
from kvplugin.connectors.nixl.readers import MakeReaders, ReaderChoice
from kvplugin.contract import NOTHING_HAPPENED, EngineInfo, KVTensor, WorkerOutcome
from kvplugin.errors import IntegrityError
from kvplugin.wire import decode, encode

logger = logging.getLogger("vllm.kvplugin.nixl")

MakeReads: TypeAlias = Callable[[RankMemory, MakeReaders], Reads]


class NixlWorker:
    """Implements `kvplugin.contract.WorkerHalf` and `IntroducesItself`.

    Every order that a plan brings ends once: with what came of its read, or at once,
    as failed, where it names what there isn't.

    Args:
        engine: the engine, with this worker's rank.
        config: the connector's configuration.
        make_readers: what reads other ranks' memory, for tests; by default the
            kernel or NIXL (`ReaderChoice`).
        make_reads: what reads are done by, for tests; by default a thread a peer.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        engine: EngineInfo,
        config: NixlConfig,
        *,
        make_readers: MakeReaders | None = None,
        make_reads: MakeReads | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._config = config
        self._make_readers = make_readers
        self._make_reads = make_reads or self._threads
        self._clock = clock
        self._wait = config.read_wait_ms / 1e3
        self._memory: RankMemory | None = None
        self._reads: Reads | None = None
        self._peers: set[str] = set()
        self._loads: LoadBook[Completion] = LoadBook(
            can_fail=engine.reports_failed_loads, logger=logger
        )
        self._step = -1
        self._is_plan_unsaid = False
        self._sends: set[str] = set()
        self._wait_until = clock()
        """For reads, in this step."""
        self._is_closed = False

    # -- memory --------------------------------------------------------------------

    def register(self, tensors: Mapping[str, KVTensor]) -> None:
        """Make the rank's KV readable for others.

        Raises:
            ConfigError: NIXL is not installed, or has no such backend.
            LayoutMismatchError: a layer has no tensor, or one that is not laid out as
                its page promises.
            TransferError: NIXL does not register the memory.
        """
        self._memory = memory = RankMemory(self._engine, self._config, tensors)
        readers = self._make_readers or ReaderChoice(self._config, memory.agent)
        self._reads = self._make_reads(memory, readers)

    def _threads(self, memory: RankMemory, make_readers: MakeReaders) -> Reads:
        def connect(descriptor: bytes) -> Connection:
            peer = decode_engine(descriptor)
            return Connection(memory, peer, make_readers, IN_FLIGHT)

        return ReadThreads(connect, memory.staging, clock=self._clock)

    def introduction(self) -> bytes:
        """This rank's descriptor, encoded.

        Raises:
            IntegrityError: nothing is registered.
        """
        return encode_rank(self._registered.rank)

    @property
    def _registered(self) -> RankMemory:
        if self._memory is None:
            raise IntegrityError("the KV tensors were not registered before")
        return self._memory

    # -- a step --------------------------------------------------------------------

    def begin_step(self, plan: bytes) -> None:
        """Execute the plan: first the generations, so that no later step can use a
        block again which somebody still trusts; then the reads. A plan that comes
        again is not executed again.

        Raises:
            IntegrityError: the message is not a plan, or an impossible one.
        """
        self._wait_until = self._clock()
        if not plan:
            return
        message = decode(plan, Plan)
        if message.step <= self._step:
            logger.warning("plan %d came again and is ignored", message.step)
            return
        memory = self._registered
        memory.set_generations(message.generations)
        self._step = message.step
        if message.is_idle:
            self._wait_until += self._wait
        self._is_plan_unsaid = True
        self._sends.update(message.finished_sends)
        self._execute(memory, message)

    def _execute(self, memory: RankMemory, plan: Plan) -> None:
        for peer in plan.new_peers:
            if self._reads is not None and not self._is_closed:
                self._peers.add(peer.peer_id)
                self._reads.meet(peer.peer_id, peer.descriptor)
        for order in plan.reads:
            self._start(memory, order)
        self._loads.give_up(plan.given_up)
        if self._reads is not None:
            self._reads.stop(plan.given_up)
            for peer_id in plan.gone_peers:
                self._peers.discard(peer_id)
                self._reads.leave(peer_id)

    def _start(self, memory: RankMemory, order: ReadOrder) -> None:
        if order.id in self._loads:
            raise IntegrityError(f"order {order.id} is under way already")
        if self._reads is None or (why := self._refusal_of(order)):
            self._loads.refuse(order, Completion(order.id, why, 0, 0.0, False))
            return
        self._loads.begin(order)
        self._reads.submit(order, memory.staging.fence())

    def _refusal_of(self, order: ReadOrder) -> str:
        """Why an order cannot be done, as far as this rank knows; empty if it can."""
        if self._is_closed:
            return "the worker half is closed"
        if order.refusal:
            return order.refusal
        if order.peer_id not in self._peers:
            return f"peer {order.peer_id} is not known"
        ours = order.engine_ids
        if len(set(ours)) < len(ours):
            return "a block of ours is to be filled twice"
        for block in ours:
            if not 0 < block < self._engine.num_blocks:
                return (
                    f"block {block} is none that can be filled: this engine has blocks "
                    f"1 to {self._engine.num_blocks - 1}"
                )
        return ""

    def end_step(self) -> None:
        """Nothing: what a step wrote is read from where it is."""

    def poll(self) -> WorkerOutcome:
        """What ended. In a step that computes nothing it waits for reads under way,
        until `read_wait_ms` after the step's beginning; not at all while one that was
        given up hangs.

        Raises:
            TransferError: a read failed, and the engine cannot be told so.
        """
        if self._reads is not None and not self._loads.is_empty:
            for completion in self._reads.poll(self._patience()):
                self._loads.end(completion)
        news = self._loads.news()
        if not (news or self._is_plan_unsaid):
            return NOTHING_HAPPENED
        self._is_plan_unsaid = False
        sends, self._sends = frozenset(self._sends), set()
        ends = [] if news is None else list(news.ends)
        report = encode(Report(VERSION, self._engine.rank, self._step, ends))
        if news is None:
            return WorkerOutcome(finished_sends=sends, report=report)
        return WorkerOutcome(news.finished, news.failed, sends, report)

    def _patience(self) -> float:
        if self._loads.has_given_up:
            return 0.0
        return max(0.0, self._wait_until - self._clock())

    def drain(self) -> bytes:
        """Nothing to wait for: there are no stores, and the ends of reads are kept
        for `poll`, which alone may say so to the engine."""
        return b""

    def close(self) -> None:
        """Stop the reads and let NIXL forget the memory; if a read hangs, its memory
        stays registered. Again: does nothing more."""
        self._is_closed = True
        has_ended = self._reads is None or self._reads.close()
        if has_ended and self._memory is not None:
            self._memory.close()
