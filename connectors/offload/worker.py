"""The worker half of offload: moves the blocks of one rank."""

import logging
from collections.abc import Callable, Mapping, Sequence

from kvplugin.connectors.offload.capacity import host_slots
from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.copy_thread import CopyThread
from kvplugin.connectors.offload.host_copies import HostCopies
from kvplugin.connectors.offload.messages import (
    VERSION,
    Completion,
    CopyOrder,
    Plan,
    Report,
)
from kvplugin.contract import (
    NOTHING_HAPPENED,
    CopyJob,
    CopyResult,
    EngineInfo,
    KVTensor,
    Transport,
    WorkerOutcome,
)
from kvplugin.errors import IntegrityError, LayoutMismatchError
from kvplugin.wire import decode, encode

logger = logging.getLogger("vllm.kvplugin.offload")

DRAIN_SECONDS = 30.0
"""How long `drain` waits: far beyond any copy, so that a hang ends as an error."""


class OffloadWorker:
    """Implements `kvplugin.contract.WorkerHalf`.

    Args:
        engine: the engine, with this worker's rank.
        config: the connector's configuration.
        make_transport: from the number of host blocks, for tests; by default a copy
            thread over host memory.
    """

    def __init__(
        self,
        engine: EngineInfo,
        config: OffloadConfig,
        make_transport: Callable[[int], Transport] | None = None,
    ) -> None:
        self._engine = engine
        self._config = config
        self._wait = config.copy_wait_ms / 1e3
        self._make_transport = make_transport or self._copy_thread
        self._copies: HostCopies | None = None
        self._transport: Transport | None = None
        self._host_blocks = 0
        self._step = -1
        self._unsaid: Plan | None = None
        self._to_store: Sequence[CopyOrder] = ()
        self._loads: dict[int, CopyOrder] = {}
        self._stores: set[int] = set()
        self._results: list[CopyResult] = []

    def register(self, tensors: Mapping[str, KVTensor]) -> None:
        """Check that every layer's pages can be moved, and set host memory aside.

        Raises:
            LayoutMismatchError: a layer is missing, or its tensor is not laid out as
                its page promises.
            CapacityError: the machine has not so much memory.
        """
        missing = [
            layer
            for group in self._engine.groups
            for layer in group.layers
            if layer not in tensors
        ]
        if missing:
            raise LayoutMismatchError(
                f"no KV tensor for layers {missing}; the engine gave {list(tensors)}"
            )
        self._copies = HostCopies(self._engine.groups, tensors)
        self._open(
            host_slots(self._engine, self._config) * self._config.blocks_per_chunk
        )

    def _open(self, host_blocks: int) -> None:
        """Be ready for jobs. Again with a larger number where the pipeline's ranks
        hold unequal layers and the scheduler half counts more blocks than this one:
        that is known from the first plan, before any job."""
        if host_blocks > self._host_blocks:
            if self._transport is not None:
                self._transport.close()
            self._transport = self._make_transport(host_blocks)
            self._host_blocks = host_blocks

    def _copy_thread(self, host_blocks: int) -> Transport:
        if self._copies is None:
            raise IntegrityError("a plan arrived before the KV tensors")
        nbytes = self._copies.allocate(host_blocks)
        logger.info(
            "kvplugin offload: rank %d keeps its KV in %.2f GiB of host memory",
            self._engine.rank,
            nbytes / 2**30,
        )
        return CopyThread(self._copies.execute)

    def begin_step(self, plan: bytes) -> None:
        """Start the plan's loads; they go before any store that has not begun.

        Raises:
            IntegrityError: the message is not a plan, or one of another version.
        """
        self._start_stores()  # of a step whose end was not announced: it is over
        if not plan:
            return
        self._unsaid = message = decode(plan, Plan)
        self._step = message.step
        self._open(message.host_blocks)
        for order in message.loads:
            self._loads[order.id] = order
            self._submit(order, store=False)
        self._to_store = message.stores

    def end_step(self) -> None:
        """Start the plan's stores: the step has written what they read. Engines with
        a drafter say so only after `poll`."""
        self._start_stores()

    def _start_stores(self) -> None:
        orders, self._to_store = self._to_store, ()
        for order in orders:
            self._stores.add(order.id)
            self._submit(order, store=True)

    def _submit(self, order: CopyOrder, *, store: bool) -> None:
        if self._transport is None:
            raise IntegrityError("a job before the first plan")
        parts = [(part.group, part.engine_ids, part.host_ids) for part in order.parts]
        self._transport.submit(CopyJob(order.id, store, parts))

    def poll(self) -> WorkerOutcome:
        """What ended, after waiting `copy_wait_ms` at most while copies run."""
        plan, self._unsaid = self._unsaid, None
        self._collect(self._wait)
        if plan is None and not self._results:
            return NOTHING_HAPPENED
        loads = {
            result.id: self._loads.pop(result.id)
            for result in self._results
            if result.id in self._loads
        }
        failed = {
            loads[result.id].request_id: _engine_ids(loads[result.id])
            for result in self._results
            if result.error and result.id in loads
        }
        return WorkerOutcome(
            frozenset(order.request_id for order in loads.values()),
            failed,
            frozenset(plan.finished_sends if plan else ()),
            self._report(),
        )

    def drain(self) -> bytes:
        """Wait for the stores under way; loads that end meanwhile are kept for
        `poll`, which alone may say so to the engine."""
        self._start_stores()
        self._collect(DRAIN_SECONDS if self._stores else 0.0)
        if self._stores:
            logger.error("%d stores do not end", len(self._stores))
        loads = [r for r in self._results if r.id in self._loads]
        self._results = [r for r in self._results if r.id not in self._loads]
        report = self._report()
        self._results = loads
        return report

    def _collect(self, wait: float) -> None:
        if self._transport is None or not (self._loads or self._stores):
            return
        results = self._transport.poll(wait)
        self._stores.difference_update(result.id for result in results)
        self._results += results

    def _report(self) -> bytes:
        completions = [
            Completion(r.id, r.error, r.nbytes, r.seconds) for r in self._results
        ]
        self._results = []
        return encode(Report(VERSION, self._engine.rank, self._step, completions))

    def close(self) -> None:
        """Finish the copies under way and give host memory back."""
        if self._transport is not None:
            self._transport.close()
        if self._copies is not None:
            self._copies.close()


def _engine_ids(order: CopyOrder) -> Sequence[int]:
    return [block for part in order.parts for block in part.engine_ids]
