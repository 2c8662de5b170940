"""A connector of ours as vLLM's `KVConnectorBase_V1`.

The class only translates: decisions are in the halves of `kvplugin.contract`. Written
for the contracts of vLLM 0.19 to 0.32; `versions.TESTED_VERSIONS` says which ran.
"""

import logging
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any
from uuid import uuid4
from weakref import WeakValueDictionary

from vllm.distributed.kv_transfer.kv_connector.v1 import base as v1

from kvplugin.contract import (
    NOTHING_HAPPENED,
    EngineInfo,
    KVTensor,
    SchedulerHalf,
    WorkerHalf,
    WorkerOutcome,
)
from kvplugin.integration.vllm.blocks import VllmBlocks
from kvplugin.integration.vllm.failures import Channel, failed_loads_of
from kvplugin.integration.vllm.kv_events import as_vllms
from kvplugin.integration.vllm.stats import VllmStats
from kvplugin.integration.vllm.steps import step
from kvplugin.integration.vllm.translate import (
    engine_info,
    group_kinds,
    kv_tensors,
    reusable_groups,
)
from kvplugin.integration.vllm.versions import has_standard_views
from kvplugin.integration.vllm.vllm019 import (
    NO_NOTES,
    LoadRoom,
    StepNotes,
    ends_uncounted,
    step_notes,
)

logger = logging.getLogger("vllm.kvplugin.connector")

_local_workers: WeakValueDictionary[str, WorkerHalf] = WeakValueDictionary()
"""Worker halves of this process by the scheduler half whose plans they execute: with
the engine in one process, that one can have its last stores finished before the answer
is returned."""


@dataclass
class PlanMetadata(v1.KVConnectorMetadata):
    """One step's message of the scheduler half."""

    plan: bytes = b""
    origin: str = ""
    """Names the scheduler half."""
    notes: StepNotes = NO_NOTES


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
        groups = kv_cache_config.kv_cache_groups
        self._block_sizes = [group.kv_cache_spec.block_size for group in groups]
        self._origin = uuid4().hex
        kinds = group_kinds(kv_cache_config)
        self._channel = failed_loads_of(vllm_config, kinds).channel
        self._live: dict[str, Any] = {}
        self._room = None
        if not has_standard_views():
            self._room = LoadRoom(self._num_blocks, self._block_sizes)
        self._outcome: WorkerOutcome = NOTHING_HAPPENED
        self._reports: list[bytes] = []
        self._failed: set[str] = set()
        self._scheduler: SchedulerHalf
        self._worker: WorkerHalf
        if role is v1.KVConnectorRole.SCHEDULER:
            self._scheduler = self.make_scheduler_half()
        else:
            self._worker = self.make_worker_half()

    @abstractmethod
    def make_scheduler_half(self) -> SchedulerHalf:
        """The half beside vLLM's scheduler."""

    @abstractmethod
    def make_worker_half(self) -> WorkerHalf:
        """The half of one rank."""

    def engine_info(self, weight_epoch: int = 0) -> EngineInfo:
        """This engine and rank in the contract's terms.

        Args:
            weight_epoch: see `kvplugin.contract.ModelIdentity`.

        Raises:
            ConfigError: context parallelism is on.
        """
        return engine_info(self._vllm_config, self._kv_cache_config, weight_epoch)

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
        self._live[request.request_id] = request
        if request.skip_reading_prefix_cache:
            return 0, False
        answer = self._scheduler.lookup(request, num_computed_tokens)
        if not answer.ready:
            return None, False
        if answer.tokens and self._room and not self._room.admits(request):
            return None, False
        return answer.tokens, answer.tokens > 0

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Groups whose blocks loads fill: vLLM need not zero them."""
        return tuple(sorted(reusable_groups(self._kv_cache_config)))

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        if self._room:
            self._room.allocated(request, num_external_tokens)
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> PlanMetadata:
        half = self._scheduler
        decided = step(half, self._block_sizes, scheduler_output)
        notes = NO_NOTES
        if not has_standard_views():
            notes = step_notes(half.has_pending_work(), self._live, scheduler_output)
        return PlanMetadata(half.plan_step(decided), self._origin, notes)

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
        self._live.pop(request.request_id, None)
        if self._room:
            self._room.leaves(request)
            ends_uncounted(request)
        if not self._live:
            self._drain_local_stores()
        return self._scheduler.finished(request), None

    def _drain_local_stores(self) -> None:
        """In one process nobody steps the engine after the last answer: let the
        stores under way end now, so that they hold no block."""
        worker = _local_workers.get(self._origin)
        if worker is not None and self._scheduler.has_pending_work():
            self._scheduler.apply(filter(None, [worker.drain()]))

    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_pending_work()

    def has_pending_block_frees(self) -> bool:
        return self._scheduler.has_pending_frees()

    def reset_cache(self) -> bool | None:
        return self._scheduler.reset()

    def take_events(self) -> Iterable[Any]:
        return [as_vllms(event) for event in self._scheduler.take_events()]

    # -- worker --------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        self._worker.register(self.describe_caches(kv_caches))

    def describe_caches(self, kv_caches: Mapping[str, Any]) -> dict[str, KVTensor]:
        """KV tensors by layer, as the worker half gets to know them."""
        return kv_tensors(kv_caches, self._num_blocks)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        del forward_context, kwargs
        meta = self._connector_metadata
        if not isinstance(meta, PlanMetadata):
            self._worker.begin_step(b"")
            return
        if meta.plan:
            _local_workers[meta.origin] = self._worker
        self._worker.begin_step(meta.plan)

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
        if self._channel is Channel.REQUESTS:
            self._failed.update(self._outcome.failed_loads)
        # vLLM wants to hear of a failure together with the load's end.
        failed = self._failed & received
        self._failed -= failed
        return v1.KVConnectorTransferResults(
            finished_sending=sent, finished_recving=received, failed_recving=failed
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        del finished_req_ids
        drained = self._worker.drain() if self._notes.drains else b""
        self._outcome = self._worker.poll()
        self._reports = [*filter(None, (drained, self._outcome.report))]
        return set(self._outcome.finished_sends), set(self._outcome.finished_loads)

    def get_block_ids_with_load_errors(self) -> set[int]:
        if self._channel is not Channel.BLOCKS:
            return set()
        return {b for ids in self._outcome.failed_loads.values() for b in ids}

    def build_connector_worker_meta(self) -> ReportMetadata | None:
        return ReportMetadata(self._reports) if self._reports else None

    @property
    def _notes(self) -> StepNotes:
        meta = self._connector_metadata
        return meta.notes if isinstance(meta, PlanMetadata) else NO_NOTES

    # -- both ----------------------------------------------------------------------

    def get_kv_connector_stats(self) -> VllmStats | None:
        if self.role is not v1.KVConnectorRole.SCHEDULER:
            # 0.19 asks the scheduler's side only where a worker has said something.
            return VllmStats() if self._notes.tells else None
        stats = self._scheduler.take_stats()
        return None if stats is None else VllmStats(asdict(stats))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> VllmStats:
        return VllmStats(data)

    def shutdown(self) -> None:
        if self.role is v1.KVConnectorRole.SCHEDULER:
            self._scheduler.close()
        else:
            self._worker.close()
