"""A scheduler with a model whose next token is a hash of all before, and a connector
that does what a test says."""

from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from hashlib import sha256
from typing import Any

from kvplugin.contract import (
    EngineBlocks,
    Lookup,
    RequestView,
    Stats,
    Step,
    WorkerOutcome,
)
from kvplugin.events import KVCacheEvent
from kvplugin.hashing import get_hash_format
from kvplugin.hooks import Hooks
from kvplugin.manager import KVCacheManager
from kvplugin.request import Request
from kvplugin.scheduler import ModelOutput, Scheduler, SchedulerConfig, SchedulerOutput
from kvplugin.spec import (
    EngineLimits,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)

HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": "bfloat16"}


def full(block_size: int = 4) -> KVCacheSpec:
    return FullAttentionSpec(block_size=block_size, **HEADS)


def window(size: int, block_size: int = 4) -> KVCacheSpec:
    return SlidingWindowSpec(block_size=block_size, sliding_window=size, **HEADS)


def next_token(tokens: Sequence[int]) -> int:
    """What the model says after these."""
    return sha256(repr(list(tokens)).encode()).digest()[0] % 97


class Connector:
    """Offers what `offers` says, remembers what it is told."""

    def __init__(self) -> None:
        self.offers: dict[str, int] = {}
        self.later: set[str] = set()
        self.keeps: set[str] = set()
        """Requests whose end it wants to announce itself."""
        self.rows: dict[str, tuple[Sequence[int], ...]] = {}
        self.ended: list[str] = []
        self.distrusted: set[int] = set()
        self.lookups: list[str] = []
        self.steps: list[Step] = []
        self.frees_pending = False
        self.resets = 0
        self.resets_well = True

    @property
    def watched(self) -> Collection[str]:
        return list(self.rows)

    def bind_blocks(self, blocks: EngineBlocks) -> None:
        self.blocks = blocks

    def lookup(self, request: RequestView, num_local_tokens: int) -> Lookup:
        self.lookups.append(request.request_id)
        if request.request_id in self.later:
            return Lookup(0, ready=False)
        offered = self.offers.get(request.request_id, 0) - num_local_tokens
        return Lookup(max(offered, 0))

    def allocated(
        self,
        request: RequestView,
        block_ids: tuple[Sequence[int], ...],
        num_external_tokens: int,
    ) -> None:
        if num_external_tokens:
            self.rows[request.request_id] = block_ids

    def plan_step(self, step: Step) -> bytes:
        self.steps.append(step)
        return b""

    def apply(self, reports: Iterable[bytes]) -> None:
        assert not list(reports)

    def distrust(self, block_ids: AbstractSet[int]) -> None:
        self.distrusted |= block_ids

    def finished(self, request: RequestView) -> bool:
        self.ended.append(request.request_id)
        return request.request_id in self.keeps

    def reset(self) -> bool:
        self.resets += 1
        return self.resets_well

    def has_pending_work(self) -> bool:
        return False

    def has_pending_frees(self) -> bool:
        return self.frees_pending

    def take_events(self) -> list[KVCacheEvent]:
        return []

    def take_stats(self) -> Stats | None:
        return None

    def check(self) -> None: ...
    def close(self) -> None: ...


class Harness:
    """The engine around a scheduler; `depth` steps may be under way."""

    def __init__(
        self,
        usable_blocks: int = 20,
        groups: Sequence[KVCacheSpec] | None = None,
        *,
        connects: bool = False,
        connector: Any = None,
        synchronously: bool = False,
        ranks: int = 1,
        max_model_len: int = 64,
        drafts: int = 0,
        hooks: Hooks | None = None,
        **settings: Any,
    ) -> None:
        specs = [full()] if groups is None else groups
        layers = tuple(
            KVCacheGroupSpec((f"layer{i}",), spec) for i, spec in enumerate(specs)
        )
        self.config = SchedulerConfig(**{"max_num_batched_tokens": 16} | settings)
        self.formats = get_hash_format()
        self.block_size = min(spec.block_size for spec in specs)
        self.kv = KVCacheManager(
            KVCacheConfig(usable_blocks + 1, (), layers),
            max_model_len,
            self.block_size,
            log_stats=True,
            limits=EngineLimits(
                max_model_len=max_model_len,
                max_num_batched_tokens=self.config.max_num_batched_tokens,
                max_concurrent_batches=self.config.pipeline_depth,
                num_lookahead_tokens=self.config.num_lookahead_tokens,
            ),
        )
        self.now = 0.0
        self.connector: Any = connector or Connector()
        self.scheduler = Scheduler(
            self.kv,
            self.config,
            connector=self.connector if connects or connector else None,
            num_ranks=ranks,
            loads_synchronously=synchronously,
            clock=lambda: self.now,
            hooks=hooks,
        )
        self.ranks = ranks
        self.drafts = drafts
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.handed_over: dict[str, Any] = {}
        """What the users of ended requests are told for the next engine."""
        self.in_flight: list[SchedulerOutput] = []

    def add(
        self, name: str, tokens: Iterable[int], max_tokens: int = 1, **request: Any
    ) -> Request:
        """A request arrives."""
        made = Request(
            name,
            list(tokens),
            hash_format=self.formats,
            hash_block_size=self.block_size,
            **request,
        )
        self.scheduler.add_request(made, max_tokens)
        self.outputs[name] = []
        return made

    def schedule(self) -> SchedulerOutput:
        """Put a step under way."""
        output = self.scheduler.schedule()
        self.scheduler.check()
        self.in_flight.append(output)
        return output

    def land(
        self,
        *outcomes: WorkerOutcome,
        invalid: Iterable[int] = (),
        accepted: int | None = None,
    ) -> None:
        """The oldest step ends.

        Args:
            outcomes: of the connector's ranks; of the last ones nothing happened.
            invalid: blocks that a synchronous load did not fill.
            accepted: drafts that are right, all by default.
        """
        output = self.in_flight.pop(0)
        sampled, proposed = {}, {}
        for name in output.num_scheduled_tokens:
            entry = self.scheduler.requests.get(name)
            if entry is None or not entry.in_flight[0].samples:
                continue
            drafts = output.scheduled_spec_decode_tokens.get(name, ())
            right = min(len(drafts), len(drafts) if accepted is None else accepted)
            tokens = list(entry.request.all_token_ids)
            sampled[name] = []
            for _ in range(right + 1):
                sampled[name].append(next_token(tokens + sampled[name]))
            proposed[name] = [1] * self.drafts
        news = self.scheduler.update_from_output(
            ModelOutput(
                output.step,
                sampled,
                proposed,
                [*outcomes, *[WorkerOutcome()] * (self.ranks - len(outcomes))],
                frozenset(invalid),
            )
        )
        for item in news:
            self.outputs[item.req_id] += item.new_token_ids
            if item.finish_reason is not None:
                self.reasons[item.req_id] = item.finish_reason
                self.handed_over[item.req_id] = item.kv_transfer_params
        self.scheduler.check()

    def step(self, *outcomes: WorkerOutcome, **how: Any) -> SchedulerOutput:
        """A whole step."""
        output = self.schedule()
        self.land(*outcomes, **how)
        return output

    def run(self, limit: int = 200) -> None:
        """Until there is nothing left to do.

        Raises:
            AssertionError: a state comes back while work is left, or `limit` steps.
        """
        seen = []
        for _ in range(limit):
            if not self.scheduler.has_work():
                return
            depth = self.config.pipeline_depth if self.scheduler.requests else 1
            while len(self.in_flight) < depth:
                self.schedule()
            self.land()
            state = self.scheduler.state()
            assert not seen or state != seen[-1] or not state["waiting"], state
            seen.append(state)
        raise AssertionError(f"still at work after {limit} steps")

    def rows(self, name: str) -> tuple[list[int], ...]:
        return self.kv.get_block_ids(name)

    def is_idle(self) -> bool:
        """Nothing held, nothing tracked, all blocks free."""
        pool = self.kv.block_pool
        free = pool.get_num_free_blocks() == pool.num_usable_blocks
        return free and not self.scheduler.has_work()


def loaded(*names: str) -> WorkerOutcome:
    """These loads ended well."""
    return WorkerOutcome(finished_loads=frozenset(names))


def failed(**blocks: Sequence[int]) -> WorkerOutcome:
    """These loads ended with blocks that hold no valid bytes."""
    return WorkerOutcome(finished_loads=frozenset(blocks), failed_loads=blocks)
