"""What plugins' objects must have is what the core uses of them, no more, no less."""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvplugin
from kvplugin import BlockPool, hookimpl
from kvplugin.coordinator import make_coordinator
from kvplugin.errors import PluginError
from kvplugin.hooks import BlockPoolContext, Hooks, ManagerContext, checks, needs
from kvplugin.hooks.needs import Needs
from kvplugin.manager import KVCacheManager
from kvplugin.managers import make_manager
from kvplugin.policies.eviction import LRU, EvictionPolicy
from kvplugin.scheduler import ModelOutput, Scheduler, SchedulerConfig
from kvplugin.spec import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from tests.core.manager_setups import Setup, full, sink, window

PACKAGE = Path(kvplugin.__file__).parent
LISTS = {
    "pool": needs.BLOCK_POOL,
    "coordinator": needs.COORDINATOR,
    "manager": needs.MANAGER,
}
NAMES = {
    "pool": ("pool", "_pool", "block_pool"),
    "coordinator": ("coordinator",),
    "manager": ("manager",),
}
"""What variables and attributes that hold such an object are called."""
WHERE = {
    "pool": ("*.py", "explain/*.py", "managers/*.py", "scheduler/*.py"),
    "coordinator": ("*.py", "explain/*.py", "scheduler/*.py"),
    # In the scheduler a manager is the `KVCacheManager`.
    "manager": ("*.py", "explain/*.py"),
}
OF_ONE_KIND = {"set_checkpoints"}
"""Used of `MambaManager` only, where a manager is one."""


def used(what: str) -> set[str]:
    """Attributes of such an object in the source of the core."""
    paths = [path for pattern in WHERE[what] for path in PACKAGE.glob(pattern)]
    assert len(paths) > 10
    return {
        node.attr
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and _name(node.value) in NAMES[what]
    }


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


@pytest.mark.parametrize("what", LISTS)
def test_the_lists_hold_what_the_core_uses(what: str) -> None:
    listed = {*LISTS[what].methods, *LISTS[what].attributes}
    assert used(what) - OF_ONE_KIND == listed


def test_a_policy_needs_what_the_protocol_has() -> None:
    members = {n for n, value in vars(EvictionPolicy).items() if callable(value)}
    members -= {n for n in members if n.startswith("_") and n != "__len__"}
    assert set(needs.EVICTION_POLICY.methods) == members


def test_the_objects_of_the_core_have_what_is_needed() -> None:
    kv = Setup((full(), window(8))).manager()
    assert not checks.has(LRU(), needs.EVICTION_POLICY)
    assert not checks.has(kv.block_pool, needs.BLOCK_POOL)
    assert not checks.has(kv.coordinator, needs.COORDINATOR)
    for manager in kv.coordinator.single_type_managers:
        assert not checks.has(manager, needs.MANAGER)
    for group in kv.kv_cache_config.kv_cache_groups:
        assert not checks.has(group, needs.KV_CACHE_GROUP)


@pytest.mark.parametrize("what", LISTS)
def test_each_name_is_missed(what: str) -> None:
    needed = LISTS[what]
    for name in (*needed.methods, *needed.attributes):
        others = dict.fromkeys(needed.methods, print) | dict.fromkeys(
            needed.attributes, 0
        )
        del others[name]
        found = checks.has(SimpleNamespace(**others), needed)
        assert found == f"a SimpleNamespace without {name}"
        if name in needed.methods:
            found = checks.has(SimpleNamespace(**others, **{name: 3}), needed)
            assert found == f"a SimpleNamespace without {name}"


# -- a life with objects that have nothing else ------------------------------------


class Only:
    """Shows of an object what is needed and nothing else."""

    def __init__(self, inside: Any, needed: Needs) -> None:
        vars(self).update(inside=inside, names={*needed.methods, *needed.attributes})

    def __getattr__(self, name: str) -> Any:
        if name not in vars(self)["names"]:
            raise AttributeError(f"{name} is not listed")
        return getattr(vars(self)["inside"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in vars(self)["names"]:
            raise AttributeError(f"{name} is not listed")
        setattr(vars(self)["inside"], name, value)


class Narrow:
    """Everything that it makes is an `Only`."""

    @hookimpl
    def kvp_make_block_pool(self, ctx: BlockPoolContext) -> Any:
        pool = BlockPool(
            ctx.num_blocks, policy=ctx.policy, enable_events=ctx.enable_events
        )
        return Only(pool, needs.BLOCK_POOL)

    @hookimpl
    def kvp_make_manager(self, spec: KVCacheSpec, ctx: ManagerContext) -> Any:
        return Only(make_manager(spec, ctx.pool, ctx.settings), needs.MANAGER)

    @hookimpl
    def kvp_make_coordinator(self, ctx: Any) -> Any:
        coordinator = make_coordinator(
            ctx.pool, ctx.managers, enable_caching=ctx.enable_caching
        )
        return Only(coordinator, needs.COORDINATOR)


def life(specs: tuple[KVCacheSpec, ...], hooks: Hooks) -> Iterator[Any]:
    """What a scheduler and its callers see of some requests with common prefixes."""
    setup = Setup(specs, num_blocks=24)
    groups = tuple(KVCacheGroupSpec((f"l{i}",), s) for i, s in enumerate(specs))
    manager = KVCacheManager(
        KVCacheConfig(24, (), groups), 64, 4, enable_kv_cache_events=True, hooks=hooks
    )
    config = SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=4)
    scheduler = Scheduler(manager, config)
    for i in range(6):
        request = setup.request(f"r{i}", [1, 2, 3, 4, 5] * 3 + [i])
        yield str(manager.explain_lookup(request))
        scheduler.add_request(request, max_tokens=9)
    while scheduler.has_work():
        step = scheduler.schedule()
        scheduler.check()
        yield step.num_scheduled_tokens
        requests = {id_: scheduler.requests[id_] for id_ in step.num_scheduled_tokens}
        done = [
            id_
            for id_, entry in requests.items()
            if entry.request.num_computed_tokens == entry.request.num_tokens
        ]
        scheduler.update_from_output(ModelOutput(step.step, {id_: [7] for id_ in done}))
        yield manager.usage
        yield manager.take_events()
    yield manager.reset_prefix_cache()


@pytest.mark.parametrize("specs", [(full(),), (full(), window(8)), (sink(8),)])
def test_an_engine_works_with_what_is_needed(specs: tuple[KVCacheSpec, ...]) -> None:
    narrow = list(life(specs, Hooks.of(Narrow())))
    assert narrow == list(life(specs, Hooks.of()))
    assert len(narrow) > 20


def test_what_is_missing_ends_the_start() -> None:
    class Few(Narrow):
        """Its pools cannot do all."""

        @hookimpl
        def kvp_make_block_pool(self, ctx: BlockPoolContext) -> Any:
            return Only(BlockPool(ctx.num_blocks), Needs(("touch",), ("num_blocks",)))

    with pytest.raises(
        PluginError, match="a Only without get_num_free_blocks, get_new"
    ):
        next(life((full(),), Hooks.of(Few())))
