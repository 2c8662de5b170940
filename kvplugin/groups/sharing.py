"""Layers that need special care in grouping: users of another's cache, and drafts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvplugin.errors import ConfigError, unknown_name
from kvplugin.spec import KVCacheGroupSpec


def add_sharing_layers(
    groups: Sequence[KVCacheGroupSpec], targets: Mapping[str, str]
) -> list[KVCacheGroupSpec]:
    """The groups with each sharing layer appended to its target's group.

    A sharing layer has no tensor and no spec of its own; it needs the block table. A
    target may itself be a sharing layer: the owner at the end of the chain counts.
    With pipeline ranks both must be on one rank.

    Raises:
        ConfigError: a sharing layer has a spec of its own, or its target does not
            exist, or targets go in a circle.
    """
    homes = {name: i for i, group in enumerate(groups) for name in group.layer_names}
    shared: list[dict[str, str]] = [{} for _ in groups]
    for name in targets:
        if name in homes:
            raise ConfigError(
                f"layer {name!r} has a KV cache spec and stands in "
                "kv_sharing_targets: it can have one of them"
            )
        owner = _owner(name, targets)
        if owner not in homes:
            raise unknown_name("layer", owner, homes, "kv_sharing_targets")
        shared[homes[owner]][name] = owner
    return [
        replace(
            group,
            layer_names=(*group.layer_names, *mine),
            kv_sharing_targets={**group.kv_sharing_targets, **mine},
        )
        if mine
        else group
        for group, mine in zip(groups, shared, strict=True)
    ]


def _owner(name: str, targets: Mapping[str, str]) -> str:
    seen = [name]
    while name in targets:
        name = targets[name]
        if name in seen:
            raise ConfigError(
                f"kv_sharing_targets go in a circle: {' -> '.join([*seen, name])}"
            )
        seen.append(name)
    return name


def mark_draft_group(
    groups: Sequence[KVCacheGroupSpec], draft_layers: frozenset[str]
) -> list[KVCacheGroupSpec]:
    """The groups with the one that holds the draft layers marked.

    Raises:
        ConfigError: draft layers are in several groups, or do not exist.
    """
    missing = draft_layers.difference(*(group.layer_names for group in groups))
    if missing:
        known = [name for group in groups for name in group.layer_names]
        raise unknown_name("layer", min(missing), known, "draft_layers")
    homes = [not draft_layers.isdisjoint(group.layer_names) for group in groups]
    if sum(homes) > 1:
        places = "; ".join(
            f"group {i}: {', '.join(n for n in g.layer_names if n in draft_layers)}"
            for i, g in enumerate(groups)
            if homes[i]
        )
        raise ConfigError(
            "All drafting layers should belong to the same kv cache group, but they "
            f"are in {sum(homes)} ({places}). Their specs differ, or a group is too "
            "small for them: try disable_hybrid_kv_cache_manager, or fewer draft "
            "layers."
        )
    return [
        replace(group, is_eagle_group=True) if home else group
        for group, home in zip(groups, homes, strict=True)
    ]
