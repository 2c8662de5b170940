"""`KVPluginOffloadConnector`: offload to host memory in stock vLLM."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvplugin.connectors.config import parse_config
from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.idle import IdleScheduler, IdleWorker
from kvplugin.connectors.offload.memory import check_machine_memory
from kvplugin.connectors.offload.metrics import METRICS
from kvplugin.connectors.offload.scheduler import OffloadScheduler
from kvplugin.connectors.offload.worker import OffloadWorker
from kvplugin.contract import EngineInfo, GroupKind, SchedulerHalf, WorkerHalf
from kvplugin.integration.vllm.connector import VllmConnector, is_disabled
from kvplugin.integration.vllm.stats import VllmPromMetrics, VllmStats

logger = logging.getLogger("vllm.kvplugin.offload")

METRIC_PREFIX: Final = "vllm:kvplugin_offload_"
_SERVED: Final = frozenset({GroupKind.FULL, GroupKind.MLA})

T = TypeVar("T")


class OffloadPromMetrics(VllmPromMetrics):
    """The table of `kvplugin.connectors.offload.metrics`."""

    table = METRICS
    prefix = METRIC_PREFIX


class KVPluginOffloadConnector(VllmConnector):
    """Keeps KV blocks in host memory and loads them instead of recomputing."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._config = parse_config(
            OffloadConfig,
            vllm_config.kv_transfer_config.kv_connector_extra_config or {},
            "kv_connector_extra_config",
        )
        super().__init__(vllm_config, role, kv_cache_config)

    def make_scheduler_half(self, engine: EngineInfo) -> SchedulerHalf:
        if reason := _idle_reason(engine):
            logger.warning("kvplugin offload is idle: %s", reason)
            return IdleScheduler()
        return self._start(
            lambda: self._scheduler_half(engine), lambda _: IdleScheduler()
        )

    def _scheduler_half(self, engine: EngineInfo) -> SchedulerHalf:
        check_machine_memory(int(self._config.cpu_bytes_to_use))
        events = self._vllm_config.kv_events_config
        half = OffloadScheduler(
            engine,
            self._config,
            enable_events=bool(events and events.enable_kv_cache_events),
        )
        block_bytes = engine.groups[0].block_bytes * engine.world_size
        logger.info(
            "kvplugin offload: %d blocks of %d tokens in %.2f GiB of host memory",
            half.host_blocks,
            engine.groups[0].block_size,
            half.host_blocks * block_bytes / 2**30,
        )
        return half

    def make_worker_half(self, engine: EngineInfo) -> WorkerHalf:
        self._rank = engine.rank
        if reason := _idle_reason(engine):
            return IdleWorker(engine.rank, reason)
        return OffloadWorker(engine, self._config)

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        def register() -> WorkerHalf:
            super(KVPluginOffloadConnector, self).register_kv_caches(kv_caches)
            return self._worker

        self.set_worker_half(
            self._start(register, lambda error: IdleWorker(self._rank, error))
        )

    def _start(self, start: Callable[[], T], instead: Callable[[str], T]) -> T:
        try:
            return start()
        except Exception as error:
            if self._config.on_start_error == "fail":
                raise
            logger.error("kvplugin offload is disabled, it did not start: %s", error)
            return instead(f"offload did not start on this rank: {error}")

    def get_kv_connector_stats(self) -> VllmStats | None:
        if self.role is not KVConnectorRole.SCHEDULER:
            return None
        stats = self._scheduler.take_stats()
        return None if stats is None else VllmStats(asdict(stats))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> VllmStats:
        return VllmStats(data)

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> OffloadPromMetrics:
        return OffloadPromMetrics(*arguments)


def _idle_reason(engine: EngineInfo) -> str:
    """Why there is nothing to do: by request, or for models that are not served yet.
    Empty if there is something to do."""
    kinds = [group.kind for group in engine.groups]
    if is_disabled():
        return "KVPLUGIN_DISABLE=1"
    if len(kinds) == 1 and kinds[0] in _SERVED:
        return ""
    return (
        "it serves models with one group of full attention, this one has: "
        f"{', '.join(kinds) or 'no KV cache'}"
    )
