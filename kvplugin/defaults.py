"""The built-in answers to hooks that build or choose: a plugin like any other, asked
last.

Everything is imported when it is asked for: whoever only lists plugins pays for none
of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from kvplugin.hooks import (
    AdmissionContext,
    BlockPoolContext,
    CheckpointContext,
    CoordinatorContext,
    EvictionPolicyContext,
    ManagerContext,
    OffloadPolicyContext,
    VictimContext,
    WaitingContext,
    hookimpl,
)

if TYPE_CHECKING:
    from kvplugin.block_pool import BlockPool
    from kvplugin.coordinator import KVCacheCoordinator
    from kvplugin.groups import GroupingConfig
    from kvplugin.managers import SingleTypeKVCacheManager
    from kvplugin.policies.eviction import EvictionPolicy
    from kvplugin.policies.offload import OffloadPolicy
    from kvplugin.spec import KVCacheGroupSpec, KVCacheSpec


@hookimpl
def kvp_register_eviction_policies() -> Mapping[str, str]:
    """The policies of the core."""
    from kvplugin.policies.eviction.registry import POLICIES

    return {name: listed.description for name, listed in POLICIES.items()}


@hookimpl(trylast=True)
def kvp_make_eviction_policy(ctx: EvictionPolicyContext) -> EvictionPolicy | None:
    """One of the core's, LRU where no name is given."""
    from kvplugin.policies.eviction.registry import POLICIES, make_policy

    name = ctx.name or "lru"
    if name not in POLICIES:
        return None
    return make_policy(name, ctx.options, ctx.inner, ctx.medium)


@hookimpl
def kvp_register_offload_policies() -> Mapping[str, str]:
    """The offload policies of the core."""
    from kvplugin.policies.offload.registry import OFFLOAD_POLICIES

    return {name: listed.description for name, listed in OFFLOAD_POLICIES.items()}


@hookimpl(trylast=True)
def kvp_make_offload_policy(ctx: OffloadPolicyContext) -> OffloadPolicy | None:
    """One of the core's, all blocks where no name is given."""
    from kvplugin.policies.offload.registry import OFFLOAD_POLICIES, make_offload_policy

    name = ctx.name or "all"
    return make_offload_policy(name, ctx.options) if name in OFFLOAD_POLICIES else None


@hookimpl(trylast=True)
def kvp_make_block_pool(ctx: BlockPoolContext) -> BlockPool:
    """`kvplugin.BlockPool`, or the one with 0.19.1's free list."""
    from kvplugin.block_pool import BlockPool
    from kvplugin.single_list import SingleListPool

    single = ctx.parity is not None and ctx.parity.single_free_list
    return (SingleListPool if single else BlockPool)(
        ctx.num_blocks,
        policy=ctx.policy,
        block_size=ctx.block_size,
        enable_events=ctx.enable_events,
        medium=ctx.medium,
        residency=ctx.residency,
        lineage=ctx.lineage,
    )


@hookimpl(trylast=True)
def kvp_make_coordinator(ctx: CoordinatorContext) -> KVCacheCoordinator:
    """The coordinator for this number of groups."""
    from kvplugin.coordinator import make_coordinator
    from kvplugin.parity import NO_PARITY

    return make_coordinator(
        ctx.pool,
        ctx.managers,
        enable_caching=ctx.enable_caching,
        use_eagle=ctx.use_eagle,
        parity=ctx.parity or NO_PARITY,
    )


@hookimpl(trylast=True)
def kvp_make_manager(
    spec: KVCacheSpec, ctx: ManagerContext
) -> SingleTypeKVCacheManager:
    """The manager for the spec's exact type."""
    from kvplugin.managers import make_manager

    return make_manager(spec, ctx.pool, ctx.settings)


@hookimpl(trylast=True)
def kvp_group_layers(
    specs: Mapping[str, KVCacheSpec], config: GroupingConfig
) -> list[KVCacheGroupSpec]:
    """The grouping of vLLM."""
    from kvplugin.groups import get_kv_cache_groups

    return get_kv_cache_groups(specs, config)


@hookimpl(trylast=True)
def kvp_choose_checkpoints(ctx: CheckpointContext) -> Collection[int]:
    """Every boundary."""
    return ctx.boundaries


@hookimpl(trylast=True)
def kvp_choose_waiting_order(ctx: WaitingContext) -> Sequence[str]:
    """The configured order."""
    return [request.request_id for request in ctx.waiting]


@hookimpl(trylast=True)
def kvp_choose_admission(ctx: AdmissionContext) -> bool:
    """Whoever fits."""
    del ctx
    return True


@hookimpl(trylast=True)
def kvp_choose_victim(ctx: VictimContext) -> str:
    """Who was admitted last, or would be."""
    from kvplugin.policies.scheduling.configured import last_in_order

    return last_in_order(ctx.candidates, ctx.policy).request_id
