"""From groups and memory to the configuration of each worker, and of the scheduler."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvplugin.errors import ConfigError
from kvplugin.groups.config import GroupingConfig
from kvplugin.groups.memory import (
    auto_fit_max_model_len,
    bytes_per_block,
    check_available_memory,
    check_enough_memory,
    uniform_page_size,
    usable_bytes,
)
from kvplugin.groups.split import check_groups, get_kv_cache_groups
from kvplugin.spec import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    UniformTypeKVCacheSpecs,
)

logger = logging.getLogger("vllm.kvplugin.groups")


@dataclass(frozen=True)
class ResolvedKVCache:
    """What `get_kv_cache_configs` found."""

    configs: tuple[KVCacheConfig, ...]
    """One a worker, in the order given; all with the same number of blocks."""
    config: GroupingConfig
    """The configuration asked with, `max_model_len` lowered where auto-fit did."""


def get_kv_cache_configs(
    worker_specs: Sequence[Mapping[str, KVCacheSpec]],
    config: GroupingConfig,
    available_memory: Sequence[int],
    groups: Sequence[KVCacheGroupSpec] | None = None,
) -> ResolvedKVCache:
    """The configurations of all workers, checked against their memory.

    Layers of all workers are grouped together, so that one block table serves tensor
    and pipeline ranks alike; each worker keeps its layers of every group, and all get
    the blocks of the poorest. Workers without layers (a pipeline rank of other layers)
    need no memory and get no tensors.

    Args:
        worker_specs: each worker's layers and their specs.
        config: limits and choices; not changed.
        available_memory: each worker's bytes for KV cache.
        groups: groups of all layers, where a plugin made them; None makes them here.

    Raises:
        CapacityError: a request of full length does not fit, or with auto-fit not
            even one token.
        ConfigError: the layers cannot be grouped, workers disagree on a layer, a
            list has another length, or a memory is not an integer.
    """
    if len(worker_specs) != len(available_memory) or not worker_specs:
        raise ConfigError(
            f"available_memory has {len(available_memory)} entries for "
            f"{len(worker_specs)} workers"
        )
    specs = merge_worker_specs(worker_specs)
    if groups is None:
        groups = get_kv_cache_groups(specs, config)
    check_groups(groups, specs)
    projected = [project_groups_to_worker(groups, mine) for mine in worker_specs]
    usable = [
        usable_bytes(mine, config, memory)
        for mine, memory in zip(projected, available_memory, strict=True)
    ]
    if config.auto_fit_max_model_len:
        config = _auto_fit(config, projected, usable)
    for mine, memory in zip(projected, usable, strict=True):
        check_enough_memory(mine, config, memory)
    configs = [
        get_kv_cache_config_from_groups(mine, config, memory)
        for mine, memory in zip(projected, available_memory, strict=True)
    ]
    return ResolvedKVCache(_with_least_blocks(configs), config)


def _auto_fit(
    config: GroupingConfig,
    projected: Sequence[Sequence[KVCacheGroupSpec]],
    usable: Sequence[int],
) -> GroupingConfig:
    workers = list(zip(projected, usable, strict=True))
    longest = auto_fit_max_model_len(workers, config)
    if longest < config.max_model_len:
        logger.info(
            "Auto-fit max_model_len: reduced from %d to %d to fit in available memory",
            config.max_model_len,
            longest,
        )
    return replace(config, max_model_len=longest)


def merge_worker_specs(
    worker_specs: Sequence[Mapping[str, KVCacheSpec]],
) -> dict[str, KVCacheSpec]:
    """The layers of all workers, each once.

    Raises:
        ConfigError: two workers give one layer different specs.
    """
    merged: dict[str, KVCacheSpec] = {}
    for specs in worker_specs:
        for name, spec in specs.items():
            if merged.setdefault(name, spec) != spec:
                raise ConfigError(
                    "The KV cache specs for the same layer are different across "
                    f"workers. This is not supported yet. Layer {name!r}: "
                    f"{merged[name]} and {spec}"
                )
    return merged


def project_groups_to_worker(
    groups: Sequence[KVCacheGroupSpec], specs: Mapping[str, KVCacheSpec]
) -> list[KVCacheGroupSpec]:
    """The groups with the layers of one worker; a group may be left without any.

    Sharing layers follow the layer whose cache they use. The spec of a group without
    layers here stays, for the block table is the same on all workers.
    """
    return [_project(group, specs) for group in groups]


def _project(
    group: KVCacheGroupSpec, specs: Mapping[str, KVCacheSpec]
) -> KVCacheGroupSpec:
    own = [name for name in group.own_layer_names if name in specs]
    sharing = {
        name: target
        for name, target in group.kv_sharing_targets.items()
        if target in specs
    }
    spec = group.kv_cache_spec
    if own and isinstance(spec, UniformTypeKVCacheSpecs):
        mine = {name: spec.kv_cache_specs[name] for name in own}
        spec = replace(spec, kv_cache_specs=mine)
    return replace(
        group,
        layer_names=(*own, *sharing),
        kv_cache_spec=spec,
        kv_sharing_targets=sharing,
    )


def get_kv_cache_config_from_groups(
    groups: Sequence[KVCacheGroupSpec], config: GroupingConfig, available_memory: int
) -> KVCacheConfig:
    """The configuration of a worker with these groups; memory is not checked.

    One group of `UniformTypeKVCacheSpecs` gets a tensor a layer. Otherwise tensor i is
    shared by the i-th layers of all groups:

        groups       (full.0, full.1)  (sw.0, sw.2)  (sw.1)
        tensor 0      full.0            sw.0          sw.1
        tensor 1      full.1            sw.2

    A worker without layers gets no tensors, and one block (the null block).

    Raises:
        ConfigError: several groups whose page sizes differ, or `available_memory` is
            not an integer.
    """
    check_available_memory(available_memory)
    block = bytes_per_block(groups)
    if not block:
        return KVCacheConfig(1, (), tuple(groups))
    num_blocks = max(available_memory // block, 0)
    if config.num_gpu_blocks_override is not None:
        logger.info(
            "Overriding num_gpu_blocks=%d with num_gpu_blocks_override=%d",
            num_blocks,
            config.num_gpu_blocks_override,
        )
        if config.num_gpu_blocks_override > num_blocks:
            logger.warning("num_gpu_blocks_override is more than the memory holds")
        num_blocks = config.num_gpu_blocks_override
    return KVCacheConfig(num_blocks, _tensors(groups, num_blocks), tuple(groups))


def _tensors(
    groups: Sequence[KVCacheGroupSpec], num_blocks: int
) -> tuple[KVCacheTensor, ...]:
    spec = groups[0].kv_cache_spec
    if len(groups) == 1 and isinstance(spec, UniformTypeKVCacheSpecs):
        return tuple(
            KVCacheTensor(
                spec.kv_cache_specs[name].page_size_bytes * num_blocks, (name,)
            )
            for name in groups[0].own_layer_names
        )
    size = uniform_page_size(groups) * num_blocks
    columns = [group.own_layer_names for group in groups]
    return tuple(
        KVCacheTensor(size, tuple(names[i] for names in columns if i < len(names)))
        for i in range(max(map(len, columns)))
    )


def _with_least_blocks(configs: Sequence[KVCacheConfig]) -> tuple[KVCacheConfig, ...]:
    """The configurations with the blocks of the poorest worker that has layers."""
    counts = [config.num_blocks for config in configs if config.kv_cache_tensors]
    least = min(counts, default=configs[0].num_blocks)
    return tuple(
        KVCacheConfig(
            least,
            _tensors(config.kv_cache_groups, least) if config.kv_cache_tensors else (),
            config.kv_cache_groups,
        )
        for config in configs
    )


def generate_scheduler_kv_cache_config(
    configs: Sequence[KVCacheConfig],
) -> KVCacheConfig:
    """What the scheduler works with: groups as managers see them, one spec each.

    Raises:
        ConfigError: the workers have different numbers of blocks.
    """
    if len({config.num_blocks for config in configs}) != 1:
        raise ConfigError("workers have different numbers of KV cache blocks")
    first = configs[0]
    groups = [
        replace(group, kv_cache_spec=next(iter(spec.kv_cache_specs.values())))
        if isinstance(spec := group.kv_cache_spec, UniformTypeKVCacheSpecs)
        else group
        for group in first.kv_cache_groups
    ]
    return replace(first, kv_cache_groups=tuple(groups))
