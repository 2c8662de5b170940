"""A scheduler half by itself: a test plays the engine and every worker half."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.messages import VERSION, Completion, Plan, Report
from kvplugin.connectors.offload.scheduler import OffloadScheduler
from kvplugin.contract import (
    EngineInfo,
    GroupInfo,
    GroupKind,
    Lookup,
    ScheduledRequest,
    StateBlock,
    Step,
)
from kvplugin.hooks import hooks_with
from kvplugin.layout import PageLayout
from kvplugin.wire import decode, encode
from tests.offload.engine_model import Clock
from tests.offload.setup_model import Request, Setup, View

NUM_BLOCKS = 201
BLOCK = 4
"""Tokens of a hash and, unless a group says otherwise, of a block."""


def group(
    kind: GroupKind,
    index: int = 0,
    *,
    size: int = BLOCK,
    page: int = 64,
    **more: Any,
) -> GroupInfo:
    """One layer's."""
    return GroupInfo(
        index, kind, size, {f"layer {index}": PageLayout(page, NUM_BLOCKS)}, **more
    )


def engine(*groups: GroupInfo, **more: Any) -> EngineInfo:
    """An engine of these groups."""
    return EngineInfo("half", groups, NUM_BLOCKS, BLOCK, **more)


def request(tokens: Sequence[int], new: Sequence[int] = (), name: str = "r") -> View:
    """A prompt, and what was generated behind it."""
    made = Request(name, tokens, 1, Setup(block_size=BLOCK))
    made.append(new)
    return View(made)


class Held:
    """Implements `kvplugin.contract.EngineBlocks`: references by block."""

    def __init__(self) -> None:
        self.held: Counter[int] = Counter()

    def acquire(self, ids: Sequence[int]) -> None:
        assert 0 not in ids
        self.held.update(ids)

    def release(self, ids: Sequence[int]) -> None:
        assert self.held >= Counter(ids), "released without having been acquired"
        self.held -= Counter(ids)


class Half:
    """The half, checked after each call.

    Args:
        engine: whose scheduler half it is.
        is_bound: the engine hands over its blocks.
        plugins: asked beside those that are installed.
        settings: of the connector; host memory is large unless they say otherwise.
    """

    def __init__(
        self,
        engine: EngineInfo,
        *,
        is_bound: bool = True,
        plugins: Sequence[object] = (),
        **settings: Any,
    ) -> None:
        settings = {"cpu_bytes_to_use": 1 << 20} | settings
        self.clock = Clock()
        self.engine = engine
        self.scheduler = OffloadScheduler(
            engine,
            OffloadConfig(**settings),
            clock=self.clock,
            enable_events=True,
            hooks=hooks_with(*plugins),
        )
        self.blocks = Held()
        if is_bound:
            self.scheduler.bind_blocks(self.blocks)

    def admit(
        self, view: View, *rows: Sequence[int], local: int = 0, lookup: bool = True
    ) -> Lookup:
        """Ask, and give the rows."""
        answer = self.scheduler.lookup(view, local) if lookup else Lookup(0)
        self.scheduler.allocated(view, rows, answer.tokens)
        self.scheduler.check()
        return answer

    def step(
        self,
        view: View | None = None,
        computed: int = 0,
        tokens: int = 0,
        *,
        new: tuple[Sequence[int], ...] = (),
        states: Sequence[StateBlock] = (),
        preempted: Sequence[str] = (),
    ) -> Plan | None:
        """A step that computes tokens of one request."""
        scheduled = []
        if view is not None and view.request_id in self.scheduler.watched:
            progress = ScheduledRequest(view.request_id, new, computed, tokens, states)
            scheduled = [progress]
        plan = self.scheduler.plan_step(Step(scheduled, preempted, tokens))
        self.scheduler.check()
        return decode(plan, Plan) if plan else None

    def end(self, job: int, error: str = "") -> None:
        """Every rank reports the end of a job."""
        for rank in range(self.engine.world_size):
            done = Completion(job, error, 0 if error else 64, 0.0)
            self.scheduler.apply([encode(Report(VERSION, rank, 1, [done]))])
        self.scheduler.check()

    def store(
        self, view: View, computed: int, tokens: int, **more: Any
    ) -> dict[int, list[int]]:
        """A step whose stores end well; engine blocks stored, by group."""
        plan = self.step(view, computed, tokens, **more)
        stored: dict[int, list[int]] = {}
        for order in plan.stores if plan else ():
            for part in order.parts:
                stored.setdefault(part.group, []).extend(part.engine_ids)
            self.end(order.id)
        return stored

    def offered(self, tokens: Sequence[int], local: int = 0) -> Lookup:
        """What a request that begins so is offered."""
        view = request([*tokens, 0], name="question")
        answer = self.scheduler.lookup(view, local)
        self.scheduler.finished(view)
        return answer

    def stat(self, name: str) -> float:
        """A metric since it was last asked about any."""
        stats = self.scheduler.take_stats()
        assert stats is not None
        return {**stats.counters, **stats.gauges}.get(name, 0)
