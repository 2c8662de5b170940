"""From layers to groups and tensors: how the engine adopts the core's planning."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Final

from kvplugin.errors import ConfigError
from kvplugin.groups import (
    GroupingConfig,
    align_mamba_specs,
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
)
from kvplugin.integration.reference.backends import find_backend
from kvplugin.integration.reference.config import EngineConfig
from kvplugin.integration.reference.layers import CacheSettings, Memory, Mixer
from kvplugin.spec import KVCacheConfig, KVCacheGroupSpec, MambaSpec, layer_spec
from kvplugin.worker.backends import BackendLayout
from kvplugin.worker.collect import collect_layers
from kvplugin.worker.kernel_blocks import select_kernel_block_size
from kvplugin.worker.layout_choice import LayoutWish, choose_layout

_AMPLE: Final = 1 << 50
"""Bytes of memory: the number of blocks is configured, not found out."""


@dataclass(frozen=True)
class MemoryPlan:
    """What scheduler and workers agree on about the KV cache."""

    workers: tuple[KVCacheConfig, ...]
    """One a rank."""
    scheduler: KVCacheConfig
    limits: GroupingConfig
    backends: Mapping[str, BackendLayout]
    """Attention layer -> its backend."""
    layout: str
    kernel_block_sizes: tuple[int, ...]
    """Tokens of a block as the kernels of each group count."""

    @property
    def hash_block_size(self) -> int:
        """Tokens of a block hash: the block sizes of all groups are multiples."""
        groups = self.scheduler.kv_cache_groups
        return gcd(*(group.kv_cache_spec.block_size for group in groups))


def cache_settings(config: EngineConfig) -> CacheSettings:
    """What the engine tells its layers about their caches."""
    mode, chunk = config.mamba_cache_mode, config.mamba_chunk_size
    return CacheSettings(
        block_size=config.block_size,
        dtype=None if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        mamba_cache_mode=mode,
        mamba_block_size=(
            config.max_model_len if mode == "none" else chunk or config.block_size
        ),
        num_drafts=config.num_drafts,
    )


def plan_memory(
    ranks: Sequence[Sequence[Mixer]],
    config: EngineConfig,
    *,
    draft_layers: frozenset[str] = frozenset(),
    wishes: Sequence[LayoutWish] = (),
) -> MemoryPlan:
    """Group all layers, and decide where they lie.

    Args:
        ranks: the layers of each rank, those of a drafter included.
        config: of the engine.
        draft_layers: names of a drafter's layers.
        wishes: what connectors ask of the layout.

    Raises:
        ConfigError: the layers cannot be grouped, a backend does not suit one, or the
            engine's settings do not go with their kinds.
        CapacityError: a request of `max_model_len` does not fit.
    """
    for mixer in ranks[0]:
        _check_settings(mixer, config)
    limits = _limits(ranks[0], config, draft_layers)
    specs = [_aligned(mixers, config) for mixers in ranks]
    resolved = get_kv_cache_configs(specs, limits, [_AMPLE] * len(ranks))
    groups = resolved.configs[0].kv_cache_groups
    backends = {
        mixer.name: backend
        for mixer in ranks[0]
        if mixer.kv_sharing_target is None
        and (backend := _backend(mixer.memory, config)) is not None
    }
    choice = choose_layout(
        backends,
        override=config.layout,
        environment={},
        wishes=wishes,
        cross_layer=(config.layout or "").upper().startswith("B"),
        mixed_pages=len(groups) > 1,
    )
    return MemoryPlan(
        workers=resolved.configs,
        scheduler=generate_scheduler_kv_cache_config(resolved.configs),
        limits=resolved.config,
        backends=backends,
        layout=choice.layout,
        kernel_block_sizes=tuple(_kernel_size(g, backends, config) for g in groups),
    )


def _limits(
    mixers: Sequence[Mixer], config: EngineConfig, draft_layers: frozenset[str]
) -> GroupingConfig:
    scheduler = config.scheduler
    return GroupingConfig(
        max_model_len=config.max_model_len,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_num_encoder_input_tokens=config.max_num_encoder_input_tokens,
        max_concurrent_batches=scheduler.pipeline_depth,
        num_lookahead_tokens=scheduler.num_lookahead_tokens,
        disable_hybrid_kv_cache_manager=config.disable_hybrid_kv_cache_manager,
        pad_page_sizes=True,
        draft_layers=draft_layers,
        kv_sharing_targets=collect_layers(mixers).kv_sharing_targets,
        num_gpu_blocks_override=config.num_blocks,
    )


def _aligned(mixers: Sequence[Mixer], config: EngineConfig) -> dict:
    """The specs, with attention blocks that hold a state where there are states."""
    return align_mamba_specs(
        collect_layers(mixers).specs,
        max_model_len=config.max_model_len,
        kernel_alignment=config.block_size,
        mamba_chunk_size=config.mamba_chunk_size or config.block_size,
    )


def _backend(memory: Memory, config: EngineConfig) -> BackendLayout | None:
    """For a layer that keeps rows of this sort."""
    keys = {
        Memory.KEYS_AND_VALUES: "backend",
        Memory.ENCODER: "backend",
        Memory.LATENTS: "mla_backend",
        Memory.RECORDS: "mla_fp8_backend",
    }
    key = keys.get(memory)
    return None if key is None else find_backend(getattr(config, key), key)


def _kernel_size(
    group: KVCacheGroupSpec,
    backends: Mapping[str, BackendLayout],
    config: EngineConfig,
) -> int:
    names = group.own_layer_names
    spec = layer_spec(group.kv_cache_spec, names[0])
    if isinstance(spec, MambaSpec):
        return spec.block_size
    if config.kernel_block_size is not None:
        return config.kernel_block_size
    supported = {backends[n].name: backends[n].block_sizes for n in names}
    return select_kernel_block_size(spec.block_size, supported)


def _check_settings(mixer: Mixer, config: EngineConfig) -> None:
    """Refuse settings under which a kind of layer would compute nonsense."""
    scheduler = config.scheduler
    if mixer.memory is Memory.ENCODER:
        if config.enable_prefix_caching or not config.max_num_encoder_input_tokens:
            raise ConfigError(
                f"layer {mixer.name} is cross-attention: set max_num_encoder_input_"
                "tokens, and enable_prefix_caching=False"
            )
    elif mixer.memory is Memory.NOTHING:
        room = scheduler.max_num_seqs * config.max_model_len
        chunks = scheduler.max_num_batched_tokens < room
        if (
            config.enable_prefix_caching
            or chunks
            or scheduler.long_prefill_token_threshold
        ):
            raise ConfigError(
                f"layer {mixer.name} is encoder-only, so a prompt has to be computed "
                "in one step: set enable_prefix_caching=False, no long_prefill_token_"
                "threshold, and max_num_batched_tokens to at least max_num_seqs * "
                f"max_model_len = {room}"
            )
