"""Every hook there is, with its contract. docs/hooks.md has an example of each.

Four families, told apart by their names:

- ``kvp_register_*``: every plugin contributes; the same name twice is an error.
- ``kvp_make_*`` and ``kvp_group_layers``: build an object while the engine starts. The
  first plugin that answers is taken, the built-in is asked last. None means "not
  mine". A plugin that raises or answers something impossible ends the start with a
  `PluginError`; a `ConfigError` or `CapacityError` that it raises reaches the user
  as it is.
- ``kvp_choose_*``: asked at most once a request, step or preemption. None means "no
  opinion". If a plugin fails, this one call gets the built-in's answer and an ERROR
  that names the plugin is logged (three times, then each thousandth).
- ``kvp_on_*``: told; answers are ignored. A failure is logged with the plugin's name
  and hides nothing from others.

Hooks of the last two families are called in the thread of the engine's step, so what
they spend the engine waits for. Plugins are asked in reverse order of their
registration (`tryfirst` and `trylast` change that).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

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
from kvplugin.hooks.markers import hookspec

if TYPE_CHECKING:
    import click

    from kvplugin.block_pool import BlockPool
    from kvplugin.coordinator import KVCacheCoordinator
    from kvplugin.events import KVCacheEvent
    from kvplugin.explain import LookupExplanation
    from kvplugin.groups import GroupingConfig
    from kvplugin.managers import SingleTypeKVCacheManager
    from kvplugin.policies.eviction import EvictionPolicy
    from kvplugin.policies.offload import OffloadPolicy
    from kvplugin.spec import KVCacheGroupSpec, KVCacheSpec


class HookSpecs(Protocol):
    """The hooks; `kvplugin.hooks.facade.Hooks` is how the core calls them."""

    # -- contributed ---------------------------------------------------------------

    @hookspec
    def kvp_register_commands(self) -> Sequence[click.Command]:
        """Commands that the plugin adds to `kvplugin`.

        When: the command line starts. Once a process, in its main thread; may block.
        Answer: commands with new names; None: the plugin has none.
        """

    @hookspec
    def kvp_register_eviction_policies(self) -> Mapping[str, str]:
        """Names of the eviction policies that the plugin can make.

        When: plugins are listed, and once when the first policy is made: two plugins
        with one name end the start. Any process and thread; should not block.
        Answer: one line of description a name; names must be new; None: the plugin
        has none. Each name must be answered by `kvp_make_eviction_policy` of the same
        plugin, and by no other.
        """

    @hookspec
    def kvp_register_offload_policies(self) -> Mapping[str, str]:
        """Names of the offload policies that the plugin can make.

        When: once when the first policy is made: two plugins with one name end the
        start. Any process and thread; should not block.
        Answer: one line of description a name; names must be new; None: the plugin
        has none. Each name must be answered by `kvp_make_offload_policy` of the same
        plugin, and by no other.
        """

    # -- built once ----------------------------------------------------------------

    @hookspec(firstresult=True)
    def kvp_make_eviction_policy(
        self, ctx: EvictionPolicyContext
    ) -> EvictionPolicy | None:
        """A fresh, unbound eviction policy.

        When: once a block pool (the engine's own, the host tier's) while the engine
        starts, in the process of the scheduler; also wherever a configuration that
        names the policy is validated (command line, workers). Main thread; may
        block. An empty name asks for the default. The options are a copy.
        Answer: None: the policy of this name is not mine. If its `bind` fails in the
        pool, the start ends with an error that names the plugin of the policy.
        Raises: `ConfigError` for options that it does not know or cannot take.
        """

    @hookspec(firstresult=True)
    def kvp_make_offload_policy(
        self, ctx: OffloadPolicyContext
    ) -> OffloadPolicy | None:
        """A fresh offload policy: which blocks are worth a copy in another tier.

        When: once a tier (host memory) while the engine starts, in the process of the
        scheduler; also wherever a configuration that names the policy is validated
        (command line, workers). Main thread; may block. An empty name asks for the
        default. The options are a copy.
        Answer: None: the policy of this name is not mine.
        Raises: `ConfigError` for options that it does not know or cannot take.
        """

    @hookspec(firstresult=True)
    def kvp_make_block_pool(self, ctx: BlockPoolContext) -> BlockPool | None:
        """The pool of the engine's blocks.

        When: once an engine, while it starts, in the process and main thread of the
        scheduler; may block.
        Answer: a pool, or something that has what the core uses of one (`needs.py`),
        with exactly `ctx.num_blocks` ids of which all but the null block are free, and
        with `events_enabled` if `ctx.enable_events`. None: the next plugin's pool.
        """

    @hookspec(firstresult=True)
    def kvp_make_coordinator(
        self, ctx: CoordinatorContext
    ) -> KVCacheCoordinator | None:
        """What brings the hits and allocations of all groups together.

        When: once an engine, after its pool and the managers of its groups; process
        and thread of the scheduler; may block.
        Answer: a coordinator, or something that has what the core uses of one
        (`needs.py`). None: the next one's.
        """

    @hookspec(firstresult=True)
    def kvp_make_manager(
        self, spec: KVCacheSpec, ctx: ManagerContext
    ) -> SingleTypeKVCacheManager | None:
        """The manager of one group, by the type of its layers.

        When: once a group, between the pool and the coordinator; process and thread
        of the scheduler; may block.
        Answer: a manager, or something that has what the core uses of one
        (`needs.py`). None: not my kind of spec.
        """

    @hookspec(firstresult=True)
    def kvp_group_layers(
        self, specs: Mapping[str, KVCacheSpec], config: GroupingConfig
    ) -> list[KVCacheGroupSpec] | None:
        """Which layers share a block table.

        When: once an engine (and wherever a plan is computed), before its pool; main
        thread; may block. `specs` is by layer name.
        Answer: groups that hold every layer exactly once. None: the next one's.
        """

    # -- asked ---------------------------------------------------------------------

    @hookspec(firstresult=True)
    def kvp_choose_checkpoints(self, ctx: CheckpointContext) -> Collection[int] | None:
        """After which tokens of a request its state layers keep a checkpoint.

        When: at most once an admission of a request and group of state layers (Mamba)
        that keeps several states; thread of the scheduler's step; must not block.
        Answer: some of `ctx.boundaries`; None: no opinion. The built-in answers all.
        """

    @hookspec(firstresult=True)
    def kvp_choose_waiting_order(self, ctx: WaitingContext) -> Sequence[str] | None:
        """In which order waiting requests are considered in this step.

        When: at most once a step of our scheduler, if requests wait and there is room
        for one; thread of the scheduler's step; must not block. Requests are shared:
        change nothing. The first request that does not fit ends the admissions of the
        step, so who is named late may starve.
        Answer: ids of waiting requests, each once; those left out come after them, in
        the configured order. None: no opinion. The built-in keeps the configured order.
        """

    @hookspec(firstresult=True)
    def kvp_choose_admission(self, ctx: AdmissionContext) -> bool | None:
        """Whether the next waiting request may be admitted now.

        When: at most once a step and request of our scheduler, when it is its turn and
        others run (where nobody runs, admission is open: the engine would stall);
        thread of the scheduler's step; must not block. Requests are shared: change
        nothing. A request that may come can still find too few blocks.
        Answer: False ends the admissions of the step, as nobody overtakes; True: it
        may come; None: no opinion. The built-in answers True.
        """

    @hookspec(firstresult=True)
    def kvp_choose_victim(self, ctx: VictimContext) -> str | None:
        """Which running request loses its blocks, so that another one can go on.

        When: once a preemption for want of blocks; thread of the scheduler's step; must
        not block. Requests are shared: change nothing. What the victim has computed is
        computed again unless it is still cached; its output is kept.
        Who is always chosen may starve: see `kvplugin.policies.scheduling.may_lose`.
        Answer: id of one of `ctx.candidates`; None: no opinion. The built-in's victim
        is the last one in the configured order: of admission, or of priority.
        """

    # -- told ----------------------------------------------------------------------

    @hookspec
    def kvp_on_events(self, events: Sequence[KVCacheEvent]) -> None:
        """KV events (stored, removed, cleared), oldest first, never an empty list.

        When: once a step that had any, where events are enabled; thread of the
        scheduler's step; must not block. Events are shared: change nothing.
        """

    @hookspec
    def kvp_on_request_freed(self, request_id: str, ctx: FreedContext) -> None:
        """A request gave its blocks back: finished, aborted or preempted.

        When: each time, after the blocks were freed; thread of the scheduler's step;
        must not block.
        """

    @hookspec
    def kvp_on_lost_hit(self, explanation: LookupExplanation) -> None:
        """A lookup found less than the request might have hit, and this is why.

        When: at most once a lookup, and computed only if somebody listens; thread of
        the scheduler's step; must not block.
        """
