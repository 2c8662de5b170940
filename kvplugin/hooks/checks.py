"""Whether an answer of a plugin is possible; each check returns what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvplugin.hooks import needs

if TYPE_CHECKING:
    from kvplugin.hooks.contexts import (
        AdmissionContext,
        BlockPoolContext,
        CheckpointContext,
        VictimContext,
        WaitingContext,
    )
    from kvplugin.hooks.needs import Needs
    from kvplugin.policies.eviction import BlockInfo, EvictionPolicy


def verdict(check: Callable[..., str], answer: object, *rest: object) -> str:
    """What `check` finds; an answer on which it fails is no good either."""
    try:
        return check(answer, *rest)
    except Exception as error:
        return f"{_a(answer)} that fails when looked at: {_text(error)}"


def has(answer: object, needed: Needs) -> str:
    """Whether the answer is an object with what is needed."""
    if isinstance(answer, type):
        return f"the class {answer.__name__} in place of an object"
    missing = [n for n in needed.methods if not callable(getattr(answer, n, None))]
    missing += [n for n in needed.attributes if not hasattr(answer, n)]
    return f"{_a(answer)} without {', '.join(missing)}" if missing else ""


def binds(policy: EvictionPolicy, num_blocks: int, failure: BaseException) -> str:
    """Whether the policy is innocent of the failure of the pool that bound it: if not,
    it fails in the same way once more."""
    error = bind_failure(policy, num_blocks)
    if error is not None and _text(error) == _text(failure):
        return f"{_a(policy)} whose bind fails: {_text(error)}"
    return ""


def bind_failure(policy: EvictionPolicy, num_blocks: int) -> Exception | None:
    """What a policy raises when it is bound to a pool without keys; None: it is bound
    now."""
    try:
        policy.bind(num_blocks, _no_info)
    except Exception as error:
        return error
    return None


def _no_info(block: int) -> BlockInfo:
    raise KeyError(block)  # a new pool has no keyed block


def _a(answer: object) -> str:
    return f"a {type(answer).__name__}"


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def commands(answer: Any) -> str:
    """Whether these are commands."""
    if isinstance(answer, Sequence) and all(hasattr(c, "name") for c in answer):
        return ""
    return f"a {type(answer).__name__} in place of a list of commands"


def policy_names(answer: Any) -> str:
    """Whether these are names with their descriptions."""
    if not isinstance(answer, Mapping):
        return f"a {type(answer).__name__} in place of names and descriptions"
    for pair in answer.items():
        if not all(map(_is_named, pair)):
            return f"{pair!r} in place of a name and its description"
        if "+" in pair[0]:
            return f"the name {pair[0]!r}: a + stands between names of policies"
    return ""


def _is_named(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def pool(answer: Any, ctx: BlockPoolContext) -> str:
    """Whether the pool is what is wanted, and new."""
    if wrong := has(answer, needs.BLOCK_POOL):
        return wrong
    if answer.num_blocks != ctx.num_blocks:
        return f"a pool of {answer.num_blocks} blocks, not of {ctx.num_blocks}"
    free, wanted = answer.get_num_free_blocks(), ctx.num_blocks - 1
    if free != wanted:
        return f"a pool with {free!r} of {wanted} blocks free"
    if ctx.enable_events and not answer.events_enabled:
        return "a pool that collects no events, though enable_events is set"
    return ""


def groups(answer: Any, layers: Collection[str]) -> str:
    """Whether the groups hold every layer with a cache of its own exactly once."""
    if not isinstance(answer, Sequence):
        return f"a {type(answer).__name__} in place of a list of groups"
    for group in answer:
        if wrong := has(group, needs.KV_CACHE_GROUP):
            return f"{wrong}, in place of a group"
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
    unseen = {request.request_id for request in ctx.waiting}
    for request_id in answer:
        if not isinstance(request_id, str):
            return _no_id(request_id, "which does not wait")
        if request_id not in unseen:
            twice = answer.count(request_id) > 1
            return (
                f"{request_id!r}, {'named twice' if twice else 'which does not wait'}"
            )
        unseen.remove(request_id)
    return ""


def _no_id(answer: object, why: str) -> str:
    if isinstance(getattr(answer, "request_id", None), str):
        return f"{_a(answer)} in place of its id"
    return f"{answer!r}, {why}"


def admission(answer: Any, ctx: AdmissionContext) -> str:
    """Whether this is a yes or a no."""
    del ctx
    if isinstance(answer, bool):
        return ""
    # With its module: numpy's is called bool as well.
    module, name = type(answer).__module__, type(answer).__name__
    kind = name if module == "builtins" else f"{module}.{name}"
    return f"a {kind} in place of a bool"


def victim(answer: Any, ctx: VictimContext) -> str:
    """Whether this is the id of a candidate."""
    known = [request.request_id for request in ctx.candidates]
    if isinstance(answer, str) and answer in known:
        return ""
    return _no_id(answer, "which is no candidate")
