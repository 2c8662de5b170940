"""Whether an answer of a plugin is possible; each check returns what is wrong."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvplugin.hooks.contexts import (
        BlockPoolContext,
        CheckpointContext,
        VictimContext,
        WaitingContext,
    )

EVICTION_POLICY: Final = (
    "bind",
    "insert",
    "hit",
    "pin",
    "release",
    "forget",
    "victims",
    "step",
    "order",
    "check",
    "__len__",
)
BLOCK_POOL: Final = (
    "get_num_free_blocks",
    "get_new_blocks",
    "touch",
    "free_blocks",
    "evict_blocks",
    "reset_prefix_cache",
    "take_events",
    "check",
)
COORDINATOR: Final = (
    "find_longest_cache_hit",
    "get_num_blocks_to_allocate",
    "allocate_new_computed_blocks",
    "allocate_new_blocks",
    "cache_blocks",
    "remove_skipped_blocks",
    "free",
    "get_blocks",
    "get_num_common_prefix_blocks",
    "new_step_starts",
    "check",
)
MANAGER: Final = (
    "find_longest_cache_hit",
    "get_num_blocks_to_allocate",
    "add_local_computed_blocks",
    "allocate_external_computed_blocks",
    "allocate_new_blocks",
    "cache_blocks",
    "remove_skipped_blocks",
    "free",
    "get_num_common_prefix_blocks",
    "new_step_starts",
    "check",
)


def methods(answer: object, names: Iterable[str]) -> str:
    """Whether the answer has these methods."""
    missing = [name for name in names if not callable(getattr(answer, name, None))]
    if not missing:
        return ""
    return f"a {type(answer).__name__} without {', '.join(missing)}"


def commands(answer: Any) -> str:
    """Whether these are commands."""
    if isinstance(answer, Sequence) and all(hasattr(c, "name") for c in answer):
        return ""
    return f"a {type(answer).__name__} in place of a list of commands"


def policy_names(answer: Any) -> str:
    """Whether these are names with their descriptions."""
    if not isinstance(answer, Mapping):
        return f"a {type(answer).__name__} in place of names and descriptions"
    wrong = [pair for pair in answer.items() if not all(map(_is_text, pair))]
    return f"{wrong[0]!r} in place of a name and its description" if wrong else ""


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def pool(answer: Any, ctx: BlockPoolContext) -> str:
    """Whether the pool is as large and as free as it must be."""
    if wrong := methods(answer, BLOCK_POOL):
        return wrong
    free, wanted = answer.get_num_free_blocks(), ctx.num_blocks - 1
    return "" if free >= wanted else f"a pool with {free} of {wanted} blocks free"


def groups(answer: Any, layers: Collection[str]) -> str:
    """Whether the groups hold every layer with a cache of its own exactly once."""
    if not isinstance(answer, Sequence):
        return f"a {type(answer).__name__} in place of a list of groups"
    held = [name for group in answer for name in _own_layers(group)]
    missing = sorted(set(layers) - set(held))
    if missing:
        return f"groups without layer {missing[0]!r} ({len(missing)} missing)"
    if len(held) != len(layers):
        extra = sorted(n for n in {*held} if held.count(n) > 1 or n not in layers)
        return f"groups that hold layer {extra[0]!r} twice or of no model"
    return ""


def _own_layers(group: Any) -> list[str]:
    sharing: Mapping[str, str] = group.kv_sharing_targets
    return [name for name in group.layer_names if name not in sharing]


def checkpoints(answer: Any, ctx: CheckpointContext) -> str:
    """Whether the answer is a collection of possible boundaries."""
    if not isinstance(answer, Collection):
        return f"a {type(answer).__name__} in place of boundaries"
    wrong = [boundary for boundary in answer if boundary not in ctx.boundaries]
    return f"{wrong[0]!r}, which is no boundary" if wrong else ""


def waiting_order(answer: Any, ctx: WaitingContext) -> str:
    """Whether these are ids of waiting requests, none of them twice."""
    if not isinstance(answer, Sequence) or isinstance(answer, str):
        return f"a {type(answer).__name__} in place of a list of request ids"
    known = [request.request_id for request in ctx.waiting]
    unseen = set(known)
    for request_id in answer:
        if not isinstance(request_id, str) or request_id not in unseen:
            how = "named twice" if request_id in known else "which does not wait"
            return f"{request_id!r}, {how}"
        unseen.remove(request_id)
    return ""


def victim(answer: Any, ctx: VictimContext) -> str:
    """Whether this is the id of a candidate."""
    known = [request.request_id for request in ctx.candidates]
    return "" if answer in known else f"{answer!r}, which is no candidate"
