"""What one layer's block costs, and what scheduler and worker agree on.

`KVCacheSpec` and its kinds describe one layer; `KVCacheConfig` is the result of
grouping them (`kvplugin.groups`). Names follow vLLM 0.19.1
`v1/kv_cache_interface.py`.
"""

from kvplugin.spec.attention import (
    FP8_DS_MLA,
    FP8_DS_MLA_BYTES,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from kvplugin.spec.base import AttentionSpec, KVCacheSpec, NotMergeableError
from kvplugin.spec.config import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from kvplugin.spec.dtypes import DTYPE_BYTES, Dtype, dtype_bytes, dtype_name
from kvplugin.spec.limits import (
    MAMBA_CACHE_MODES,
    EngineLimits,
    cdiv,
    check_mamba_cache_mode,
    check_positive,
)
from kvplugin.spec.mamba import MambaSpec
from kvplugin.spec.uniform import UniformTypeKVCacheSpecs, layer_spec
from kvplugin.spec.zeroing import UNWRITTEN, Unwritten, unwritten, zeroing_reasons

__all__ = [
    "DTYPE_BYTES",
    "FP8_DS_MLA",
    "FP8_DS_MLA_BYTES",
    "MAMBA_CACHE_MODES",
    "UNWRITTEN",
    "AttentionSpec",
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "Dtype",
    "EncoderOnlyAttentionSpec",
    "EngineLimits",
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheSpec",
    "KVCacheTensor",
    "MLAAttentionSpec",
    "MambaSpec",
    "NotMergeableError",
    "SinkFullAttentionSpec",
    "SlidingWindowSpec",
    "UniformTypeKVCacheSpecs",
    "Unwritten",
    "cdiv",
    "check_mamba_cache_mode",
    "check_positive",
    "dtype_bytes",
    "dtype_name",
    "layer_spec",
    "unwritten",
    "zeroing_reasons",
]
