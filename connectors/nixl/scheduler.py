"""The scheduler half of P/D: both sides of an engine behind one door.

`handovers.py` and `leases.py` give KV away, `peers.py` and `pulls.py` read that of
others; here they are wired to the engine and to the side channel.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, TypeAlias

from kvplugin.connectors.metrics import Counters
from kvplugin.connectors.nixl.address import check_exposure
from kvplugin.connectors.nixl.answers import EngineAnswers
from kvplugin.connectors.nixl.auth import load_secret
from kvplugin.connectors.nixl.boundary import Boundaries
from kvplugin.connectors.nixl.channel import Answers, Channel, Server
from kvplugin.connectors.nixl.client import ChannelClient
from kvplugin.connectors.nixl.config import NixlConfig, Role
from kvplugin.connectors.nixl.describe import (
    decode_rank,
    describe_engine,
    encode_engine,
)
from kvplugin.connectors.nixl.descriptor import EngineDescriptor
from kvplugin.connectors.nixl.grumble import Grumble
from kvplugin.connectors.nixl.handovers import Handovers
from kvplugin.connectors.nixl.leases import Leases
from kvplugin.connectors.nixl.messages import VERSION, Plan, Report
from kvplugin.connectors.nixl.metrics import METRICS
from kvplugin.connectors.nixl.param_fields import ParamsError
from kvplugin.connectors.nixl.params import ReadFrom, parse
from kvplugin.connectors.nixl.peers import News, Peers
from kvplugin.connectors.nixl.pulls import Pulls
from kvplugin.connectors.nixl.questions import Questions
from kvplugin.connectors.nixl.server import ChannelServer
from kvplugin.connectors.nixl.wire import Description, Health
from kvplugin.contract import (
    MISS,
    EngineBlocks,
    EngineInfo,
    Lookup,
    PeerRequestView,
    RequestView,
    Stats,
    Step,
)
from kvplugin.errors import ConfigError, IntegrityError, KVPluginError
from kvplugin.events import KVCacheEvent
from kvplugin.wire import decode, encode

logger = logging.getLogger("vllm.kvplugin.nixl")

MakeChannel: TypeAlias = Callable[[NixlConfig, Callable[[], float]], Channel]
MakeServer: TypeAlias = Callable[[NixlConfig, Answers], Server]

_UNBOUND: Final = (
    "nothing is read: the engine has not handed over its block pool, without which "
    "blocks cannot be kept until a late read has ended (vLLM 0.19 does not hand it to "
    "a connector inside a MultiConnector: use this one alone, or a newer vLLM)"
)


def make_client(config: NixlConfig, clock: Callable[[], float]) -> Channel:
    """The side channel's asking side."""
    return ChannelClient(
        secret=load_secret(config), insecure=config.insecure, clock=clock
    )


def make_listener(config: NixlConfig, answers: Answers) -> Server:
    """The side channel's answering side.

    Raises:
        ConfigError: the port is taken.
    """
    return ChannelServer(
        config.side_channel_host,
        config.side_channel_port,
        answers,
        secret=load_secret(config),
        advertise_host=config.advertise_host,
        insecure=config.insecure,
    )


class NixlScheduler:
    """Implements `kvplugin.contract.SchedulerHalf` and `MeetsPeers`.

    Args:
        engine: the engine.
        config: the connector's configuration.
        role: what it is to others.
        make_channel: makes what asks others.
        make_server: makes what answers them.
        clock: monotonic seconds.

    Raises:
        ConfigError: the model has KV that no other engine can go on with, the engine
            cannot be told that a read failed, or the side channel would say too much.
    """

    def __init__(
        self,
        engine: EngineInfo,
        config: NixlConfig,
        role: Role,
        *,
        make_channel: MakeChannel = make_client,
        make_server: MakeServer = make_listener,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_exposure(config)
        load_secret(config)
        self._engine = engine
        self._config = config
        self._role = role
        self._make_channel = make_channel
        self._make_server = make_server
        self._clock = clock
        self._counters = Counters(METRICS)
        self._leases = Leases(engine.num_blocks, clock)
        self._handovers = Handovers(
            engine, config, role, self._leases, self._counters, clock
        )
        self._boundaries = Boundaries(engine)
        if self.reads and not engine.reports_failed_loads:
            raise ConfigError(
                "this engine cannot be told that a read failed, and would serve wrong "
                "text: use a newer vLLM, or the scheduler_cls "
                "kvplugin.integration.vllm.scheduler.KVPluginScheduler"
            )
        self._blocks: EngineBlocks | None = None
        self._arrived: set[str] = set()
        self._server: Server | None = None
        self._channel: Channel | None = None
        self._peers: Peers | None = None
        self._pulls: Pulls | None = None
        self._said: set[str] = set()
        self._nonsense = Grumble("kv_transfer_params make no sense", clock)
        self._step = 0
        self._is_closed = False

    @property
    def reads(self) -> bool:
        """Whether this engine ever reads from others."""
        return self._role is not Role.PRODUCER or self._config.bidirectional_kv_xfer

    @property
    def serves(self) -> bool:
        """Whether others may ever read from this engine."""
        return self._handovers.serves

    @property
    def watched(self) -> Collection[str]:
        """Nobody: nothing depends on how far a running request is."""
        return ()

    def bind_blocks(self, blocks: EngineBlocks) -> None:
        """References to the engine's blocks; before that, nothing is read."""
        self._blocks = blocks
        if self._pulls is not None:
            self._pulls.blocks = blocks

    # -- other engines -------------------------------------------------------------

    def meet(self, introductions: Mapping[int, bytes]) -> None:
        """Start to answer other engines, and to ask them.

        Raises:
            ConfigError: the side channel cannot listen.
            KVPluginError: the ranks do not make up an engine.
        """
        if not introductions or self._is_closed:
            return
        try:
            self._meet([decode_rank(data) for data in introductions.values()])
        except KVPluginError as error:
            if self._config.on_start_error == "fail":
                raise
            logger.error("kvplugin P/D is disabled, it did not start: %s", error)

    def _meet(self, ranks: list[Any]) -> None:
        descriptor = describe_engine(self._engine, self._config, ranks)
        self._start_answering(descriptor)
        if self.reads:
            self._start_reading(descriptor)

    def _start_answering(self, descriptor: EngineDescriptor) -> None:
        """An engine from which nothing is read can be asked how it is, if it can."""
        try:
            self._server = self._make_server(self._config, self._answers(descriptor))
        except ConfigError as error:
            if self.serves:
                raise
            logger.warning("nobody can ask this engine how it is: %s", error)
            return
        logger.info(
            "engine %s answers other engines at %s",
            self._engine.engine_id,
            self._server.address,
        )

    def _answers(self, descriptor: EngineDescriptor) -> EngineAnswers:
        return EngineAnswers(
            descriptor.peer_id,
            Description(descriptor=encode_engine(descriptor)),
            self._leases,
            self._health,
        )

    def _start_reading(self, descriptor: EngineDescriptor) -> None:
        self._channel = self._make_channel(self._config, self._clock)
        questions = Questions(self._channel)
        self._peers = Peers(
            descriptor, self._config, questions, self._counters, self._clock
        )
        self._pulls = Pulls(
            self._engine,
            self._config,
            self._boundaries,
            self._peers,
            questions,
            self._channel,
            self._counters,
            self._clock,
        )
        self._pulls.blocks = self._blocks

    def _health(self) -> Health:
        """On the server's thread: reads whole values only."""
        peers, pulls = self._peers, self._pulls
        return Health(
            engine_id=self._engine.engine_id,
            role=self._role.value,
            leases=len(self._leases),
            overdue_blocks=0 if pulls is None else pulls.reads.overdue_blocks,
            peers={} if peers is None else dict(peers.states),
        )

    # -- a request's way in --------------------------------------------------------

    def arrived(self, request: PeerRequestView) -> int:
        """Ask at once for what the request's client says another engine has of it."""
        self._arrive(request)
        return self._handovers.leave_away(request)

    def _arrive(self, request: PeerRequestView) -> None:
        """Once a request."""
        if request.request_id in self._arrived:
            return
        self._arrived.add(request.request_id)
        try:
            source = self._source(request)
        except ParamsError as error:
            self._counters.add("invalid_params")
            self._nonsense(f"request {request.request_id[:128]!r} is computed: {error}")
            return
        if source is not None and self._pulls is not None:
            if self._blocks is None:
                self._say(_UNBOUND)
            self._pulls.begin(request, source)
        elif source is not None:
            self._say("nothing is read: no worker has introduced itself")

    def _source(self, request: Any) -> ReadFrom | None:
        """What the request is to read, if this engine does that.

        Raises:
            ParamsError: its client's parameters make no sense.
        """
        source = parse(getattr(request, "kv_transfer_params", None)).read
        if source is None:
            return None
        if source.from_decoder:
            is_ours = self._config.bidirectional_kv_xfer
            is_ours = is_ours and self._role is not Role.CONSUMER
            what = "bidirectional_kv_xfer is off"
        else:
            is_ours = self._role is not Role.PRODUCER
            what = "it is a producer"
        if not is_ours:
            self._say(f"a client wants this engine to read from another: {what}")
            return None
        return source

    def _say(self, what: str) -> None:
        """Warn once."""
        if what not in self._said:
            self._said.add(what)
            logger.warning("kvplugin P/D: %s", what)

    def lookup(self, request: RequestView, num_local_tokens: int) -> Lookup:
        """Tokens that another engine has beyond the local hit; `LATER` until it has
        said so, for `handshake_timeout_s` at most."""
        self._arrive(request)  # type: ignore[arg-type]  # engines without `arrived`
        if self._pulls is None:
            return MISS
        self._pulls.hear()
        return self._pulls.lookup(request, num_local_tokens)

    def allocated(
        self,
        request: RequestView,
        block_ids: tuple[Sequence[int], ...],
        num_external_tokens: int,
    ) -> None:
        """The request has its row; order the read of its last external tokens."""
        if self._pulls is not None:
            self._pulls.allocated(request, block_ids, num_external_tokens)
        elif num_external_tokens:
            raise IntegrityError(
                f"request {request.request_id} is to load {num_external_tokens} tokens "
                "that nobody offered"
            )

    # -- a step --------------------------------------------------------------------

    def plan_step(self, step: Step) -> bytes:
        """Reads of requests admitted since the last plan, leases that are over, and
        whether there is nothing else to do than to wait for reads."""
        self._step += 1
        pulls, news, reads, given_up = self._pulls, News([], []), [], []
        if pulls is not None and self._peers is not None:
            pulls.hear()
            for request_id in step.preempted:
                pulls.preempted(request_id)
            given_up = pulls.give_up(self._step)
            reads = pulls.take_orders()
            news = self._peers.take_news()
        over = self._handovers.collect()
        is_idle = not step.num_tokens and pulls is not None and pulls.has_pending_work
        if not (
            reads or given_up or news.new or news.gone or over.request_ids or is_idle
        ):
            return b""
        return encode(
            Plan(
                VERSION,
                self._step,
                news.new,
                news.gone,
                reads,
                given_up,
                over.generations,
                over.request_ids,
                is_idle,
            )
        )

    def apply(self, reports: Iterable[bytes]) -> None:
        """Count completions over ranks; late and repeated ones are ignored."""
        decoded = [decode(data, Report) for data in reports]
        if self._pulls is not None:
            self._pulls.apply(decoded)

    def distrust(self, block_ids: AbstractSet[int]) -> None:
        """What was handed over of requests that have one of these blocks is not to be
        read."""
        self._leases.revoke(block_ids)

    # -- a request's end -----------------------------------------------------------

    def handover(
        self,
        request: PeerRequestView,
        block_ids: tuple[Sequence[int], ...],
        num_computed_tokens: int,
    ) -> Mapping[str, Any] | None:
        """Let others read the request's blocks, if its client wants that."""
        if not self.serves:
            return None
        if self._server is None:
            if getattr(request, "kv_transfer_params", None):
                self._say("nothing is handed over: no worker has introduced itself")
            return None
        return self._handovers.handover(request, block_ids, num_computed_tokens)

    def finished(self, request: RequestView) -> bool:
        """The request ended.

        Returns:
            True if its blocks are handed over: its end is announced when its lease is
            over.
        """
        known = request.request_id in self._arrived
        self._arrived.discard(request.request_id)
        if self._pulls is not None:
            if not known:
                self._give_back(self._pulls, request)
            self._pulls.finished(request.request_id)
        return self._handovers.finished(request)

    def _give_back(self, pulls: Pulls, request: RequestView) -> None:
        """It ended before it was ever looked at."""
        try:
            source = self._source(request)
        except ParamsError:
            return
        if source is not None:
            pulls.give_back(source)

    # -- all of it -----------------------------------------------------------------

    def reset(self) -> bool:
        """End all leases and all that was granted: who runs with other weights now must
        not be given what older ones made.

        Returns:
            False while a read is under way: its bytes, from before the reset, may still
            appear in the engine.
        """
        self._leases.revoke()
        return self._pulls is None or self._pulls.reset()

    def has_pending_work(self) -> bool:
        """Leases whose end is to be announced when it comes, or reads under way. One
        that is overdue is not waited for: the next step will do to notice its end."""
        reads = self._pulls is not None and self._pulls.has_pending_work
        return reads or self._leases.num_blocks > 0

    def has_pending_frees(self) -> bool:
        """How long others read is not known."""
        return False

    def take_events(self) -> list[KVCacheEvent]:
        """None: what is read is in the engine's own cache."""
        return []

    def take_stats(self) -> Stats | None:
        """Metrics that changed since the last call."""
        return self._counters.take()

    def check(self) -> None:
        """Verify the accounts.

        Raises:
            IntegrityError: an invariant does not hold.
        """
        self._leases.check()
        if self._pulls is not None:
            self._pulls.check()

    def close(self) -> None:
        """Give back what is being read, and be gone for others."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._pulls is not None:
            self._pulls.close()
        if self._channel is not None:
            self._channel.close()
        if self._server is not None:
            self._server.close()
