"""`explain_lookup`: why a prefix hit was not longer.

A hit is the longest length that every group accepts. So each longer length, in steps
of the unit that all hits are multiples of, was refused by somebody:

    0            hit                      top               queried
    ├─────────────┼────────┼────────┼──────┼──────────────────┤
        served      unit     unit           no cache could serve it:
                      each refused by       rounding, partial block, last token
                      one group or more

For each unit a group either accepts the length at its end, and has lost the unit to
others, or it does not and has a reason of its own. That way the losses of a group, and
of the whole lookup, cover all that was not hit once.
"""

from collections.abc import Sequence
from math import lcm

from kvplugin.coordinator import KVCacheCoordinator
from kvplugin.explain.group import GroupLookup, Lookup
from kvplugin.explain.history import LookupHistory
from kvplugin.explain.result import (
    GroupExplanation,
    LookupExplanation,
    Loss,
    LostHit,
    merged,
)
from kvplugin.request import RequestLike


def explain_lookup(
    coordinator: KVCacheCoordinator,
    request: RequestLike,
    *,
    hit_tokens: int | None = None,
    enable_caching: bool = True,
    history: LookupHistory | None = None,
) -> LookupExplanation:
    """Explain the hit that `request` would get now.

    Ask it beside the lookup: once the request was admitted, its own blocks are cached.
    Changes nothing. Costs about 10 microseconds a group and lost block (0.1 s for
    40,000 lost tokens in three groups), and a lookup for each length that a window or
    state group accepts and another refuses.

    Args:
        coordinator: whose lookup.
        request: who asks.
        hit_tokens: what it gets, if that may be less than the coordinator finds
            because hits must be proven by tokens.
        enable_caching: whether there is a prefix cache.
        history: attached to the coordinator's pool since it was empty; without one,
            evictions and other identities are unknown.
    """
    managers = coordinator.single_type_managers
    if not enable_caching or not managers:
        return _disabled(coordinator, request)
    found = coordinator.find_longest_cache_hit(
        request.block_hashes, request.num_tokens - 1
    )[1]
    unit = lcm(*(manager.block_size for manager in managers))
    lookup = Lookup(
        request=request,
        unit=unit,
        hit=found if hit_tokens is None else hit_tokens,
        found=found,
        top=(request.num_tokens - 1) // unit * unit,
        # 0.19.1 refuses nothing for drafts, it shortens what was found.
        drops=coordinator.use_eagle and not coordinator.parity.draft_drop_per_lookup,
        history=history,
    )
    groups = [GroupLookup(i, manager, lookup) for i, manager in enumerate(managers)]
    return _explanation(lookup, groups, coordinator.use_eagle)


def _explanation(
    lookup: Lookup, groups: Sequence[GroupLookup], use_eagle: bool
) -> LookupExplanation:
    request, hit = lookup.request, lookup.hit
    skipped = (
        [Loss(0, hit, LostHit.SKIPPED)] if request.skip_reading_prefix_cache else []
    )
    whole, by_group = _units(lookup, groups)
    return LookupExplanation(
        request_id=request.request_id,
        queried_tokens=request.num_tokens,
        hit_tokens=0 if skipped else hit,
        losses=merged([*skipped, *whole, *groups[0].out_of_reach()]),
        groups=tuple(
            GroupExplanation(
                group.group,
                group.manager.kind,
                group.longest(request.num_tokens - 1, group.size, use_eagle),
                merged([*skipped, *losses, *group.out_of_reach()]),
            )
            for group, losses in zip(groups, by_group, strict=True)
        ),
    )


def _units(
    lookup: Lookup, groups: Sequence[GroupLookup]
) -> tuple[list[Loss], list[list[Loss]]]:
    """Losses between the hit and the longest possible one: of the lookup, and of each
    group."""
    whole: list[Loss] = []
    by_group: list[list[Loss]] = [[] for _ in groups]
    computed_until = max(group.computed_until for group in groups)
    for length in range(lookup.hit + lookup.unit, lookup.top + 1, lookup.unit):
        refusing = [group for group in groups if length not in group.accepts]
        losses = {
            group: group.refusal(length, computed_until) for group in refusing
        } or {group: [group.accepted_in_vain(length)] for group in groups}
        whole += next(iter(losses.values()))
        for group, own in zip(groups, by_group, strict=True):
            own += losses.get(group) or [group.limited(length, refusing)]
    return whole, by_group


def _disabled(
    coordinator: KVCacheCoordinator, request: RequestLike
) -> LookupExplanation:
    losses = (Loss(0, request.num_tokens, LostHit.DISABLED),)
    return LookupExplanation(
        request_id=request.request_id,
        queried_tokens=request.num_tokens,
        hit_tokens=0,
        losses=losses,
        groups=tuple(
            GroupExplanation(i, manager.kind, 0, losses)
            for i, manager in enumerate(coordinator.single_type_managers)
        ),
    )
