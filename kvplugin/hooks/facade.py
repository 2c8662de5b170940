"""The typed facade over the hooks: how the core calls plugins.

pluggy's own relay answers `Any`. A method here has the name of its hook less `kvp_`,
the same arguments and a checked answer. Where nobody but the built-in implements a
hook of one answer, the method calls the built-in directly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from kvplugin.errors import ConfigError, PluginError, unknown_name
from kvplugin.hooks import checks
from kvplugin.hooks.contexts import (
    BlockPoolContext,
    CheckpointContext,
    CoordinatorContext,
    EvictionPolicyContext,
    FreedContext,
    ManagerContext,
    VictimContext,
    WaitingContext,
)
from kvplugin.hooks.contributions import contributions, merged, refuse
from kvplugin.hooks.guard import Guard, last_answer, logger
from kvplugin.hooks.plugins import (
    PluginInfo,
    describe,
    guards,
    is_built_in,
    load_plugins,
    new_manager,
    tracing_is_on,
)

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
    from kvplugin.spec import KVCacheGroupSpec, KVCacheSpec


_ONE_ANSWER: Final = (
    "kvp_make_eviction_policy",
    "kvp_make_block_pool",
    "kvp_make_coordinator",
    "kvp_make_manager",
    "kvp_group_layers",
    "kvp_choose_checkpoints",
    "kvp_choose_waiting_order",
    "kvp_choose_victim",
)


class Hooks:
    """All hooks of one plugin manager, whose plugins are all registered by now."""

    def __init__(self, manager: pluggy.PluginManager) -> None:
        self._manager = manager
        self._guards = {guard.name: guard for guard in guards(manager)}
        self._built_in: dict[str, Callable[..., Any]] = {}
        """The built-in's implementation of hooks of one answer."""
        self._call: dict[str, Callable[..., Any]] = {}
        self._is_replaced: set[str] = set()
        """Hooks of one answer that others than the built-in implement."""
        for hook in _ONE_ANSWER:
            self._prepare(hook)
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
        policies = [
            (guard, name, text)
            for guard, offered in self._policies()
            for name, text in offered.items()
        ]
        return merged(policies, "eviction policy")

    def policies_of(self, plugin: str) -> dict[str, str]:
        """Descriptions of the eviction policies of one plugin by name."""
        return {
            name: text
            for guard, offered in self._policies()
            if guard.name == plugin
            for name, text in offered.items()
        }

    def _policies(self) -> list[tuple[Guard, Mapping[str, str]]]:
        hook = "kvp_register_eviction_policies"
        return contributions(self._manager, hook, checks.policy_names)

    # -- built once ----------------------------------------------------------------

    def make_eviction_policy(self, ctx: EvictionPolicyContext) -> EvictionPolicy:
        """A fresh, unbound policy.

        Raises:
            ConfigError: nobody makes a policy of this name, or not with these options.
            PluginError: a plugin fails or answers something else.
        """
        hook = "kvp_make_eviction_policy"
        policy: EvictionPolicy | None = self._call[hook](ctx=ctx)
        if policy is None:
            raise self._no_policy(ctx.name)
        self._verify(hook, checks.methods(policy, checks.EVICTION_POLICY))
        return policy

    def _no_policy(self, name: str) -> ConfigError | PluginError:
        for guard, offered in self._policies():
            if name in offered:
                return PluginError(f"{guard} offers {name!r} and does not make it")
        known = self.register_eviction_policies()
        return unknown_name("eviction policy", name, known, "eviction_policy")

    def make_block_pool(self, ctx: BlockPoolContext) -> BlockPool:
        """The pool of an engine's blocks.

        Raises:
            CapacityError: there are too few blocks.
            PluginError: a plugin fails or answers something impossible.
        """
        pool: BlockPool = self._answer("kvp_make_block_pool", ctx=ctx)
        self._verify("kvp_make_block_pool", checks.pool(pool, ctx))
        return pool

    def make_coordinator(self, ctx: CoordinatorContext) -> KVCacheCoordinator:
        """What coordinates the groups.

        Raises:
            ConfigError: the settings do not go together.
            PluginError: a plugin fails or answers something else.
        """
        coordinator: KVCacheCoordinator = self._answer("kvp_make_coordinator", ctx=ctx)
        wrong = checks.methods(coordinator, checks.COORDINATOR)
        self._verify("kvp_make_coordinator", wrong)
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
        self._verify(hook, checks.methods(manager, checks.MANAGER))
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
        self._verify("kvp_group_layers", checks.groups(answer, specs))
        return list(answer)

    # -- asked ---------------------------------------------------------------------

    def choose_checkpoints(self, ctx: CheckpointContext) -> Collection[int]:
        """Boundaries at which a request keeps checkpoints; the built-in's answer if
        a plugin fails."""
        chosen: Collection[int] = self._choose(
            "kvp_choose_checkpoints", checks.checkpoints, ctx
        )
        return chosen

    def choose_waiting_order(self, ctx: WaitingContext) -> Sequence[str]:
        """All ids of waiting requests in the order in which they are considered; the
        built-in's answer if a plugin fails."""
        hook = "kvp_choose_waiting_order"
        first = dict.fromkeys(self._choose(hook, checks.waiting_order, ctx))
        ids = (request.request_id for request in ctx.waiting)
        return [*first, *(id_ for id_ in ids if id_ not in first)]

    def choose_victim(self, ctx: VictimContext) -> str:
        """Id of the candidate that loses its blocks; the built-in's answer if a plugin
        fails."""
        chosen: str = self._choose("kvp_choose_victim", checks.victim, ctx)
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

    # -- inside --------------------------------------------------------------------

    def _prepare(self, hook: str) -> None:
        """Find out whether pluggy can be skipped."""
        caller = getattr(self._manager.hook, hook)
        implementations = caller.get_hookimpls()
        for implementation in implementations:
            if is_built_in(self._guards[implementation.plugin_name]):
                self._built_in[hook] = implementation.function
            else:
                self._is_replaced.add(hook)
        skips = hook not in self._is_replaced and not tracing_is_on()
        self._call[hook] = self._built_in[hook] if skips else caller

    def _is_heard(self, hook: str) -> bool:
        return bool(getattr(self._manager.hook, hook).get_hookimpls())

    def _answer(self, hook: str, **arguments: object) -> Any:
        """The first answer, which there must be."""
        answer = self._call[hook](**arguments)
        if answer is None:
            told = ", ".join(type(argument).__name__ for argument in arguments.values())
            raise PluginError(f"no plugin answers {hook} for {told}")
        return answer

    def _choose(self, hook: str, check: Callable[[Any, Any], str], ctx: object) -> Any:
        """A plugin's answer, or the built-in's where none has a possible one."""
        if hook in self._is_replaced:
            try:
                answer = self._answer(hook, ctx=ctx)
                self._verify(hook, check(answer, ctx))
            except Exception:
                logger.exception("the built-in answers %s instead", hook)
            else:
                return answer
        return self._built_in[hook](ctx=ctx)

    def _verify(self, hook: str, wrong: str) -> None:
        """Refuse the last answer if something is wrong with it."""
        refuse(last_answer.guard, hook, wrong)

    def _tell(self, hook: str, **arguments: object) -> None:
        try:
            getattr(self._manager.hook, hook)(**arguments)
        except Exception:  # of a wrapper: listeners fail for themselves
            logger.exception("a wrapper of %s failed", hook)


@cache
def get_hooks() -> Hooks:
    """The hooks of this process with its installed plugins, loaded at the first call.

    Raises:
        ConfigError: `KVPLUGIN_PLUGINS` names a plugin that is not installed.
        PluginError: an installed plugin is unfit.
    """
    return Hooks(load_plugins())


def registered_commands() -> list[click.Command]:
    """All commands that plugins contribute.

    Raises:
        PluginError: a plugin fails, or two contribute a command of the same name.
    """
    return get_hooks().register_commands()
