"""The worker half of offload: moves the blocks of one rank."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvplugin.connectors.identity import StoreIdentity
from kvplugin.connectors.load_book import LoadBook
from kvplugin.connectors.offload.capacity import host_pools
from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.copies import Copies, open_copies
from kvplugin.connectors.offload.copy_thread import MOST_SECONDS
from kvplugin.connectors.offload.messages import (
    VERSION,
    Completion,
    CopyOrder,
    HostPool,
    Plan,
    Report,
)
from kvplugin.connectors.offload.retries import Retries, copy_job
from kvplugin.contract import (
    NOTHING_HAPPENED,
    CopyResult,
    EngineInfo,
    GroupInfo,
    KVTensor,
    Transport,
    WorkerOutcome,
)
from kvplugin.errors import (
    CapacityError,
    IntegrityError,
    LayoutMismatchError,
    TransferError,
)
from kvplugin.wire import decode, encode

logger = logging.getLogger("vllm.kvplugin.offload")

_DRAIN_LOOK_SECONDS: Final = 0.05
"""Between two looks while draining: a transport waits for loads as well."""


class OffloadWorker:
    """Implements `kvplugin.contract.WorkerHalf`.

    Every order that a plan brings ends once: with the transport's result, or at once,
    as failed, where it cannot be done (its `refusal`, a plan of another identity, host
    memory that this rank has not).

    Args:
        engine: the engine, with this worker's rank.
        config: the connector's configuration.
        make_transport: from the host pools, for tests; by default `own_transport`.
        make_copies: from groups and tensors, for tests; by default the tensors' device
            decides.
        drain_seconds: how long `drain` waits at most.
    """

    def __init__(
        self,
        engine: EngineInfo,
        config: OffloadConfig,
        make_transport: Callable[[Sequence[HostPool]], Transport] | None = None,
        *,
        make_copies: Callable[
            [Sequence[GroupInfo], Mapping[str, KVTensor]], Copies
        ] = open_copies,
        drain_seconds: float = MOST_SECONDS,
    ) -> None:
        self._engine = engine
        self._config = config
        self._wait = config.copy_wait_ms / 1e3
        self._drain_seconds = drain_seconds
        self._make_transport = make_transport or self.own_transport
        self._make_copies = make_copies
        self._identity = StoreIdentity.of(engine).shared
        self._copies: Copies | None = None
        self._transport: Transport | None = None
        self._pools: Sequence[HostPool] = ()
        self._has_copied = False
        self._closed = False
        self._step = -1
        self._refusal = ""
        self._to_store: Sequence[CopyOrder] = ()
        can_fail = engine.reports_failed_loads
        self._loads: LoadBook[Completion] = LoadBook(can_fail=can_fail, logger=logger)
        self._retries = None if can_fail else Retries()
        self._stores: set[int] = set()
        self._is_plan_unsaid = False
        self._completions: list[Completion] = []
        self._sends: set[str] = set()

    # -- host memory ---------------------------------------------------------------

    def register(self, tensors: Mapping[str, KVTensor]) -> None:
        """Check that every layer's pages can be moved, and set host memory aside.

        Raises:
            LayoutMismatchError: a layer is missing, its tensor is not laid out as its
                page promises, or there is memory besides that is no group's.
            CapacityError: the machine has not so much memory.
            ConfigError: nothing moves KV in the memory where it is.
        """
        missing = [
            layer
            for group in self._engine.groups
            if group.reusable
            for layer in group.layers
            if layer not in tensors
        ]
        if missing:
            raise LayoutMismatchError(
                f"no KV tensor for layers {missing}; the engine gave {list(tensors)}"
            )
        self._refuse_strays(tensors)
        self._copies = self._make_copies(self._engine.groups, tensors)
        if not self._copies.may_hold_a_step:
            self._wait = 0.0
        self._open(host_pools(self._engine, self._config))

    def _refuse_strays(self, tensors: Mapping[str, KVTensor]) -> None:
        """Refuse memory that no group names and that is no layer's own, such as scales
        beside the pages of quantised rows: it would not be moved with the blocks."""
        layers = {layer for group in self._engine.groups for layer in group.layers}
        places = {t.address for name, t in tensors.items() if name in layers}
        for name, tensor in tensors.items():
            shape = tensor.layout.shape
            if name in layers or tensor.address in places or math.prod(shape) <= 1:
                continue
            raise LayoutMismatchError(
                f"KV tensor {name!r} {shape} belongs to no KV cache group, so it does "
                "not travel with their blocks. Is it a multi-element scale whose "
                "leading axis is not the block axis? Use a KV cache dtype that keeps "
                "its scales inside the pages"
            )

    def own_transport(self, pools: Sequence[HostPool]) -> Transport:
        """The transport between the registered tensors and host memory, which is
        allocated.

        Raises:
            CapacityError: the machine has not so much memory.
            TransferError: nothing is registered.
        """
        if self._copies is None:
            raise TransferError("a plan arrived before the KV tensors")
        nbytes = self._copies.allocate(pools)
        logger.info(
            "kvplugin offload: rank %d keeps its KV in %.3g GiB of host memory",
            self._engine.rank,
            nbytes / 2**30,
        )
        return self._copies.transport()

    def _open(self, pools: Sequence[HostPool]) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
        self._transport = self._make_transport(pools)
        self._pools = pools

    def _why_not(self, plan: Plan) -> str:
        """Why nothing of a plan can be done; empty if it can. Makes room for the
        plan's pools before the first job: where a pipeline's ranks hold unequal
        layers, the scheduler half may count more blocks than this one did."""
        if plan.identity != self._identity:
            return (
                f"rank {self._engine.rank} holds blocks of identity {self._identity}, "
                f"the plan is for {plan.identity}: scheduler and workers must run the "
                "same model and weights with the same configuration"
            )
        if self._closed:
            return "the worker half is closed"
        if self._transport is not None and _cover(self._pools, plan.pools):
            return ""
        if self._has_copied:
            return f"the host pools have changed from {self._pools} to {plan.pools}"
        try:
            self._open(plan.pools)
        except CapacityError as error:
            return str(error)
        return ""

    # -- a step --------------------------------------------------------------------

    def begin_step(self, plan: bytes) -> None:
        """Start the plan's loads; they go before any store that has not begun. A plan
        that comes again is not executed again.

        Raises:
            IntegrityError: the message is not a plan, or one of another version.
        """
        self._start_stores()  # of a step whose end was not announced: it is over
        if not plan:
            return
        message = decode(plan, Plan)
        if message.step <= self._step:
            logger.warning("plan %d came again and is ignored", message.step)
            return
        self._step = message.step
        self._is_plan_unsaid = True
        self._sends.update(message.finished_sends)
        self._refusal = self._why_not(message)
        for order in message.loads:
            self._start_load(order)
        # Of those too: a plan may be made long after its loads were ordered.
        self._loads.give_up(message.given_up)
        self._to_store = message.stores

    def end_step(self) -> None:
        """Start the plan's stores: the step has written what they read. Engines with
        a drafter say so only after `poll`."""
        self._start_stores()

    def _start_load(self, order: CopyOrder) -> None:
        if reason := self._refusal or _refusal_of(order):
            self._loads.refuse(order, Completion(order.id, reason, 0, 0.0))
            return
        self._loads.begin(order)
        if self._retries is not None:
            self._retries.begin(order)
        self._submit(order, store=False)

    def _start_stores(self) -> None:
        orders, self._to_store = self._to_store, ()
        for order in orders:
            if reason := self._refusal or _refusal_of(order):
                self._completions.append(Completion(order.id, reason, 0, 0.0))
                continue
            self._stores.add(order.id)
            self._submit(order, store=True)

    def _submit(self, order: CopyOrder, *, store: bool) -> None:
        if self._transport is None:
            raise IntegrityError("a job without a transport")
        self._has_copied = True
        self._transport.submit(copy_job(order, store=store))

    def poll(self) -> WorkerOutcome:
        """What ended, after waiting `copy_wait_ms` at most while copies run: not where
        they run on a device, nor where one hangs.

        Raises:
            TransferError: a load failed, and the engine cannot be told so.
        """
        self._collect(0.0 if self._loads.has_given_up else self._wait)
        news = self._loads.news()
        if not (news or self._is_plan_unsaid or self._completions):
            return NOTHING_HAPPENED
        self._is_plan_unsaid = False
        sends, self._sends = self._sends, set()
        if news is None:
            return WorkerOutcome(finished_sends=frozenset(sends), report=self._report())
        self._completions += news.ends
        return WorkerOutcome(
            news.finished, news.failed, frozenset(sends), self._report()
        )

    def drain(self) -> bytes:
        """Wait for the stores under way; loads that end meanwhile are kept for
        `poll`, which alone may say so to the engine."""
        self._start_stores()
        self._collect(0.0)
        for _ in range(round(self._drain_seconds / _DRAIN_LOOK_SECONDS)):
            if not self._stores:
                break
            self._collect(_DRAIN_LOOK_SECONDS)
        if self._stores:
            logger.error("%d stores do not end", len(self._stores))
        return self._report()

    def _collect(self, wait: float) -> None:
        if self._transport is None or (self._loads.is_empty and not self._stores):
            return
        for result in self._transport.poll(wait):
            self._ended(self._transport, result)

    def _ended(self, transport: Transport, result: CopyResult) -> None:
        if result.id in self._stores:
            self._stores.remove(result.id)
            self._completions.append(_completion(result))
            return
        if self._retries is not None:
            if (job := self._retries.again(result)) is not None:
                transport.submit(job)
                return
            result = self._retries.last(result)
        self._loads.end(_completion(result))

    def _report(self) -> bytes:
        completions, self._completions = self._completions, []
        return encode(Report(VERSION, self._engine.rank, self._step, completions))

    def close(self) -> None:
        """Finish the copies under way and give host memory back; what a copy that does
        not end uses stays. Again: does nothing."""
        self._closed = True
        self._to_store = ()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
        if self._copies is not None:
            self._copies.close()


def _completion(result: CopyResult) -> Completion:
    return Completion(result.id, result.error, result.nbytes, result.seconds)


def _refusal_of(order: CopyOrder) -> str:
    """Why an order cannot be done; empty if it can."""
    if 0 in order.engine_ids:
        return order.refusal or "block 0, the null block, belongs to no request"
    return order.refusal


def _cover(ours: Sequence[HostPool], theirs: Sequence[HostPool]) -> bool:
    """Whether our pools are of the same groups and no smaller."""
    blocks = {frozenset(pool.groups): pool.host_blocks for pool in ours}
    wanted = {frozenset(pool.groups): pool.host_blocks for pool in theirs}
    return blocks.keys() == wanted.keys() and all(
        blocks[groups] >= count for groups, count in wanted.items()
    )
