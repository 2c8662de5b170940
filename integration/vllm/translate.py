"""vLLM's objects, translated once into the contract's frozen data."""

from collections.abc import Mapping
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvplugin.contract import (
    EngineInfo,
    GroupInfo,
    GroupKind,
    KVTensor,
    ScheduledRequest,
    SchedulerHalf,
    Step,
)
from kvplugin.errors import ConfigError
from kvplugin.integration.vllm.versions import has_standard_views
from kvplugin.layout import PageLayout, TensorLayout

# Subclasses first: MLA is a FullAttentionSpec to vLLM.
_KINDS: tuple[tuple[type, GroupKind], ...] = (
    (MLAAttentionSpec, GroupKind.MLA),
    (FullAttentionSpec, GroupKind.FULL),
    (SlidingWindowSpec, GroupKind.SLIDING_WINDOW),
    (ChunkedLocalAttentionSpec, GroupKind.CHUNKED_LOCAL),
    (MambaSpec, GroupKind.MAMBA),
    (CrossAttentionSpec, GroupKind.CROSS_ATTENTION),
)


def engine_info(vllm_config: Any, kv_cache_config: KVCacheConfig) -> EngineInfo:
    """What connectors may know of this engine and rank.

    Raises:
        ConfigError: context parallelism is on; a block's tokens are then spread over
            ranks, which no connector of ours understands.
    """
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"{name} must be 1 for kvplugin's connectors")
    return EngineInfo(
        engine_id=vllm_config.kv_transfer_config.engine_id,
        groups=tuple(
            _group_info(index, group, kv_cache_config.num_blocks)
            for index, group in enumerate(kv_cache_config.kv_cache_groups)
        ),
        num_blocks=kv_cache_config.num_blocks,
        hash_block_size=_hash_block_size(vllm_config, kv_cache_config),
        world_size=parallel.world_size,
        rank=parallel.rank % parallel.world_size,
        prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
        asks_pending_work=has_standard_views(),
    )


def _group_info(index: int, group: Any, num_blocks: int) -> GroupInfo:
    spec = group.kv_cache_spec
    specs: Mapping[str, KVCacheSpec] = (
        spec.kv_cache_specs
        if isinstance(spec, UniformTypeKVCacheSpecs)
        else dict.fromkeys(group.layer_names, spec)
    )
    return GroupInfo(
        index=index,
        kind=_kind(next(iter(specs.values()), spec)),
        block_size=spec.block_size,
        layers={
            layer: _page(layer_spec, num_blocks) for layer, layer_spec in specs.items()
        },
    )


def _kind(spec: KVCacheSpec) -> GroupKind:
    return next(
        (kind for cls, kind in _KINDS if isinstance(spec, cls)), GroupKind.OTHER
    )


def _page(spec: KVCacheSpec, num_blocks: int) -> PageLayout:
    return PageLayout(
        page_bytes=spec.page_size_bytes,
        num_blocks=num_blocks,
        padded=getattr(spec, "page_size_padded", None) is not None,
        interior=f"{type(spec).__name__}/{getattr(spec, 'dtype', '')}",
    )


def _hash_block_size(vllm_config: Any, kv_cache_config: KVCacheConfig) -> int:
    if not has_standard_views():
        return int(vllm_config.cache_config.block_size)
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def kv_tensors(kv_caches: Mapping[str, Any], num_blocks: int) -> dict[str, KVTensor]:
    """Descriptors of the KV tensors by layer; layers whose cache is not one tensor
    (Mamba states of older versions) are left out.

    Raises:
        ConfigError: a tensor is in memory that the CPU cannot address.
    """
    tensors = {
        layer: cache
        for layer, cache in kv_caches.items()
        if isinstance(cache, torch.Tensor)
    }
    devices = {cache.device.type for cache in tensors.values()} - {"cpu"}
    if devices:
        raise ConfigError(
            f"the KV cache is in memory of {', '.join(devices)}: this version of "
            "kvplugin copies KV caches in CPU memory only"
        )
    return {
        layer: KVTensor(cache.data_ptr(), _layout(cache, num_blocks))
        for layer, cache in tensors.items()
    }


def _layout(cache: torch.Tensor, num_blocks: int) -> TensorLayout:
    # Before 0.32, FlashAttention's caches have K and V outermost: (2, blocks, ...).
    outer = has_standard_views() or cache.shape[0] >= num_blocks
    return TensorLayout(
        shape=tuple(cache.shape),
        strides=tuple(s * cache.element_size() for s in cache.stride()),
        itemsize=cache.element_size(),
        dtype=str(cache.dtype).removeprefix("torch."),
        block_axis=0 if outer else 1,
    )


def step(half: SchedulerHalf, output: Any) -> Step:
    """The part of a `SchedulerOutput` that `half` watches."""
    watched, counts = half.watched, output.num_scheduled_tokens
    scheduled = []
    if watched:
        for new in output.scheduled_new_reqs:
            if new.req_id in watched:
                scheduled.append(
                    ScheduledRequest(
                        new.req_id, (), new.num_computed_tokens, counts[new.req_id]
                    )
                )
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            if request_id in watched:
                resumed = request_id in cached.resumed_req_ids
                scheduled.append(
                    ScheduledRequest(
                        request_id,
                        () if resumed else cached.new_block_ids[i] or (),
                        cached.num_computed_tokens[i],
                        counts[request_id],
                    )
                )
    return Step(
        scheduled,
        output.preempted_req_ids or (),
        output.total_num_scheduled_tokens,
    )
