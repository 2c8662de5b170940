"""Which layer lies in which buffer, read from a KVCacheConfig and checked."""

from collections.abc import Mapping
from typing import NamedTuple

from kvplugin.errors import ConfigError
from kvplugin.spec import (
    AttentionSpec,
    KVCacheConfig,
    MambaSpec,
    layer_spec,
)


class Place(NamedTuple):
    """Where a layer with a cache of its own lies."""

    group: int
    tensor: int
    """Index among `KVCacheConfig.kv_cache_tensors`."""
    spec: AttentionSpec | MambaSpec


def layer_places(config: KVCacheConfig) -> dict[str, Place]:
    """The place of every layer that has a cache of its own.

    Raises:
        ConfigError: tensors and groups do not name the same layers, a tensor is not
            the blocks of its layers, two of its layers are of one group, a layer's
            kind has no tensors, or a layer uses the cache of one without.
    """
    grouped = {
        name: i
        for i, group in enumerate(config.kv_cache_groups)
        for name in group.own_layer_names
    }
    placed = [n for tensor in config.kv_cache_tensors for n in tensor.shared_by]
    twice = {name for name in placed if placed.count(name) > 1}
    if odd := (set(placed) ^ set(grouped)) | twice:
        raise ConfigError(
            f"layers {', '.join(sorted(odd))} are not in exactly one KV cache tensor "
            "and one KV cache group"
        )
    places = {}
    for i, tensor in enumerate(config.kv_cache_tensors):
        for name in tensor.shared_by:
            spec = layer_spec(config.kv_cache_groups[grouped[name]].kv_cache_spec, name)
            if not isinstance(spec, AttentionSpec | MambaSpec):
                raise ConfigError(
                    f"layer {name!r}: a {type(spec).__name__} has no tensors"
                )
            places[name] = Place(grouped[name], i, spec)
    for name, place in places.items():
        _check_place(config, name, place)
    _check_groups(config, places)
    _check_targets(config, places)
    return places


def _check_place(config: KVCacheConfig, name: str, place: Place) -> None:
    spec, size = place.spec, config.kv_cache_tensors[place.tensor].size
    if size != config.num_blocks * spec.page_size_bytes:
        raise ConfigError(
            f"layer {name!r}: its tensor of {size} bytes is not {config.num_blocks} "
            f"pages of {spec.page_size_bytes}. {spec}"
        )


def _check_groups(config: KVCacheConfig, places: Mapping[str, Place]) -> None:
    for tensor in config.kv_cache_tensors:
        if len({places[name].group for name in tensor.shared_by}) < len(
            tensor.shared_by
        ):
            raise ConfigError(
                f"layers {', '.join(tensor.shared_by)} share a KV cache tensor, but "
                "two of them are of one group: they would overwrite each other"
            )


def _check_targets(config: KVCacheConfig, places: Mapping[str, Place]) -> None:
    for group in config.kv_cache_groups:
        for name, target in group.kv_sharing_targets.items():
            if target not in places:
                raise ConfigError(
                    f"layer {name!r} uses the KV cache of {target!r}, which has none"
                )
