"""A connector of ours as vLLM's `KVConnectorBase_V1`.

The class only translates: decisions are in the halves of `kvplugin.contract`. Written
for the contracts of vLLM 0.19 to 0.32; `versions.TESTED_VERSIONS` says which ran.
"""

import logging
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from vllm.distributed.kv_transfer.kv_connector.v1 import base as v1

from kvplugin.contract import (
    NOTHING_HAPPENED,
    EngineInfo,
    SchedulerHalf,
    WorkerHalf,
    WorkerOutcome,
)
from kvplugin.events import KVCacheEvent
from kvplugin.integration.vllm.blocks import VllmBlocks
from kvplugin.integration.vllm.translate import engine_info, kv_tensors, step

logger = logging.getLogger("vllm.kvplugin.connector")

_local_workers: WeakValueDictionary[str, WorkerHalf] = WeakValueDictionary()
"""Worker halves of this process by engine id: with the engine in one process, the
scheduler half can have its last stores finished before the answer is returned."""


@dataclass
class PlanMetadata(v1.KVConnectorMetadata):
    """One step's message of the scheduler half."""

    plan: bytes = b""


@dataclass
class ReportMetadata(v1.KVConnectorWorkerMetadata):
    """Reports of worker halves, collected over ranks."""

    reports: list[bytes]

    def aggregate(self, other: v1.KVConnectorWorkerMetadata) -> "ReportMetadata":
        if not isinstance(other, ReportMetadata):
            raise TypeError(f"a report of another connector: {type(other).__name__}")
        return ReportMetadata(self.reports + other.reports)


class VllmConnector(v1.KVConnectorBase_V1, v1.SupportsHMA):
    """Base of our connectors in vLLM; subclasses make the two halves."""

    def __init__(
        self, vllm_config: Any, role: v1.KVConnectorRole, kv_cache_config: Any
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._num_blocks = kv_cache_config.num_blocks
        self._num_groups = len(kv_cache_config.kv_cache_groups)
        self._engine_id = vllm_config.kv_transfer_config.engine_id
        self._live: set[str] = set()
        self._outcome: WorkerOutcome = NOTHING_HAPPENED
        self._scheduler: SchedulerHalf
        self._worker: WorkerHalf
        if role is v1.KVConnectorRole.SCHEDULER:
            self._scheduler = self.make_scheduler_half()
        else:
            self.set_worker_half(self.make_worker_half())

    @abstractmethod
    def make_scheduler_half(self) -> SchedulerHalf:
        """The half beside vLLM's scheduler."""

    @abstractmethod
    def make_worker_half(self) -> WorkerHalf:
        """The half of one rank."""

    def engine_info(self) -> EngineInfo:
        """This engine and rank in the contract's terms.

        Raises:
            ConfigError: context parallelism is on.
        """
        return engine_info(self._vllm_config, self._kv_cache_config)

    # -- scheduler -----------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what it does not keep is computed again."""
        return False

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler.bind_blocks(VllmBlocks(gpu_block_pool))

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._live.add(request.request_id)
        if request.skip_reading_prefix_cache:
            return 0, False
        answer = self._scheduler.lookup(request, num_computed_tokens)
        if not answer.ready:
            return None, False
        return answer.tokens, answer.tokens > 0

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> PlanMetadata:
        half = self._scheduler
        return PlanMetadata(half.plan_step(step(half, scheduler_output)))

    def update_connector_output(self, connector_output: Any) -> None:
        if connector_output.invalid_block_ids:
            self._scheduler.distrust(connector_output.invalid_block_ids)
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, ReportMetadata):
            self._scheduler.apply(meta.reports)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        del block_ids
        self._live.discard(request.request_id)
        if not self._live:
            self._drain_local_stores()
        return self._scheduler.finished(request), None

    def _drain_local_stores(self) -> None:
        """In one process nobody steps the engine after the last answer: let the
        stores under way end now, so that they hold no block."""
        worker = _local_workers.get(self._engine_id)
        if worker is not None and self._scheduler.has_pending_work():
            self._scheduler.apply(filter(None, [worker.drain()]))

    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_pending_work()

    def has_pending_block_frees(self) -> bool:
        return self._scheduler.has_pending_frees()

    def reset_cache(self) -> bool | None:
        return self._scheduler.reset()

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._scheduler.take_events()

    # -- worker --------------------------------------------------------------------

    def set_worker_half(self, half: WorkerHalf) -> None:
        """Make `half` this rank's, in place of any earlier one."""
        self._worker = _local_workers[self._engine_id] = half

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        self._worker.register(kv_tensors(kv_caches, self._num_blocks))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        del forward_context, kwargs
        meta = self._connector_metadata
        self._worker.begin_step(meta.plan if isinstance(meta, PlanMetadata) else b"")

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: no layer waits."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are stored after the step, over all layers at once."""

    def wait_for_save(self) -> None:
        self._worker.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        sent, received = self.get_finished(finished_req_ids)
        failed = set(self._outcome.failed_loads) if self._num_groups > 1 else set()
        return v1.KVConnectorTransferResults(
            finished_sending=sent, finished_recving=received, failed_recving=failed
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        del finished_req_ids
        self._outcome = self._worker.poll()
        return set(self._outcome.finished_sends), set(self._outcome.finished_loads)

    def get_block_ids_with_load_errors(self) -> set[int]:
        # Block ids name no group: vLLM refuses them for models with several.
        if self._num_groups > 1:
            return set()
        return {b for ids in self._outcome.failed_loads.values() for b in ids}

    def build_connector_worker_meta(self) -> ReportMetadata | None:
        report = self._outcome.report
        return ReportMetadata([report]) if report else None

    # -- both ----------------------------------------------------------------------

    def shutdown(self) -> None:
        if self.role is v1.KVConnectorRole.SCHEDULER:
            self._scheduler.close()
        else:
            self._worker.close()
