"""Make specs agree: on one kind (hybrid manager off), on one page size (hybrid).

After vLLM 0.19.1 `v1/core/kv_cache_utils.py`, without changing the caller's specs.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace

from kvplugin.errors import ConfigError
from kvplugin.spec import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    NotMergeableError,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

logger = logging.getLogger("vllm.kvplugin.groups")


def is_kv_cache_spec_uniform(specs: Mapping[str, KVCacheSpec]) -> bool:
    """Whether one spec can stand for all layers; no layers count as uniform."""
    values = list(specs.values())
    if not values:
        return True
    try:
        values[0].merge(values)
    except NotMergeableError:
        return False
    return True


def unify_hybrid_kv_cache_specs(
    specs: Mapping[str, KVCacheSpec],
) -> dict[str, KVCacheSpec]:
    """The specs as one kind: windows and chunks become full attention.

    Only where full attention is among them, as in vLLM: a model of windows alone keeps
    its kind, and needs no unifying if all its windows are equal.

    Raises:
        ConfigError: the result is still of several kinds (Mamba beside attention,
            several windows without full attention, several block sizes).
    """
    if _is_one_kind(specs):
        return dict(specs)
    logger.warning(
        "Hybrid KV cache manager is disabled for this hybrid model: windows and "
        "chunks are computed as before, but their KV cache is kept for all tokens."
    )
    unified = dict(specs)
    if any(isinstance(spec, FullAttentionSpec) for spec in specs.values()):
        unified = {name: _as_full(spec) for name, spec in specs.items()}
    if not _is_one_kind(unified):
        kinds = {
            f"{type(spec).__name__} (block_size {spec.block_size})"
            for spec in specs.values()
        }
        raise ConfigError(
            "Hybrid KV cache manager is disabled but failed to convert the KV cache "
            f"specs to one unified type. The layers are {', '.join(sorted(kinds))}. "
            "Set disable_hybrid_kv_cache_manager to false."
        )
    return unified


def _is_one_kind(specs: Mapping[str, KVCacheSpec]) -> bool:
    uniform_type = UniformTypeKVCacheSpecs.is_uniform_type(specs)
    return uniform_type or is_kv_cache_spec_uniform(specs)


def _as_full(spec: KVCacheSpec) -> KVCacheSpec:
    """Full attention of the same page that remembers its window or chunk."""
    if not isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
        return spec
    return FullAttentionSpec(
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        dtype=spec.dtype,
        page_size_padded=spec.page_size_padded,
        sliding_window=getattr(spec, "sliding_window", None),
        attention_chunk_size=getattr(spec, "attention_chunk_size", None),
    )


def unify_kv_cache_spec_page_size(
    specs: Mapping[str, KVCacheSpec], *, pad: bool = False
) -> dict[str, KVCacheSpec]:
    """The specs with one page size, the largest among them.

    A smaller page gets a larger block if that makes it exactly the largest. With `pad`
    the rest is padded, except MLA: sparse MLA reads its cache in whole token rows
    (vLLM 0.32 `v1/core/kv_cache_utils.py` pads the same kinds).

    Raises:
        ConfigError: a page can be made to fit in neither way.
    """
    largest = max((spec.page_size_bytes for spec in specs.values()), default=0)
    return {
        name: _with_page_size(name, spec, largest, pad) for name, spec in specs.items()
    }


def _with_page_size(
    name: str, spec: KVCacheSpec, largest: int, pad: bool
) -> KVCacheSpec:
    if spec.page_size_bytes == largest:
        return spec
    if getattr(spec, "page_size_padded", None) is None:
        ratio = largest // spec.page_size_bytes
        scaled = spec.copy_with_new_block_size(spec.block_size * ratio)
        if scaled.page_size_bytes == largest:
            return scaled
    if isinstance(spec, MLAAttentionSpec) or not isinstance(
        spec, AttentionSpec | MambaSpec
    ):
        way_out = "Pages of this kind cannot be padded."
    elif pad:
        return replace(spec, page_size_padded=largest)
    else:
        way_out = "Set pad_page_sizes to pad it, if the attention backend allows it."
    raise ConfigError(
        "The page size of the layer is not divisible by the maximum page size. Cannot "
        f"unify by adjusting block_size. Layer {name!r} ({type(spec).__name__}) has "
        f"pages of {spec.page_size_bytes} bytes, the largest has {largest}. {way_out}"
    )
