"""kvplugin: a KV cache that vLLM-style LLM engines can steer.

This package is the core: pure Python that imports neither torch nor an engine.
`kvplugin.kernels`, `kvplugin.connectors` and `kvplugin.integration` are the layers
above it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvplugin.block import (
        NULL_BLOCK as NULL_BLOCK,
    )
    from kvplugin.block import (
        KVCacheBlock as KVCacheBlock,
    )
    from kvplugin.block_pool import (
        BlockPool as BlockPool,
    )
    from kvplugin.coordinator import (
        KVCacheCoordinator as KVCacheCoordinator,
    )
    from kvplugin.errors import (
        CapacityError as CapacityError,
    )
    from kvplugin.errors import (
        ConfigError as ConfigError,
    )
    from kvplugin.errors import (
        IntegrityError as IntegrityError,
    )
    from kvplugin.errors import (
        KVPluginError as KVPluginError,
    )
    from kvplugin.errors import (
        LayoutMismatchError as LayoutMismatchError,
    )
    from kvplugin.errors import (
        PluginError as PluginError,
    )
    from kvplugin.errors import (
        TransferError as TransferError,
    )
    from kvplugin.explain import (
        LookupExplanation as LookupExplanation,
    )
    from kvplugin.explain import (
        LookupHistory as LookupHistory,
    )
    from kvplugin.explain import (
        LostHit as LostHit,
    )
    from kvplugin.groups import (
        Capacity as Capacity,
    )
    from kvplugin.groups import (
        GroupingConfig as GroupingConfig,
    )
    from kvplugin.groups import (
        generate_scheduler_kv_cache_config as generate_scheduler_kv_cache_config,
    )
    from kvplugin.groups import (
        get_capacity as get_capacity,
    )
    from kvplugin.groups import (
        get_kv_cache_config_from_groups as get_kv_cache_config_from_groups,
    )
    from kvplugin.groups import (
        get_kv_cache_configs as get_kv_cache_configs,
    )
    from kvplugin.groups import (
        get_kv_cache_groups as get_kv_cache_groups,
    )
    from kvplugin.hashing import (
        HashFormat as HashFormat,
    )
    from kvplugin.hashing import (
        get_hash_format as get_hash_format,
    )
    from kvplugin.hints import (
        RequestHints as RequestHints,
    )
    from kvplugin.hints import (
        hints_of as hints_of,
    )
    from kvplugin.hooks import (
        HOOK_API_VERSION as HOOK_API_VERSION,
    )
    from kvplugin.hooks import (
        Hooks as Hooks,
    )
    from kvplugin.hooks import (
        get_hooks as get_hooks,
    )
    from kvplugin.hooks import (
        hookimpl as hookimpl,
    )
    from kvplugin.hooks import (
        hooks_with as hooks_with,
    )
    from kvplugin.kv_cache_blocks import (
        KVCacheBlocks as KVCacheBlocks,
    )
    from kvplugin.manager import (
        KVCacheManager as KVCacheManager,
    )
    from kvplugin.managers import (
        ManagerSettings as ManagerSettings,
    )
    from kvplugin.managers import (
        SingleTypeKVCacheManager as SingleTypeKVCacheManager,
    )
    from kvplugin.parity import (
        NO_PARITY as NO_PARITY,
    )
    from kvplugin.parity import (
        V019 as V019,
    )
    from kvplugin.parity import (
        Parity as Parity,
    )
    from kvplugin.policies.eviction import (
        BlockContext as BlockContext,
    )
    from kvplugin.policies.eviction import (
        BlockInfo as BlockInfo,
    )
    from kvplugin.policies.eviction import (
        EvictionPolicy as EvictionPolicy,
    )
    from kvplugin.request import (
        Adapter as Adapter,
    )
    from kvplugin.request import (
        MediaItem as MediaItem,
    )
    from kvplugin.request import (
        MediaRange as MediaRange,
    )
    from kvplugin.request import (
        Request as Request,
    )
    from kvplugin.request import (
        RequestError as RequestError,
    )
    from kvplugin.request import (
        RequestLike as RequestLike,
    )
    from kvplugin.residency import (
        Residency as Residency,
    )
    from kvplugin.residency import (
        ResidencySampler as ResidencySampler,
    )
    from kvplugin.spec import (
        AttentionSpec as AttentionSpec,
    )
    from kvplugin.spec import (
        ChunkedLocalAttentionSpec as ChunkedLocalAttentionSpec,
    )
    from kvplugin.spec import (
        CrossAttentionSpec as CrossAttentionSpec,
    )
    from kvplugin.spec import (
        EncoderOnlyAttentionSpec as EncoderOnlyAttentionSpec,
    )
    from kvplugin.spec import (
        EngineLimits as EngineLimits,
    )
    from kvplugin.spec import (
        FullAttentionSpec as FullAttentionSpec,
    )
    from kvplugin.spec import (
        KVCacheConfig as KVCacheConfig,
    )
    from kvplugin.spec import (
        KVCacheGroupSpec as KVCacheGroupSpec,
    )
    from kvplugin.spec import (
        KVCacheSpec as KVCacheSpec,
    )
    from kvplugin.spec import (
        KVCacheTensor as KVCacheTensor,
    )
    from kvplugin.spec import (
        MambaSpec as MambaSpec,
    )
    from kvplugin.spec import (
        MLAAttentionSpec as MLAAttentionSpec,
    )
    from kvplugin.spec import (
        SinkFullAttentionSpec as SinkFullAttentionSpec,
    )
    from kvplugin.spec import (
        SlidingWindowSpec as SlidingWindowSpec,
    )
    from kvplugin.spec import (
        UniformTypeKVCacheSpecs as UniformTypeKVCacheSpecs,
    )
    from kvplugin.stats import (
        PrefixCacheStats as PrefixCacheStats,
    )

_EXPORTS: Final = {
    "kvplugin.block": (
        "KVCacheBlock",
        "NULL_BLOCK",
    ),
    "kvplugin.block_pool": ("BlockPool",),
    "kvplugin.coordinator": ("KVCacheCoordinator",),
    "kvplugin.errors": (
        "CapacityError",
        "ConfigError",
        "IntegrityError",
        "KVPluginError",
        "LayoutMismatchError",
        "PluginError",
        "TransferError",
    ),
    "kvplugin.explain": (
        "LookupExplanation",
        "LookupHistory",
        "LostHit",
    ),
    "kvplugin.groups": (
        "Capacity",
        "GroupingConfig",
        "generate_scheduler_kv_cache_config",
        "get_capacity",
        "get_kv_cache_config_from_groups",
        "get_kv_cache_configs",
        "get_kv_cache_groups",
    ),
    "kvplugin.hashing": (
        "HashFormat",
        "get_hash_format",
    ),
    "kvplugin.hints": (
        "RequestHints",
        "hints_of",
    ),
    "kvplugin.hooks": (
        "HOOK_API_VERSION",
        "Hooks",
        "get_hooks",
        "hookimpl",
        "hooks_with",
    ),
    "kvplugin.kv_cache_blocks": ("KVCacheBlocks",),
    "kvplugin.manager": ("KVCacheManager",),
    "kvplugin.managers": (
        "ManagerSettings",
        "SingleTypeKVCacheManager",
    ),
    "kvplugin.parity": (
        "NO_PARITY",
        "Parity",
        "V019",
    ),
    "kvplugin.request": (
        "Adapter",
        "MediaItem",
        "MediaRange",
        "Request",
        "RequestError",
        "RequestLike",
    ),
    "kvplugin.policies.eviction": (
        "BlockContext",
        "BlockInfo",
        "EvictionPolicy",
    ),
    "kvplugin.residency": (
        "Residency",
        "ResidencySampler",
    ),
    "kvplugin.spec": (
        "AttentionSpec",
        "ChunkedLocalAttentionSpec",
        "CrossAttentionSpec",
        "EncoderOnlyAttentionSpec",
        "EngineLimits",
        "FullAttentionSpec",
        "KVCacheConfig",
        "KVCacheGroupSpec",
        "KVCacheSpec",
        "KVCacheTensor",
        "MLAAttentionSpec",
        "MambaSpec",
        "SinkFullAttentionSpec",
        "SlidingWindowSpec",
        "UniformTypeKVCacheSpecs",
    ),
    "kvplugin.stats": ("PrefixCacheStats",),
}
_MODULE_OF: Final = {
    name: module for module, names in _EXPORTS.items() for name in names
}


def __getattr__(name: str) -> Any:
    """Import what is asked for: an engine's processes import this package whether or
    not they use all of it."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
