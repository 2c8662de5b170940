"""Two or more engines without vLLM, torch, sockets or time: real scheduler halves, a
side channel and worker halves that do what a test says, and an account of every block.

Each slot of an engine's memory holds what its KV depends on: all tokens up to it. A
read copies slots when the test says so, and verifies generations when the test says
so; what a request consumes is compared token by token.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvplugin import BlockPool
from kvplugin.connectors.nixl.channel import Answers, Server
from kvplugin.connectors.nixl.config import NixlConfig, Role
from kvplugin.connectors.nixl.describe import describe_rank, encode_rank
from kvplugin.connectors.nixl.scheduler import NixlScheduler
from kvplugin.contract import EngineInfo, GroupKind, KVTensor, Step, WorkerOutcome
from tests.nixl.lab_channel import (
    DEAD_TTL,
    LEASE,
    READ_TIMEOUT,
    TIMEOUT,
    Clock,
    FakeChannel,
    FakeServer,
    Network,
)
from tests.nixl.lab_ranks import FakeWorker, Memory
from tests.nixl.ranks import GroupSpec, RankSpec

__all__ = [
    "DEAD_TTL",
    "LEASE",
    "READ_TIMEOUT",
    "TIMEOUT",
    "Clock",
    "Engine",
    "FakeChannel",
    "Network",
    "PoolBlocks",
    "Request",
    "introduction",
    "pair",
    "spec",
]

# -- an engine -------------------------------------------------------------------------


@dataclass(eq=False)
class Request:
    """Implements `kvplugin.contract.PeerRequestView`."""

    request_id: str
    all_token_ids: list[int]
    kv_transfer_params: Mapping[str, Any] | None = None
    num_prompt_tokens: int = 0
    block_hashes: Sequence[bytes] = ()
    lora_request: Any = None
    cache_salt: str | None = None
    mm_features: Sequence[Any] = ()
    prompt_embeds: Any = None
    # the engine's own
    rows: list[list[int]] = field(default_factory=list)
    computed: int = 0
    first_later: float | None = None
    ranks_loading: set[int] = field(default_factory=set)
    has_failed: bool = False
    loaded: int = 0
    """Tokens that were read."""
    is_aborted: bool = False
    params: Mapping[str, Any] | None = None
    """Handed over."""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.all_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def content(self, token: int) -> int:
        """What a slot of this token holds."""
        return hash(tuple(self.all_token_ids[: token + 1]))


class PoolBlocks:
    """Implements `kvplugin.contract.EngineBlocks`."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.held: Counter[int] = Counter()
        self.forgotten: list[int] = []

    def acquire(self, ids: Sequence[int]) -> None:
        assert all(self._pool.ref_count(block) for block in ids), "not in use"
        self._pool.touch(ids)
        self.held.update(ids)

    def release(self, ids: Sequence[int]) -> None:
        assert self.held >= Counter(ids), "released without having been acquired"
        self.held -= Counter(ids)
        self._pool.free_blocks(ids)

    def forget(self, ids: Sequence[int]) -> None:
        self.forgotten += ids
        self._pool.evict_blocks(ids)


FULL = GroupSpec(block_size=4)


def spec(
    name: str, *sizes: int, window: int = 0, ranks: int = 1, **more: Any
) -> RankSpec:
    """An engine of one dense group, and one of a window if there are two sizes."""
    heads = 2 // ranks
    groups = [GroupSpec(block_size=sizes[0], heads=heads)]
    if len(sizes) > 1:
        kind = GroupKind.SLIDING_WINDOW
        groups.append(GroupSpec(kind, sizes[1], heads=heads, window=window))
    return RankSpec(name, tuple(groups), tp_size=ranks, **more)


def introduction(spec: RankSpec, incarnation: int) -> bytes:
    """Of a rank whose memory is nowhere."""
    tensors = {
        f"{i}.{j}": KVTensor(
            (i + 1) << 20,
            group.tensor(spec.num_blocks)[0],
            "cpu",
            group.tensor(spec.num_blocks)[1],
            f"toy {group.order}",
            group.heads * spec.tp_size,
        )
        for i, group in enumerate(spec.groups)
        for j in range(group.layers)
    }
    return encode_rank(describe_rank(spec.info(), tensors, 4096, incarnation, b""))


_incarnations = itertools.count(1001)


class Engine:
    """An engine with its scheduler half, and ranks that obey tests.

    Args:
        network: that it is on.
        spec: of each of its ranks.
        role: to others.
        port: of its side channel.
        settings: of the connector.
    """

    def __init__(
        self,
        network: Network,
        spec: RankSpec,
        role: Role = Role.BOTH,
        port: int = 5600,
        *,
        meets: bool = True,
        **settings: Any,
    ) -> None:
        self.waiting: list[Request] = []
        self.loading: dict[str, Request] = {}
        self.sending: dict[str, tuple[Request, set[int]]] = {}
        self.done: list[Request] = []
        self.network = network
        self.spec = spec
        self.address = f"127.0.0.1:{port}"
        self.channel = FakeChannel(network)
        defaults = {
            "handshake_timeout_s": TIMEOUT,
            "kv_lease_duration": LEASE,
            "transfer_timeout_s": READ_TIMEOUT,
            "dead_peer_ttl_s": DEAD_TTL,
        }
        config = NixlConfig(side_channel_port=port, **{**defaults, **settings})
        self.config = config
        self.info: EngineInfo = spec.info()
        self.half = NixlScheduler(
            self.info,
            config,
            role,
            clock=network.clock,
            **self.makers(),
        )
        self.pool = BlockPool(spec.num_blocks)
        self.blocks = PoolBlocks(self.pool)
        self.half.bind_blocks(self.blocks)
        sizes = [group.block_size for group in spec.groups]
        self.memory = Memory(sizes, spec.num_blocks)
        self.workers = [FakeWorker(self, rank) for rank in range(spec.tp_size)]
        self.incarnation = next(_incarnations)
        self.peer_id = f"{spec.engine_id}/{self.incarnation:x}"
        network.memories[self.peer_id] = self.memory
        if meets:
            self.meet()

    def makers(self) -> dict[str, Any]:
        """What makes the half's sides of the side channel."""
        return {
            "make_channel": lambda config, clock: self.channel,
            "make_server": self._serve,
        }

    def _serve(self, config: NixlConfig, answers: Answers) -> Server:
        self.network.servers[self.address] = answers
        return FakeServer(self.network, self.address)

    def meet(self) -> None:
        """The ranks introduce themselves."""
        self.half.meet(
            {
                rank: introduction(replace(self.spec, rank=rank), self.incarnation)
                for rank in range(self.spec.tp_size)
            }
        )

    # -- requests ------------------------------------------------------------------

    def add(
        self,
        name: str,
        tokens: Sequence[int],
        params: Mapping[str, Any] | None = None,
        *,
        says_arrived: bool = True,
    ) -> Request:
        request = Request(name, list(tokens), params)
        if says_arrived:
            assert self.half.arrived(request) == 0
        self.waiting.append(request)
        return request

    def prefill(self, name: str, tokens: Sequence[int]) -> Mapping[str, Any]:
        """Compute a prompt for others."""
        request = self.add(name, tokens, {"do_remote_decode": True})
        for _ in range(3):
            self.step()
            if request.params is not None:
                return request.params
        raise AssertionError("no parameters")

    def abort(self, request: Request) -> None:
        if request in self.waiting:
            self.waiting.remove(request)
            self.half.finished(request)
        elif request.request_id in self.loading:
            request.is_aborted = True
            assert not self.half.finished(request)

    # -- a step --------------------------------------------------------------------

    def step(self) -> None:
        """One scheduling step, with what the ranks have to say."""
        for request in list(self.waiting):
            self._schedule(request)
        plan = self.half.plan_step(Step())
        outcomes = []
        for worker in self.workers:
            worker.begin_step(plan)
            outcomes.append(worker.poll())
        self._hear(outcomes)
        self.check()

    def _schedule(self, request: Request) -> None:
        answer = self.half.lookup(request, 0)
        if not answer.ready:
            now = self.network.clock()
            request.first_later = request.first_later or now
            assert now - request.first_later < TIMEOUT, "it waits for ever"
            return
        end = answer.tokens or request.num_tokens
        assert end <= request.num_tokens - bool(answer.tokens)
        if not self._give(request, end):
            return
        self.waiting.remove(request)
        rows = tuple(list(row) for row in request.rows)
        self.half.allocated(request, rows, answer.tokens)
        if answer.tokens:
            request.ranks_loading = set(range(len(self.workers)))
            request.loaded = answer.tokens
            self.loading[request.request_id] = request
        else:
            self._compute(request)

    def _give(self, request: Request, end: int) -> bool:
        """A row for all tokens; null where nobody reads any more."""
        wanted = []
        for group in self.info.groups:
            size = group.block_size
            first = 0
            if group.kind is GroupKind.SLIDING_WINDOW:
                first = max(0, end - group.window + 1) // size
            wanted.append((first, -(-request.num_tokens // size)))
        missing = sum(last - first for first, last in wanted)
        if missing > self.pool.get_num_free_blocks():
            return False
        request.rows = []
        for index, (first, last) in enumerate(wanted):
            new = self.pool.get_new_blocks(last - first)
            for block in new:
                self.memory.slots.pop((index, block), None)
                for other in range(len(wanted)):
                    self.memory.slots.pop((other, block), None)
            request.rows.append([0] * first + list(new))
        return True

    def _compute(self, request: Request) -> None:
        """The rest of the prompt; then it ends."""
        self._consume(request, request.computed)
        for group, row in zip(self.info.groups, request.rows, strict=True):
            for token in range(request.computed, request.num_tokens):
                block = row[token // group.block_size]
                if block:
                    slots = self.memory.at(group.index, block)
                    slots[token % group.block_size] = request.content(token)
        request.computed = request.num_tokens
        self._finish(request)

    def _consume(self, request: Request, end: int) -> None:
        """The token behind reads what it needs: it must be there, and right."""
        for group, row in zip(self.info.groups, request.rows, strict=True):
            size, first = group.block_size, 0
            if group.kind is GroupKind.SLIDING_WINDOW:
                first = max(0, end - group.window + 1)
            for token in range(first, end):
                slot = self.memory.at(group.index, row[token // size])[token % size]
                assert slot == request.content(token), "wrong KV was consumed"

    def _finish(self, request: Request) -> None:
        rows = tuple(list(row) for row in request.rows)
        request.params = self.half.handover(request, rows, request.computed)
        if self.half.finished(request):
            ranks = set(range(len(self.workers)))
            self.sending[request.request_id] = request, ranks
        else:
            self._free(request)
        self.done.append(request)

    def _free(self, request: Request) -> None:
        for row in request.rows:
            self.pool.free_blocks([block for block in reversed(row) if block])
        request.rows = []

    def _hear(self, outcomes: Sequence[WorkerOutcome]) -> None:
        self.half.apply([o.report for o in outcomes if o.report])
        for rank, outcome in enumerate(outcomes):
            for name in outcome.finished_loads:
                request = self.loading[name]
                request.ranks_loading.remove(rank)
                request.has_failed |= name in outcome.failed_loads
                if not request.ranks_loading:
                    del self.loading[name]
                    self._loaded(request)
            for name in outcome.finished_sends:
                request, ranks = self.sending[name]
                ranks.remove(rank)
                if not ranks:
                    del self.sending[name]
                    self._free(request)

    def _loaded(self, request: Request) -> None:
        if request.is_aborted:
            self._free(request)
        elif request.has_failed:
            self._free(request)
            request.loaded, request.has_failed = 0, False
            self.waiting.append(request)
        else:
            request.computed = request.loaded
            rows = tuple(list(row) for row in request.rows)
            self.half.allocated(request, rows, 0)
            self._compute(request)

    # -- reads ---------------------------------------------------------------------

    def reads(self) -> list[tuple[FakeWorker, int]]:
        """Under way, on all ranks."""
        return [(worker, read) for worker in self.workers for read in worker.readings]

    def read_all(self) -> None:
        """They end, well if they can."""
        for worker, read in self.reads():
            if not worker.readings[read].sampled:
                worker.sample(read)
            if read in worker.readings:
                worker.verify(read)

    def run(self, steps: int = 12) -> None:
        """Serve until nothing happens any more."""
        for _ in range(steps):
            self.step()
            self.read_all()

    def run_without_reads(self, steps: int = 4) -> None:
        """Whatever is read hangs."""
        for _ in range(steps):
            self.step()

    def crash(self) -> None:
        """The processes are gone, and what they held with them."""
        self.network.servers.pop(self.address, None)
        self.network.memories.pop(self.peer_id, None)

    # -- accounts ------------------------------------------------------------------

    def check(self) -> None:
        """Every reference has an owner."""
        self.half.check()
        owned = Counter(self.blocks.held)
        holders = [*self.waiting, *self.loading.values()]
        holders += [request for request, _ in self.sending.values()]
        for request in holders:
            owned.update(block for row in request.rows for block in row if block)
        for block in range(1, self.pool.num_blocks):
            assert self.pool.ref_count(block) == owned[block], f"block {block}"

    @property
    def is_idle(self) -> bool:
        busy = self.waiting or self.loading or self.sending or self.reads()
        return not (busy or self.blocks.held or self.half.has_pending_work())

    def check_idle(self) -> None:
        """Everything came back."""
        assert self.is_idle
        assert self.pool.get_num_free_blocks() == self.pool.num_blocks - 1
        assert not self.blocks.held
        assert not self.half.has_pending_work()
        assert not self.channel.kept
        pulls = self.half._pulls  # the only way to see that none is forgotten
        assert pulls is None or (len(pulls) == 0 and len(pulls.reads) == 0)
        assert not self.half._arrived


def pair(
    producer: RankSpec | None = None,
    consumer: RankSpec | None = None,
    **settings: Any,
) -> tuple[Network, Engine, Engine]:
    """A producer and a consumer."""
    network = Network(Clock())
    return (
        network,
        Engine(network, producer or spec("P", 4), Role.PRODUCER, 5600, **settings),
        Engine(network, consumer or spec("D", 4), Role.CONSUMER, 5700, **settings),
    )
