"""Managers: what a group's attention type means for blocks, one file a type."""

from typing import Final

from kvplugin.block_pool import BlockPool
from kvplugin.errors import ConfigError
from kvplugin.managers.base import NEVER, ManagerSettings, SingleTypeKVCacheManager
from kvplugin.managers.chunked_local import ChunkedLocalAttentionManager
from kvplugin.managers.cross_attention import CrossAttentionManager
from kvplugin.managers.full import (
    FullAttentionManager,
    MLAManager,
    SinkFullAttentionManager,
)
from kvplugin.managers.mamba import AlignedMambaManager, MambaManager
from kvplugin.managers.sliding_window import SlidingWindowManager
from kvplugin.spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

_MANAGERS: Final[dict[type[KVCacheSpec], type[SingleTypeKVCacheManager]]] = {
    FullAttentionSpec: FullAttentionManager,
    MLAAttentionSpec: MLAManager,
    SlidingWindowSpec: SlidingWindowManager,
    ChunkedLocalAttentionSpec: ChunkedLocalAttentionManager,
    MambaSpec: MambaManager,
    CrossAttentionSpec: CrossAttentionManager,
    SinkFullAttentionSpec: SinkFullAttentionManager,
}


def make_manager(
    spec: KVCacheSpec, block_pool: BlockPool, settings: ManagerSettings
) -> SingleTypeKVCacheManager:
    """The manager for a group of this spec.

    Chosen by the spec's exact type: a subclass means other semantics, for which a
    plugin brings the manager (`kvp_make_manager`).

    Raises:
        ConfigError: no manager for the type, or spec and settings do not go together.
    """
    if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align":
        return AlignedMambaManager(spec, block_pool, settings)
    kind = _MANAGERS.get(type(spec))
    if kind is None:
        raise ConfigError(
            f"no manager for groups of {type(spec).__name__}: layers of this type keep "
            f"no KV cache here, or a plugin with kvp_make_manager must bring one"
        )
    return kind(spec, block_pool, settings)


__all__ = [
    "NEVER",
    "AlignedMambaManager",
    "ChunkedLocalAttentionManager",
    "CrossAttentionManager",
    "FullAttentionManager",
    "MLAManager",
    "MambaManager",
    "ManagerSettings",
    "SingleTypeKVCacheManager",
    "SinkFullAttentionManager",
    "SlidingWindowManager",
    "make_manager",
]
