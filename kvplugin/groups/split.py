"""Which layers share a block table.

After vLLM 0.19.1 `v1/core/kv_cache_utils.py`.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from kvplugin.errors import ConfigError
from kvplugin.groups.config import GroupingConfig
from kvplugin.groups.sharing import add_sharing_layers, mark_draft_group
from kvplugin.groups.unify import (
    is_kv_cache_spec_uniform,
    unify_hybrid_kv_cache_specs,
    unify_kv_cache_spec_page_size,
)
from kvplugin.spec import KVCacheGroupSpec, KVCacheSpec, UniformTypeKVCacheSpecs, cdiv

logger = logging.getLogger("vllm.kvplugin.groups")

MAX_UNSPLIT_RATIO: Final = 1.5
"""Below this ratio of the most to the fewest layers of a kind, kinds with fewer layers
are padded to the most instead of splitting all to the fewest (vLLM's heuristic: 12
window and 13 full layers become 13 and 13, not 12, 12 and 1)."""


def get_kv_cache_groups(
    specs: Mapping[str, KVCacheSpec], config: GroupingConfig
) -> list[KVCacheGroupSpec]:
    """Group layers; the default behind the hook `kvp_group_layers`.

    In this order: no layers, no groups. Layers that one spec can stand for, and layers
    of one kind (as `UniformTypeKVCacheSpecs`), are one group. Everything else is
    brought to one page size and split into groups of equally many layers, so that a
    block has the same bytes in every group.

    Args:
        specs: layer name -> spec, in the order of the model.
        config: limits and choices; nothing in it is changed.

    Raises:
        ConfigError: page sizes that do not agree, draft layers in several groups, a
            sharing layer without a target, a hybrid model with the manager off.
    """
    if config.disable_hybrid_kv_cache_manager:
        specs = unify_hybrid_kv_cache_specs(specs)
    groups = _groups_of_own_layers(specs, config)
    groups = add_sharing_layers(groups, config.kv_sharing_targets)
    return mark_draft_group(groups, config.draft_layers)


def _groups_of_own_layers(
    specs: Mapping[str, KVCacheSpec], config: GroupingConfig
) -> list[KVCacheGroupSpec]:
    if not specs:
        return []
    if is_kv_cache_spec_uniform(specs):
        return [_group(list(specs), specs)]
    if uniform := UniformTypeKVCacheSpecs.from_specs(specs):
        return [KVCacheGroupSpec(tuple(specs), uniform)]
    unified = unify_kv_cache_spec_page_size(specs, pad=config.pad_page_sizes)
    return _split(unified, config.draft_layers)


def _split(
    specs: Mapping[str, KVCacheSpec], draft_layers: frozenset[str]
) -> list[KVCacheGroupSpec]:
    """Groups of equally many layers with equal specs, the last of a kind padded."""
    kinds: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        kinds.setdefault(spec, []).append(name)
    size = group_size([len(names) for names in kinds.values()])
    groups = []
    for names in kinds.values():
        padding = -len(names) % size
        if padding:
            logger.warning(
                "Add %d padding layers, may waste at most %.2f%% KV cache memory",
                padding,
                padding / len(names) * 100,
            )
        for members in _stride(names, cdiv(len(names), size), draft_layers):
            groups.append(_group(members, specs))
    return groups


def group_size(layer_counts: Sequence[int]) -> int:
    """Layers of a group, given the number of layers of each kind; at least one kind."""
    fewest, most = min(layer_counts), max(layer_counts)
    return most if most < fewest * MAX_UNSPLIT_RATIO else fewest


def _stride(
    names: list[str], n_groups: int, draft_layers: frozenset[str]
) -> list[list[str]]:
    """Deal layers out one by one, so that each pipeline rank has some of each group.

    Draft layers that would be separated all go to the first group if it is large
    enough (0.19 leaves them apart and fails when the worker starts).
    """
    groups = [names[i::n_groups] for i in range(n_groups)]
    drafts = [name for name in names if name in draft_layers]
    homes = sum(not draft_layers.isdisjoint(group) for group in groups)
    if homes <= 1 or len(drafts) > len(groups[0]):
        return groups
    room = [len(group) for group in groups]
    room[0] -= len(drafts)
    others = iter([name for name in names if name not in draft_layers])
    dealt: list[list[str]] = [[] for _ in groups]
    for turn in range(max(map(len, groups))):
        for group, space in zip(dealt, room, strict=True):
            if turn < space:
                group.append(next(others))
    dealt[0] += drafts
    return dealt


def _group(names: Sequence[str], specs: Mapping[str, KVCacheSpec]) -> KVCacheGroupSpec:
    members = [specs[name] for name in names]
    return KVCacheGroupSpec(tuple(names), members[0].merge(members))


def check_groups(
    groups: Sequence[KVCacheGroupSpec], specs: Mapping[str, KVCacheSpec]
) -> None:
    """Check groups that a plugin made.

    Raises:
        ConfigError: a layer is in no group or in several, a group has none, or groups
            beside others have several page sizes.
    """
    names = [name for group in groups for name in group.own_layer_names]
    if sorted(names) != sorted(specs):
        odd = {n for n in names if names.count(n) > 1} | (set(names) ^ set(specs))
        raise ConfigError(
            "Some layers are not assigned to any group, or to several, or do not "
            f"exist: {', '.join(sorted(odd))}"
        )
    if not all(group.own_layer_names for group in groups):
        raise ConfigError("a KV cache group has no layers of its own")
    pages = {group.kv_cache_spec.page_size_bytes for group in groups}
    if len(pages) > 1:
        raise ConfigError(
            f"KV cache groups have several page sizes: {sorted(pages)} bytes"
        )
