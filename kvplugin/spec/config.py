"""KVCacheConfig: what scheduler and worker agree on.

The scheduler reads groups and the number of blocks; the worker reads tensors.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvplugin.spec.base import KVCacheSpec
from kvplugin.spec.mamba import MambaSpec
from kvplugin.spec.uniform import UniformTypeKVCacheSpecs, layer_spec
from kvplugin.spec.zeroing import zeroing_reasons


@dataclass(frozen=True)
class KVCacheTensor:
    """One allocation of a worker."""

    size: int
    """Bytes."""
    shared_by: tuple[str, ...]
    """Layers that lie in it, at most one of each group: block ids of different groups
    are different, so they never meet."""

    def __post_init__(self) -> None:
        """Freeze the names."""
        object.__setattr__(self, "shared_by", tuple(self.shared_by))


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers that share a block table; one layer, as a manager sees it."""

    layer_names: tuple[str, ...]
    """Layers with a cache of their own, then those that use another's."""
    kv_cache_spec: KVCacheSpec
    kv_sharing_targets: Mapping[str, str] = field(default_factory=dict)
    """Layer without a cache of its own -> layer of this group whose cache it uses."""
    is_eagle_group: bool = False
    """Whether draft layers (EAGLE, MTP) are among the layers; as in 0.32."""

    def __post_init__(self) -> None:
        """Freeze the names."""
        object.__setattr__(self, "layer_names", tuple(self.layer_names))
        object.__setattr__(self, "kv_sharing_targets", dict(self.kv_sharing_targets))

    @property
    def own_layer_names(self) -> tuple[str, ...]:
        """Layers with a cache of their own, in order."""
        sharing = self.kv_sharing_targets
        return tuple(name for name in self.layer_names if name not in sharing)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in all layers of this group."""
        return sum(
            layer_spec(self.kv_cache_spec, name).page_size_bytes
            for name in self.own_layer_names
        )

    @property
    def data_bytes_per_block(self) -> int:
        """The same without padding of pages."""
        return sum(
            layer_spec(self.kv_cache_spec, name).real_page_size_bytes
            for name in self.own_layer_names
        )


@dataclass(frozen=True)
class KVCacheConfig:
    """The KV cache of one worker, or of the scheduler."""

    num_blocks: int
    """Blocks of the pool, the null block included."""
    kv_cache_tensors: tuple[KVCacheTensor, ...]
    kv_cache_groups: tuple[KVCacheGroupSpec, ...]

    def __post_init__(self) -> None:
        """Freeze the lists."""
        object.__setattr__(self, "kv_cache_tensors", tuple(self.kv_cache_tensors))
        object.__setattr__(self, "kv_cache_groups", tuple(self.kv_cache_groups))

    @property
    def has_mamba_layers(self) -> bool:
        """Whether some layer keeps recurrent state."""
        return any(isinstance(spec, MambaSpec) for spec in self._specs())

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        """Whether new blocks must be zeroed before they are read.

        See `kvplugin.spec.zeroing_reasons`.
        """
        return bool(zeroing_reasons(self.kv_cache_groups))

    def _specs(self) -> Iterable[KVCacheSpec]:
        """The specs of all layers that have one of their own."""
        for group in self.kv_cache_groups:
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                yield from spec.kv_cache_specs.values()
            else:
                yield spec
