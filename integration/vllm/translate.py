"""vLLM's objects, translated once into the contract's frozen data."""

from collections.abc import Mapping
from typing import Any, Final

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
    ModelIdentity,
)
from kvplugin.errors import ConfigError
from kvplugin.integration.vllm.failures import Channel, failed_loads_of
from kvplugin.integration.vllm.versions import has_standard_views
from kvplugin.integration.vllm.vllm019 import has_unnamed_drafter, pages_of_states
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

_WINDOWS: Final = {
    GroupKind.SLIDING_WINDOW: "sliding_window",
    GroupKind.CHUNKED_LOCAL: "attention_chunk_size",
}
"""Where a spec has its `GroupInfo.window`."""

_DEVICES: Final = frozenset({"cpu", "cuda"})
"""Whose memory the copies reach."""


def engine_info(
    vllm_config: Any, kv_cache_config: KVCacheConfig, weight_epoch: int = 0
) -> EngineInfo:
    """What connectors may know of this engine and rank.

    Args:
        vllm_config: vLLM's.
        kv_cache_config: vLLM's, of this rank.
        weight_epoch: see `ModelIdentity.weight_epoch`.

    Raises:
        ConfigError: context parallelism is on; a block's tokens are then spread over
            ranks, which no connector of ours understands.
    """
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"{name} must be 1 for kvplugin's connectors")
    groups, num_blocks = kv_cache_config.kv_cache_groups, kv_cache_config.num_blocks
    reusable = reusable_groups(kv_cache_config)
    drafts = has_unnamed_drafter(vllm_config)
    failures = failed_loads_of(vllm_config, group_kinds(kv_cache_config))
    return EngineInfo(
        engine_id=vllm_config.kv_transfer_config.engine_id,
        groups=tuple(
            _group_info(index, group, index in reusable, num_blocks, drafts)
            for index, group in enumerate(groups)
        ),
        num_blocks=num_blocks,
        hash_block_size=hash_block_size(vllm_config, kv_cache_config),
        world_size=parallel.world_size,
        rank=parallel.rank % parallel.world_size,
        tp_size=parallel.tensor_parallel_size,
        max_model_len=vllm_config.model_config.max_model_len,
        max_step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        model=_model_identity(vllm_config, weight_epoch),
        reports_failed_loads=failures.channel is not Channel.NONE,
        prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
        # 0.19 does not ask: the adapter ends stores in the last step (`vllm019`).
        asks_pending_work=True,
    )


def _model_identity(vllm_config: Any, weight_epoch: int) -> ModelIdentity:
    model = vllm_config.model_config
    return ModelIdentity(
        name=str(model.model),
        revision=str(model.revision or ""),
        dtype=_dtype_name(model.dtype),
        quantization=str(model.quantization or ""),
        backends=_backends(vllm_config),
        hash_algorithm=str(vllm_config.cache_config.prefix_caching_hash_algo),
        weight_epoch=weight_epoch,
    )


def reusable_groups(kv_cache_config: Any) -> frozenset[int]:
    """Groups whose blocks their hashes find again."""
    groups = kv_cache_config.kv_cache_groups
    # Before 0.32 all of them: there is no scratch memory among them.
    ids = getattr(kv_cache_config, "prefix_cacheable_group_ids", range(len(groups)))
    return frozenset(i for i in ids if _is_reusable(groups[i].kv_cache_spec))


def _is_reusable(spec: KVCacheSpec) -> bool:
    if isinstance(spec, MambaSpec):
        return spec.mamba_cache_mode != "none"
    return not isinstance(spec, CrossAttentionSpec)


def _group_info(
    index: int,
    group: Any,
    reusable: bool,
    num_blocks: int,
    drafts: bool,
) -> GroupInfo:
    spec, specs = group.kv_cache_spec, layer_specs(group)
    first = next(iter(specs.values()), spec)
    kind = _kind(group)
    return GroupInfo(
        index=index,
        kind=kind,
        block_size=spec.block_size,
        layers={
            layer: _page(layer_spec, num_blocks) for layer, layer_spec in specs.items()
        },
        window=getattr(first, _WINDOWS[kind]) if kind in _WINDOWS else 0,
        extra_history=getattr(first, "extra_retained_tokens", 0),
        state_every_block=getattr(first, "mamba_cache_mode", "") == "all",
        has_drafter=getattr(group, "is_eagle_group", drafts),
        reusable=reusable,
    )


def group_kinds(kv_cache_config: KVCacheConfig) -> list[GroupKind]:
    """The kind of each group."""
    return [_kind(group) for group in kv_cache_config.kv_cache_groups]


def layer_specs(group: Any) -> Mapping[str, KVCacheSpec]:
    """The spec of each layer of a KV cache group."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return spec.kv_cache_specs
    return dict.fromkeys(group.layer_names, spec)


def _kind(group: Any) -> GroupKind:
    # The ids of such a group count blocks of another pool.
    if getattr(group, "host_resident", False):
        return GroupKind.OTHER
    specs = layer_specs(group).values() or [group.kv_cache_spec]
    kinds = {_kind_of(spec) for spec in specs}
    # Layers with latent and with plain keys may share one.
    if kinds == {GroupKind.FULL, GroupKind.MLA}:
        return GroupKind.FULL
    return kinds.pop() if len(kinds) == 1 else GroupKind.OTHER


def _kind_of(spec: KVCacheSpec) -> GroupKind:
    # Full attention to the prompt, and a window over what is generated.
    if hasattr(spec, "rswa_window"):
        return GroupKind.OTHER
    return next(
        (kind for cls, kind in _KINDS if isinstance(spec, cls)), GroupKind.OTHER
    )


def _page(spec: KVCacheSpec, num_blocks: int) -> PageLayout:
    return PageLayout(
        page_bytes=spec.page_size_bytes,
        num_blocks=num_blocks,
        padded=getattr(spec, "page_size_padded", None) is not None,
        interior=f"{type(spec).__name__}/{_dtype_name(getattr(spec, 'dtype', ''))}",
    )


def _backends(vllm_config: Any) -> tuple[str, ...]:
    """Attention backends of the layers, where the model is: nothing beside the
    scheduler of a process without one."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    return tuple(
        sorted(
            {
                layer.get_attn_backend().get_name()
                for layer in layers
                if hasattr(layer, "get_attn_backend")
            }
        )
    )


def hash_block_size(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens that one hash of a request covers."""
    if not has_standard_views():
        return int(vllm_config.cache_config.block_size)
    if (known := kv_cache_config.hash_block_size) is not None:
        return int(known)
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def kv_tensors(kv_caches: Mapping[str, Any], num_blocks: int) -> dict[str, KVTensor]:
    """Descriptors of the KV tensors by layer.

    Raises:
        ConfigError: a tensor is in memory that no copy engine reaches.
    """
    tensors = {
        layer: cache if isinstance(cache, torch.Tensor) else pages_of_states(cache)
        for layer, cache in kv_caches.items()
    }
    if devices := {cache.device.type for cache in tensors.values()} - _DEVICES:
        raise ConfigError(
            f"the KV cache is in memory of {', '.join(sorted(devices))}: kvplugin "
            f"copies KV caches in memory of {', '.join(sorted(_DEVICES))}"
        )
    return {
        layer: KVTensor(cache.data_ptr(), _layout(cache, num_blocks), str(cache.device))
        for layer, cache in tensors.items()
    }


def _layout(cache: torch.Tensor, num_blocks: int) -> TensorLayout:
    # Before 0.32, FlashAttention's caches have K and V outermost: (2, blocks, ...).
    outer = has_standard_views() or cache.shape[0] >= num_blocks
    if not outer and cache.shape[1] != num_blocks:
        # Several blocks of the attention kernel to one of the manager.
        cache = cache.unflatten(1, (num_blocks, -1))
    return TensorLayout(
        shape=tuple(cache.shape),
        strides=tuple(s * cache.element_size() for s in cache.stride()),
        itemsize=cache.element_size(),
        dtype=_dtype_name(cache.dtype),
        block_axis=0 if outer else 1,
    )
