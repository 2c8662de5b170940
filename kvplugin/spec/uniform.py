"""Layers of one kind and different shapes, as one spec."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from kvplugin.errors import ConfigError
from kvplugin.spec.base import KVCacheSpec
from kvplugin.spec.limits import EngineLimits


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Layers that need the same token slots though their pages differ in size.

    They share a block table; each layer has a tensor of its own, so that pages need
    not agree. A page of this spec is one block of all its layers.
    """

    kv_cache_specs: Mapping[str, KVCacheSpec]
    """Layer name -> its spec; at least one."""

    def __post_init__(self) -> None:
        """Keep a copy of the mapping and refuse layers that do not fit together.

        Raises:
            ConfigError: no layers, or layers of different kinds or block sizes.
        """
        super().__post_init__()
        object.__setattr__(self, "kv_cache_specs", dict(self.kv_cache_specs))
        if not self.kv_cache_specs or not self.is_uniform_type(self.kv_cache_specs):
            raise ConfigError(
                "UniformTypeKVCacheSpecs.kv_cache_specs must be layers of one kind"
            )
        if self.block_size != next(iter(self.kv_cache_specs.values())).block_size:
            raise ConfigError(
                "UniformTypeKVCacheSpecs.block_size must be that of its layers"
            )

    def __hash__(self) -> int:
        """Equal specs hash equally, in whatever order their layers came."""
        return hash((self.block_size, frozenset(self.kv_cache_specs.items())))

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of data in one block of all layers."""
        return sum(spec.real_page_size_bytes for spec in self.kv_cache_specs.values())

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of all layers."""
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())

    def max_blocks_per_request(self, limits: EngineLimits) -> int:
        """Blocks of the layer that needs most."""
        specs = self.kv_cache_specs.values()
        return max(spec.max_blocks_per_request(limits) for spec in specs)

    def min_blocks_per_request(self, limits: EngineLimits) -> int:
        """Blocks of the layer that needs most for one token."""
        specs = self.kv_cache_specs.values()
        return max(spec.min_blocks_per_request(limits) for spec in specs)

    @property
    def reserved_blocks(self) -> int:
        """Those of one layer: all have the same block table."""
        return max(spec.reserved_blocks for spec in self.kv_cache_specs.values())

    @classmethod
    def is_uniform_type(cls, kv_cache_specs: Mapping[str, KVCacheSpec]) -> bool:
        """Whether these layers always need the same token slots, block by block."""
        kinds = {
            (spec.block_size, spec.uniform_type_key, _foreign_type(spec))
            for spec in kv_cache_specs.values()
        }
        return len(kinds) <= 1

    @classmethod
    def from_specs(cls, kv_cache_specs: Mapping[str, KVCacheSpec]) -> Self | None:
        """The layers as one spec, or None if they are not of one kind."""
        if not kv_cache_specs or not cls.is_uniform_type(kv_cache_specs):
            return None
        block_size = next(iter(kv_cache_specs.values())).block_size
        return cls(block_size=block_size, kv_cache_specs=kv_cache_specs)


def layer_spec(group_spec: KVCacheSpec, layer_name: str) -> KVCacheSpec:
    """The spec of one layer of a group that has `group_spec`."""
    if isinstance(group_spec, UniformTypeKVCacheSpecs):
        return group_spec.kv_cache_specs[layer_name]
    return group_spec


def _foreign_type(spec: KVCacheSpec) -> type | None:
    """The type of a spec that is not one of ours: a subclass inherits the key and may
    mean other semantics, so it shares a block table with its like only."""
    ours = type(spec).__module__.startswith(f"{__package__}.")
    return None if ours else type(spec)
