"""From an engine's layers to KV cache groups."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvplugin.errors import ConfigError
from kvplugin.groups import GroupingConfig, get_kv_cache_groups
from kvplugin.spec import KVCacheGroupSpec, KVCacheSpec


class KVLayer(Protocol):
    """A layer of the engine's model."""

    @property
    def name(self) -> str:
        """Unique in the model."""

    @property
    def kv_sharing_target(self) -> str | None:
        """The layer whose cache it uses in place of one of its own."""

    def kv_cache_spec(self) -> KVCacheSpec | None:
        """Its cache; None if it has none. Not asked of layers that share."""


@dataclass(frozen=True, slots=True)
class CollectedLayers:
    """What the layers want."""

    specs: dict[str, KVCacheSpec] = field(default_factory=dict)
    """Layer name -> its cache, in the order of the model."""
    kv_sharing_targets: dict[str, str] = field(default_factory=dict)
    """Layer without a cache of its own -> the layer whose cache it uses."""


def collect_layers(layers: Iterable[KVLayer]) -> CollectedLayers:
    """Ask every layer.

    Raises:
        ConfigError: two layers have one name.
    """
    collected = CollectedLayers()
    names = set()
    for layer in layers:
        if layer.name in names:
            raise ConfigError(f"two layers are called {layer.name!r}: rename one")
        names.add(layer.name)
        if layer.kv_sharing_target is not None:
            collected.kv_sharing_targets[layer.name] = layer.kv_sharing_target
        elif (spec := layer.kv_cache_spec()) is not None:
            collected.specs[layer.name] = spec
    return collected


def group_layers(
    layers: Iterable[KVLayer], config: GroupingConfig
) -> list[KVCacheGroupSpec]:
    """The groups of an engine's layers; those that share end in their target's.

    Args:
        layers: in the order of the model.
        config: limits and choices; its `kv_sharing_targets` are the layers' own.

    Raises:
        ConfigError: two layers have one name, a target does not exist or has no
            cache, or the layers cannot be grouped (`get_kv_cache_groups`).
    """
    collected = collect_layers(layers)
    config = replace(config, kv_sharing_targets=collected.kv_sharing_targets)
    return get_kv_cache_groups(collected.specs, config)
