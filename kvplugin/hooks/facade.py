"""The typed facade over the hooks: how the core calls plugins.

pluggy's own relay answers `Any`. A method here has the name of its hook less `kvp_`,
the same arguments and a checked answer. Where nobody but the built-in implements a
hook of one answer, the method calls the built-in directly.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvplugin.errors import PluginError
from kvplugin.hooks import checks, needs, taking
from kvplugin.hooks.calls import Calls
from kvplugin.hooks.composition import own_options, parts
from kvplugin.hooks.contexts import (
    AdmissionContext,
    BlockPoolContext,
    CheckpointContext,
    CoordinatorContext,
    EvictionPolicyContext,
    FreedContext,
    ManagerContext,
    OffloadPolicyContext,
    VictimContext,
    WaitingContext,
)
from kvplugin.hooks.contributions import contributions, merged, refuse
from kvplugin.hooks.guard import Guard, last_answer
from kvplugin.hooks.plugins import PluginInfo, describe, new_manager
from kvplugin.hooks.policy_names import PolicyNames

if TYPE_CHECKING:
    import click
    import pluggy

    from kvplugin.block_pool import BlockPool
    from kvplugin.coordinator import KVCacheCoordinator
    from kvplugin.events import KVCacheEvent
    from kvplugin.explain import LookupExplanation
    from kvplugin.groups import GroupingConfig
    from kvplugin.managers import SingleTypeKVCacheManager
    from kvplugin.policies.eviction import EvictionPolicy
    from kvplugin.policies.offload import OffloadPolicy
    from kvplugin.spec import KVCacheGroupSpec, KVCacheSpec


class Hooks(Calls):
    """All hooks of one plugin manager, whose plugins are all registered by now."""

    def __init__(self, manager: pluggy.PluginManager) -> None:
        super().__init__(manager)
        self._policies = PolicyNames(
            manager,
            "kvp_register_eviction_policies",
            "eviction policy",
            "eviction_policy",
        )
        self._offload_policies = PolicyNames(
            manager, "kvp_register_offload_policies", "offload policy", "offload_policy"
        )
        self._last_policy: tuple[EvictionPolicy, Guard | None] | None = None
        """The last one made and whose it is, until a pool has it."""
        self.hears_events = self._is_heard("kvp_on_events")
        """Whether anybody listens to `on_events`."""
        self.hears_request_freed = self._is_heard("kvp_on_request_freed")
        """Whether anybody listens to `on_request_freed`."""
        self.hears_lost_hit = self._is_heard("kvp_on_lost_hit")
        """Whether anybody listens to `on_lost_hit`."""
        self.chooses_checkpoints = "kvp_choose_checkpoints" in self._is_replaced
        """Whether anybody but the built-in is asked in `choose_checkpoints`."""
        self.orders_waiting = "kvp_choose_waiting_order" in self._is_replaced
        """Whether anybody but the built-in is asked in `choose_waiting_order`."""
        self.chooses_admission = "kvp_choose_admission" in self._is_replaced
        """Whether anybody but the built-in is asked in `choose_admission`."""
        self.chooses_victim = "kvp_choose_victim" in self._is_replaced
        """Whether anybody but the built-in is asked in `choose_victim`."""

    @classmethod
    def of(cls, *plugins: object) -> Hooks:
        """The built-in plugins and these; installed ones are not loaded.

        Raises:
            PluginError: a plugin is unfit.
        """
        return cls(new_manager(plugins))

    @property
    def plugins(self) -> list[PluginInfo]:
        """Loaded plugins, in the order of their registration."""
        return [describe(guard) for guard in self._guards.values()]

    # -- contributed ---------------------------------------------------------------

    def register_commands(self) -> list[click.Command]:
        """All commands.

        Raises:
            PluginError: a plugin fails, or two contribute a command of one name.
        """
        hook = "kvp_register_commands"
        commands = [
            (guard, command.name or "", command)
            for guard, answer in contributions(self._manager, hook, checks.commands)
            for command in answer
        ]
        return list(merged(commands, "command").values())

    def register_eviction_policies(self) -> dict[str, str]:
        """Descriptions of all eviction policies by name.

        Raises:
            PluginError: a plugin fails, or two contribute a policy of one name.
        """
        return self._policies.all()

    def policies_of(self, plugin: str) -> dict[str, str]:
        """Descriptions of the eviction policies of one plugin by name."""
        return {
            name: text
            for guard, offered in self._policies.offered()
            if guard.name == plugin
            for name, text in offered.items()
        }

    def register_offload_policies(self) -> dict[str, str]:
        """Descriptions of all offload policies by name.

        Raises:
            PluginError: a plugin fails, or two contribute a policy of one name.
        """
        return self._offload_policies.all()

    # -- built once ----------------------------------------------------------------

    def make_eviction_policy(self, ctx: EvictionPolicyContext) -> EvictionPolicy:
        """A fresh, unbound policy; of a name such as ``retention+arc``, the last one
        ranks and those before it protect.

        Raises:
            ConfigError: nobody makes a policy of this name, or not with these options.
            PluginError: a plugin fails or answers something else, or two plugins have
                a policy of one name.
        """
        options = own_options(ctx, "eviction_policy")
        first, *others = parts(replace(ctx, options=options))
        policy = self._make_one(first)
        for outer in others:
            policy = self._make_one(replace(outer, inner=policy))
        return policy

    def _make_one(self, ctx: EvictionPolicyContext) -> EvictionPolicy:
        hook = "kvp_make_eviction_policy"
        policy: EvictionPolicy
        policy, guard = self._named(hook, self._policies, needs.EVICTION_POLICY, ctx)
        self._last_policy = policy, guard
        return policy

    def _named(
        self,
        hook: str,
        names: PolicyNames,
        needed: needs.Needs,
        ctx: EvictionPolicyContext | OffloadPolicyContext,
    ) -> tuple[Any, Guard | None]:
        """The policy that is asked for by its name, and whose answer it is."""
        policy = self._ask(hook, ctx=ctx)
        guard, maker = last_answer.guard, last_answer.maker
        if policy is None:
            raise names.nobody_makes(ctx.name)
        self._verify(hook, checks.has, policy, needed)
        names.verify_maker(ctx.name, maker)
        return policy, guard

    def make_offload_policy(self, ctx: OffloadPolicyContext) -> OffloadPolicy:
        """A fresh policy that says which blocks are worth a copy.

        Raises:
            ConfigError: nobody makes a policy of this name, or not with these options.
            PluginError: a plugin fails or answers something else, or two plugins have
                a policy of one name.
        """
        hook, names = "kvp_make_offload_policy", self._offload_policies
        ctx = replace(ctx, options=own_options(ctx, "offload_policy"))
        policy: OffloadPolicy
        policy, _ = self._named(hook, names, needs.OFFLOAD_POLICY, ctx)
        return policy

    def make_block_pool(self, ctx: BlockPoolContext) -> BlockPool:
        """The pool of an engine's blocks.

        Raises:
            CapacityError: there are too few blocks.
            PluginError: a plugin fails or answers something impossible.
        """
        hook = "kvp_make_block_pool"
        last, self._last_policy = self._last_policy, None
        try:
            pool: BlockPool = self._answer(hook, ctx=ctx)
        except PluginError as error:
            cause = error.__cause__
            if last is not None and last[0] is ctx.policy and cause is not None:
                wrong = checks.binds(ctx.policy, ctx.num_blocks, cause)
                refuse(last[1], "kvp_make_eviction_policy", wrong)
            raise
        self._verify(hook, checks.pool, pool, ctx)
        return pool

    def make_coordinator(self, ctx: CoordinatorContext) -> KVCacheCoordinator:
        """What coordinates the groups.

        Raises:
            ConfigError: the settings do not go together.
            PluginError: a plugin fails or answers something else.
        """
        coordinator: KVCacheCoordinator = self._answer("kvp_make_coordinator", ctx=ctx)
        self._verify("kvp_make_coordinator", checks.has, coordinator, needs.COORDINATOR)
        return coordinator

    def make_manager(
        self, spec: KVCacheSpec, ctx: ManagerContext
    ) -> SingleTypeKVCacheManager:
        """The manager of one group.

        Raises:
            ConfigError: nobody manages such a spec, or not with these settings.
            PluginError: a plugin fails or answers something else.
        """
        hook = "kvp_make_manager"
        manager: SingleTypeKVCacheManager = self._answer(hook, spec=spec, ctx=ctx)
        self._verify(hook, checks.has, manager, needs.MANAGER)
        return manager

    def group_layers(
        self, specs: Mapping[str, KVCacheSpec], config: GroupingConfig
    ) -> list[KVCacheGroupSpec]:
        """Groups that hold every layer once.

        Raises:
            ConfigError: the layers cannot be grouped.
            PluginError: a plugin fails or answers something impossible.
        """
        answer = self._answer("kvp_group_layers", specs=specs, config=config)
        self._verify("kvp_group_layers", checks.groups, answer, specs)
        return list(answer)

    # -- asked ---------------------------------------------------------------------

    def choose_checkpoints(self, ctx: CheckpointContext) -> Collection[int]:
        """Boundaries at which a request keeps checkpoints; the built-in's answer if
        a plugin fails."""
        chosen: Collection[int] = self._choose(
            "kvp_choose_checkpoints", taking.boundaries, checks.checkpoints, ctx
        )
        return chosen

    def choose_waiting_order(self, ctx: WaitingContext) -> Sequence[str]:
        """All ids of waiting requests in the order in which they are considered; the
        built-in's answer if a plugin fails."""
        hook = "kvp_choose_waiting_order"
        order = self._choose(hook, taking.ids, checks.waiting_order, ctx)
        first = dict.fromkeys(order)
        ids = (request.request_id for request in ctx.waiting)
        return [*first, *(id_ for id_ in ids if id_ not in first)]

    def choose_admission(self, ctx: AdmissionContext) -> bool:
        """Whether a waiting request may be admitted now; the built-in's answer, yes,
        if a plugin fails."""
        hook = "kvp_choose_admission"
        admitted: bool = self._choose(hook, taking.as_it_is, checks.admission, ctx)
        return admitted

    def choose_victim(self, ctx: VictimContext) -> str:
        """Id of the candidate that loses its blocks; the built-in's answer if a plugin
        fails."""
        chosen: str = self._choose("kvp_choose_victim", taking.id_, checks.victim, ctx)
        return chosen

    # -- told ----------------------------------------------------------------------

    def on_events(self, events: Sequence[KVCacheEvent]) -> None:
        """Tell of KV events; never fails."""
        self._tell("kvp_on_events", events=events)

    def on_request_freed(self, request_id: str, ctx: FreedContext) -> None:
        """Tell that a request gave its blocks back; never fails."""
        self._tell("kvp_on_request_freed", request_id=request_id, ctx=ctx)

    def on_lost_hit(self, explanation: LookupExplanation) -> None:
        """Tell why a hit was not longer; never fails."""
        self._tell("kvp_on_lost_hit", explanation=explanation)
