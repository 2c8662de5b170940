"""`KVPluginNixlConnector`: prefill/decode disaggregation over NIXL in stock vLLM."""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1 import base as v1

from kvplugin.connector_answers import ConnectorAnswers
from kvplugin.connectors.idle import IdleScheduler, IdleWorker
from kvplugin.connectors.nixl.config import NixlConfig, Role
from kvplugin.connectors.nixl.metrics import METRICS
from kvplugin.connectors.nixl.scheduler import NixlScheduler
from kvplugin.connectors.nixl.worker import NixlWorker
from kvplugin.contract import (
    EngineInfo,
    GroupKind,
    IntroducesItself,
    KVTensor,
    MeetsPeers,
    SchedulerHalf,
    WorkerHalf,
)
from kvplugin.errors import ConfigError
from kvplugin.integration.vllm.connector import VllmConnector
from kvplugin.integration.vllm.prompts import shorten_prompt
from kvplugin.integration.vllm.rows import with_rows
from kvplugin.integration.vllm.starting import start_half
from kvplugin.integration.vllm.stats import VllmPromMetrics
from kvplugin.integration.vllm.translate import hash_block_size
from kvplugin.integration.vllm.versions import (
    PEERS,
    has_standard_views,
    missing_for,
    vllm_version,
)
from kvplugin.integration.vllm.vllm019 import takes_states

logger = logging.getLogger("vllm.kvplugin.nixl")

T = TypeVar("T")

_ENVIRONMENT: Final = {
    "side_channel_host": "VLLM_NIXL_SIDE_CHANNEL_HOST",
    "side_channel_port": "VLLM_NIXL_SIDE_CHANNEL_PORT",
}
"""vLLM's variables for its own NixlConnector: they count where a key is not set."""
_ENDS_WELL: Final = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
"""Names of `RequestStatus`: the request was neither aborted, refused nor failed."""


class NixlPromMetrics(VllmPromMetrics):
    """The table of `kvplugin.connectors.nixl.metrics`."""

    table = METRICS
    prefix = "vllm:kvplugin_nixl_"


@dataclass
class Introduction(v1.KVConnectorHandshakeMetadata):
    """What a worker half tells the scheduler half of its rank."""

    content: bytes


class KVPluginNixlConnector(VllmConnector):
    """Reads the KV of a prompt from the engine that has computed it."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Heads outside of tokens, as vLLM's own: a rank's share of the heads is one
        run of bytes. A preference: other layouts are converted."""
        model = vllm_config.model_config
        if model is None or model.use_mla:
            return None
        return "LBHNC" if has_standard_views() else "HND"

    # -- start ---------------------------------------------------------------------

    def make_scheduler_half(self) -> SchedulerHalf:
        half = self._start(self._scheduler_half, self._idle_scheduler)
        self._answers = ConnectorAnswers(half)
        return half

    def _scheduler_half(self, config: NixlConfig) -> SchedulerHalf:
        engine = self.engine_info(config.weight_epoch)
        _check(engine)
        return NixlScheduler(engine, config, self._role_of_engine)

    def _idle_scheduler(self, reason: str) -> SchedulerHalf:
        logger.warning("kvplugin nixl is idle: %s", reason)
        return IdleScheduler()

    def make_worker_half(self) -> WorkerHalf:
        return self._start(self._worker_half, self._idle_worker)

    def _worker_half(self, config: NixlConfig) -> WorkerHalf:
        engine = self.engine_info(config.weight_epoch)
        _check(engine)
        return NixlWorker(engine, config)

    def _idle_worker(self, reason: str) -> WorkerHalf:
        """It does not introduce itself: the scheduler half, which may have started,
        then has no whole engine to speak for."""
        del reason  # it is in the log
        return IdleWorker()

    @property
    def _role_of_engine(self) -> Role:
        return Role(self._kv_transfer_config.kv_role.removeprefix("kv_"))

    def _start(self, start: Callable[[NixlConfig], T], idle: Callable[[str], T]) -> T:
        settings = self._kv_transfer_config.kv_connector_extra_config or {}
        settings = settings_here(settings, self._vllm_config.parallel_config)
        return start_half("nixl", NixlConfig, settings, start, idle)

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        if isinstance(self._worker, IdleWorker):
            return

        def register(config: NixlConfig) -> WorkerHalf:
            del config
            super(KVPluginNixlConnector, self).register_kv_caches(kv_caches)
            return self._worker

        self._worker = self._start(register, self._idle_worker)

    def describe_caches(self, kv_caches: Mapping[str, Any]) -> dict[str, KVTensor]:
        tensors = super().describe_caches(kv_caches)
        return with_rows(tensors, self._vllm_config, self._kv_cache_config)

    def get_handshake_metadata(self) -> Introduction | None:
        if not isinstance(self._worker, IntroducesItself):
            return None
        return Introduction(self._worker.introduction())

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """Introductions by tensor-parallel rank (0.19)."""
        by_stage = {(0, rank): said for rank, said in metadata.items()}
        self.set_xfer_handshake_metadata_pp_aware(by_stage)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], Any]
    ) -> None:
        """Introductions by pipeline rank and tensor-parallel rank (0.32)."""
        half = self._scheduler
        if isinstance(half, MeetsPeers):
            ranks = self._vllm_config.parallel_config.tensor_parallel_size
            half.meet(
                {
                    stage * ranks + rank: said.content
                    for (stage, rank), said in metadata.items()
                    if isinstance(said, Introduction)
                }
            )

    # -- a step --------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """The plan is here, new blocks are zeroed, and the forward begins: so do reads,
        to be over by its end. `start_load_kv` comes after it in 0.32."""
        super().bind_connector_metadata(connector_metadata)
        super().start_load_kv(None)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Reads have begun with the plan."""

    # -- requests ------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether a preempted request may still have to hand over its blocks: what it
        had under way is then computed again, not delivered."""
        return self._role_of_engine is not Role.CONSUMER

    def on_new_request(self, request: Any) -> None:
        """A request has come (told by 0.32; in 0.19 its first lookup tells it)."""
        self._live[request.request_id] = request
        if not isinstance(request.kv_transfer_params, Mapping | None):
            # vLLM 0.32 takes it for a table right after this.
            logger.warning(
                "request %.128r: its kv_transfer_params are no table, and are ignored",
                request.request_id,
            )
            request.kv_transfer_params = None
        if count := self._answers.arrived(request):
            hashed = hash_block_size(self._vllm_config, self._kv_cache_config)
            shorten_prompt(request, count, hashed)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if request.request_id not in self._live:
            self.on_new_request(request)
            if num_computed_tokens >= request.num_prompt_tokens:
                # A hit of the prompt as it was before: found again without its end.
                return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """None on a CPU, where blocks are zeroed before reads into them begin: what a
        read leaves of a block is zero then. Elsewhere all groups, as vLLM's own."""
        if self._vllm_config.device_config.device_type == "cpu":
            return ()
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        """All hits come from another engine (asked by 0.32)."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        del request
        return {CacheHitSource.P2P: num_external_tokens} if num_external_tokens else {}

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        told = None
        if request.status.name in _ENDS_WELL:
            computed = request.num_computed_tokens
            told = self._answers.handover(request, block_ids, computed)
        stays, _ = super().request_finished_all_groups(request, block_ids)
        return stays, told

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> NixlPromMetrics:
        return NixlPromMetrics(*arguments)


def settings_here(settings: Mapping[str, Any], parallel_config: Any) -> dict[str, Any]:
    """The user's settings, with vLLM's variables where keys are not set, and a port for
    each engine of a data-parallel group.

    Raises:
        ConfigError: a variable holds no port.
    """
    found = dict(settings)
    for key, variable in _ENVIRONMENT.items():
        if key not in found and (value := os.environ.get(variable)):
            found[key] = value if key == "side_channel_host" else _port(variable, value)
    index = getattr(
        parallel_config, "data_parallel_index", parallel_config.data_parallel_rank
    )
    if index:
        port = found.get("side_channel_port", NixlConfig().side_channel_port)
        if isinstance(port, int):
            found["side_channel_port"] = port + index
    return found


def _port(variable: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"{variable}={value!r} is no port") from None


def _check(engine: EngineInfo) -> None:
    """Refuse an engine that could not hand over, or could not go on with, its KV.

    Raises:
        ConfigError: names the group, or what this vLLM lacks.
    """
    if missing := missing_for(PEERS):
        raise ConfigError(f"vLLM {vllm_version()} is not as expected: {missing}")
    for group in engine.groups:
        if group.kind is GroupKind.MAMBA and not group.reusable:
            raise ConfigError(
                f"group {group.index} is of kind {group.kind}, and vLLM does not keep "
                "states by place (mamba_cache_mode 'none', as where "
                "enable_prefix_caching is off): switch prefix caching on"
            )
        if group.kind is GroupKind.MAMBA and not takes_states(group):
            raise ConfigError(
                f"group {group.index} is of kind {group.kind}, and vLLM 0.19 takes no "
                "hit of a connector in mamba_cache_mode 'align': a newer vLLM does"
            )
