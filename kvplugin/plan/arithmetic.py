"""From a model's layers to bytes a token, bytes a sequence, concurrency and waste."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from kvplugin.errors import ConfigError
from kvplugin.groups import (
    Capacity,
    GroupingConfig,
    align_mamba_specs,
    get_capacity,
    get_kv_cache_configs,
)
from kvplugin.plan.models import CacheOptions, ModelShape, layers_of
from kvplugin.spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
)


@dataclass(frozen=True)
class CachePlan:
    """What a worker's memory holds of a model's cache."""

    specs: Mapping[str, KVCacheSpec]
    """Layer name -> spec, before page sizes were unified."""
    config: KVCacheConfig
    capacity: Capacity
    growing_bytes_per_token: Fraction
    """Bytes that each further token adds for good: full attention, latent or not (and
    with `vllm019_arithmetic` recurrent layers that keep a state a block)."""
    state_bytes_per_sequence: int
    """Bytes of the recurrent states of a sequence, whatever its length."""
    sequence_bytes: int
    """Bytes of the data of a sequence of `max_model_len` tokens at its fullest."""
    block_bytes: int
    """Bytes of the blocks that such a sequence holds; all that exceeds
    `sequence_bytes` is lost to padding of pages and of groups."""

    @property
    def waste(self) -> float:
        """Part of `block_bytes` that is padding."""
        if not self.block_bytes:
            return 0.0
        return 1 - self.sequence_bytes / self.block_bytes


def plan_model(
    model: ModelShape,
    config: GroupingConfig,
    available_memory: int,
    options: CacheOptions | None = None,
    *,
    mamba_chunk_size: int = 256,
) -> CachePlan:
    """Plan one worker of a model of the data file.

    Attention blocks grow until their page holds a recurrent state, as engines do.

    Args:
        model: from `load_model`.
        config: limits of requests and choices of grouping.
        available_memory: bytes for KV cache.
        options: how the cache is kept; None takes the defaults.
        mamba_chunk_size: tokens of the recurrent kernel's chunk, for mode `all`.

    Raises:
        CapacityError: a request of full length does not fit.
        ConfigError: the layers cannot be grouped.
    """
    specs = align_mamba_specs(
        layers_of(model, options or CacheOptions()),
        max_model_len=config.max_model_len,
        mamba_chunk_size=mamba_chunk_size,
    )
    return plan_specs(specs, config, available_memory)


def plan_specs(
    specs: Mapping[str, KVCacheSpec], config: GroupingConfig, available_memory: int
) -> CachePlan:
    """Plan one worker with these layers.

    Raises:
        CapacityError: a request of full length does not fit.
        ConfigError: there are no layers, or they cannot be grouped.
    """
    if not specs:
        raise ConfigError("there is nothing to plan: no layer keeps a KV cache")
    resolved = get_kv_cache_configs([specs], config, [available_memory])
    kv_config, limits = resolved.configs[0], resolved.config
    capacity = get_capacity(kv_config, limits)
    sequence_bytes = sum(
        group.data_bytes_per_block * group.kv_cache_spec.max_blocks_per_request(limits)
        for group in kv_config.kv_cache_groups
    )
    return CachePlan(
        specs=dict(specs),
        config=kv_config,
        capacity=capacity,
        growing_bytes_per_token=sum(
            (_growth(spec, limits) for spec in specs.values()), Fraction(0)
        ),
        state_bytes_per_sequence=sum(
            spec.real_page_size_bytes
            for spec in specs.values()
            if isinstance(spec, MambaSpec)
        ),
        sequence_bytes=sequence_bytes,
        block_bytes=capacity.blocks_per_request * capacity.bytes_per_block,
    )


def _growth(spec: KVCacheSpec, config: GroupingConfig) -> Fraction:
    """Bytes a token that the layer keeps for the life of the sequence."""
    tokens = spec.block_size
    if isinstance(spec, FullAttentionSpec):
        tokens *= config.context_parallel_size
    elif not (config.vllm019_arithmetic and _keeps_all_states(spec, config)):
        return Fraction(0)
    return Fraction(spec.real_page_size_bytes, tokens)


def _keeps_all_states(spec: KVCacheSpec, config: GroupingConfig) -> bool:
    if not isinstance(spec, MambaSpec):
        return False
    return (config.mamba_cache_mode or spec.mamba_cache_mode) == "all"


def longest_model_len(
    model: ModelShape,
    config: GroupingConfig,
    available_memory: int,
    options: CacheOptions | None = None,
) -> int:
    """Longest `max_model_len` up to the configured one that one request can have.

    Raises:
        CapacityError: not even one token fits.
        ConfigError: the layers cannot be grouped.
    """
    fitting = replace(config, auto_fit_max_model_len=True)
    return plan_model(model, fitting, available_memory, options).capacity.max_model_len
