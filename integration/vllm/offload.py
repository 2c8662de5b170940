"""`KVPluginOffloadConnector`: offload to host memory in stock vLLM."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kvplugin.connectors.coverage import unserved
from kvplugin.connectors.idle import IdleScheduler, IdleWorker
from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.metrics import METRICS
from kvplugin.connectors.offload.refusing import RefusingWorker
from kvplugin.connectors.offload.scheduler import OffloadScheduler
from kvplugin.connectors.offload.worker import OffloadWorker
from kvplugin.contract import EngineInfo, GroupKind, SchedulerHalf, WorkerHalf
from kvplugin.errors import ConfigError
from kvplugin.integration.vllm.connector import VllmConnector
from kvplugin.integration.vllm.environment import is_disabled
from kvplugin.integration.vllm.starting import start_half
from kvplugin.integration.vllm.stats import VllmPromMetrics
from kvplugin.integration.vllm.vllm019 import takes_states

logger = logging.getLogger("vllm.kvplugin.offload")

T = TypeVar("T")


class OffloadPromMetrics(VllmPromMetrics):
    """The table of `kvplugin.connectors.offload.metrics`."""

    table = METRICS
    prefix = "vllm:kvplugin_offload_"


class KVPluginOffloadConnector(VllmConnector):
    """Keeps KV blocks in host memory and loads them instead of recomputing."""

    def make_scheduler_half(self) -> SchedulerHalf:
        return self._start(self._scheduler_half, self._idle_scheduler)

    def _scheduler_half(self, config: OffloadConfig) -> SchedulerHalf:
        engine = self.engine_info(config.weight_epoch)
        if reason := _unserved(engine):
            return self._idle_scheduler(reason)
        events = self._vllm_config.kv_events_config
        half = OffloadScheduler(
            engine,
            config,
            enable_events=bool(events and events.enable_kv_cache_events),
        )
        for pool in half.host_pools:
            groups = [engine.groups[index] for index in pool.groups]
            block_bytes = groups[0].block_bytes * engine.world_size
            logger.info(
                "kvplugin offload: %d blocks of %s tokens in %.3g GiB of host memory "
                "for group %s",
                pool.host_blocks,
                " or ".join(sorted({str(group.block_size) for group in groups})),
                pool.host_blocks * block_bytes / 2**30,
                ", ".join(f"{group.index} ({group.kind})" for group in groups),
            )
        return half

    def _idle_scheduler(self, reason: str) -> SchedulerHalf:
        logger.warning("kvplugin offload is idle: %s", reason)
        return IdleScheduler()

    def make_worker_half(self) -> WorkerHalf:
        return self._start(self._worker_half, self._idle_worker)

    def _worker_half(self, config: OffloadConfig) -> WorkerHalf:
        engine = self.engine_info(config.weight_epoch)
        if reason := _unserved(engine):
            return self._idle_worker(reason)
        return OffloadWorker(engine, config)

    def _idle_worker(self, reason: str) -> WorkerHalf:
        parallel = self._vllm_config.parallel_config
        return RefusingWorker(parallel.rank % parallel.world_size, reason)

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        if isinstance(self._worker, IdleWorker):
            return  # wherever the caches are, they are not ours to look at

        def register(config: OffloadConfig) -> WorkerHalf:
            del config
            super(KVPluginOffloadConnector, self).register_kv_caches(kv_caches)
            return self._worker

        self._worker = self._start(register, self._idle_worker)

    def _start(
        self, start: Callable[[OffloadConfig], T], idle: Callable[[str], T]
    ) -> T:
        """`start`, or `idle` with the reason where the user wants that instead."""
        if self._kv_transfer_config.kv_role != "kv_both" and not is_disabled():
            raise ConfigError(
                f"kv_role={self._kv_transfer_config.kv_role!r} must be 'kv_both': "
                "host memory is both written and read"
            )
        settings = self._kv_transfer_config.kv_connector_extra_config or {}
        return start_half("offload", OffloadConfig, settings, start, idle)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        """All hits come from host memory (asked by 0.32)."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        del request
        return {CacheHitSource.HOST: num_external_tokens} if num_external_tokens else {}

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> OffloadPromMetrics:
        return OffloadPromMetrics(*arguments)


def _unserved(engine: EngineInfo) -> str:
    """Why this model is left alone; empty if it is served."""
    for group in engine.groups:
        if group.kind is GroupKind.CROSS_ATTENTION:
            return (
                f"group {group.index} is of kind {group.kind}: what an encoder has "
                "made is not found by the tokens of a prompt"
            )
        if group.kind is GroupKind.MAMBA and not group.reusable:
            return (
                f"group {group.index} is of kind {group.kind}, and vLLM keeps no "
                "state at the ends of blocks (mamba_cache_mode 'none', as where "
                "enable_prefix_caching is off): nothing could be hit"
            )
        if group.kind is GroupKind.MAMBA and not takes_states(group):
            return (
                f"group {group.index} is of kind {group.kind}, and vLLM 0.19 takes no "
                "hit of a connector in mamba_cache_mode 'align': a newer vLLM does"
            )
    return unserved(engine)
