"""The facade asks plugins in order, checks what they answer and blames by name."""

import inspect
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvplugin import BlockPool, hookimpl
from kvplugin.errors import CapacityError, ConfigError, PluginError
from kvplugin.groups import GroupingConfig
from kvplugin.hooks import (
    BlockPoolContext,
    CheckpointContext,
    CoordinatorContext,
    EvictionPolicyContext,
    FreedContext,
    Hooks,
    HookSpecs,
    ManagerContext,
    OffloadPolicyContext,
)
from kvplugin.managers import ManagerSettings
from kvplugin.policies.eviction import LRU
from kvplugin.spec import FullAttentionSpec, KVCacheConfig

HOOKS = [name for name in vars(HookSpecs) if name.startswith("kvp_")]
ONE_ANSWER = [h for h in HOOKS if not h.startswith(("kvp_register_", "kvp_on_"))]
TOLD = [name for name in HOOKS if name.startswith("kvp_on_")]


def plugin(name: str = "mine", **implementations: Callable[..., Any]) -> Any:
    """A plugin registered in code, with these implementations."""
    marked = {hook: hookimpl(function) for hook, function in implementations.items()}
    return SimpleNamespace(__name__=name, **marked)


def policy_context(name: str = "", **options: object) -> EvictionPolicyContext:
    return EvictionPolicyContext(name=name, options=options, num_blocks=9)


def pool_context(num_blocks: int = 9) -> BlockPoolContext:
    return BlockPoolContext(num_blocks=num_blocks, policy=LRU())


def checkpoint_context() -> CheckpointContext:
    return CheckpointContext(
        request=SimpleNamespace(request_id="r"), group=0, block_size=4, max_tokens=18
    )


def groups(*names: tuple[str, ...]) -> list[Any]:
    return [
        SimpleNamespace(layer_names=n, kv_cache_spec=None, kv_sharing_targets={})
        for n in names
    ]


class AnyMethods:
    """Has every method."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


# -- in step with the specifications -----------------------------------------------


@pytest.mark.parametrize("hook", HOOKS)
def test_the_facade_has_every_hook_with_its_arguments(hook: str) -> None:
    spec = inspect.signature(getattr(HookSpecs, hook))
    method = inspect.signature(getattr(Hooks, hook.removeprefix("kvp_")))
    assert method.parameters == spec.parameters
    if hook in TOLD:
        assert method.return_annotation == spec.return_annotation == "None"
    elif hook in ONE_ANSWER:
        assert f"{method.return_annotation} | None" == spec.return_annotation


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_states_its_contract(hook: str) -> None:
    text = inspect.getdoc(getattr(HookSpecs, hook)) or ""
    assert "When: " in text
    assert "thread" in text
    assert "block" in text
    assert hook in TOLD or "None: " in text


def test_every_hook_is_tested_below() -> None:
    """A new hook must be added to a table here, or to this list with its tests."""
    with_own_tests = {
        "kvp_register_commands",
        "kvp_register_eviction_policies",
        "kvp_register_offload_policies",  # test_hooks_offload_policy.py
        "kvp_choose_admission",  # test_hooks_admission.py
        "kvp_choose_checkpoints",
        "kvp_choose_waiting_order",  # test_hooks_scheduling.py
        "kvp_choose_victim",
    }
    with_answers = {hook for hook, _, _ in IMPOSSIBLE.values()}
    assert {*with_own_tests, *with_answers, *TELL} == set(HOOKS)


def test_managers_and_a_coordinator_are_built_through_the_hooks() -> None:
    hooks = Hooks.of()
    spec = FullAttentionSpec(
        block_size=4, num_kv_heads=1, head_size=8, dtype="bfloat16"
    )
    grouping = GroupingConfig(max_model_len=64)
    (group,) = hooks.group_layers({"a": spec, "b": spec}, grouping)
    pool = hooks.make_block_pool(pool_context())
    manager = hooks.make_manager(
        group.kv_cache_spec,
        ManagerContext(pool=pool, settings=ManagerSettings()),
    )
    coordinator = hooks.make_coordinator(
        CoordinatorContext(
            kv_cache_config=KVCacheConfig(9, (), (group,)),
            pool=pool,
            managers=(manager,),
        )
    )
    assert coordinator.single_type_managers == (manager,)
    assert group.layer_names == ("a", "b")


# -- factories ---------------------------------------------------------------------


def test_the_default_policy_is_lru_under_both_its_names() -> None:
    for name in ("", "lru"):
        first = Hooks.of().make_eviction_policy(policy_context(name))
        second = Hooks.of().make_eviction_policy(policy_context(name))
        assert type(first) is type(second) is LRU
        assert first is not second


def test_the_default_policy_takes_no_options() -> None:
    with pytest.raises(ConfigError, match="'lru' takes no options, got size in"):
        Hooks.of().make_eviction_policy(policy_context("lru", size=3))


def test_unknown_policy_is_an_error_that_names_the_known_ones() -> None:
    mine = plugin(kvp_register_eviction_policies=lambda: {"mru": "most recent"})
    with pytest.raises(ConfigError, match=r"'lrv' in eviction_policy.* lru, mru, "):
        Hooks.of(mine).make_eviction_policy(policy_context("lrv"))


def test_policy_that_is_offered_and_not_made_is_blamed_on_its_plugin() -> None:
    mine = plugin(kvp_register_eviction_policies=lambda: {"mru": "most recent"})
    with pytest.raises(PluginError, match="'mine' offers 'mru'"):
        Hooks.of(mine).make_eviction_policy(policy_context("mru"))


def test_policy_that_two_plugins_offer_is_an_error_that_names_both() -> None:
    mine = plugin(kvp_register_eviction_policies=lambda: {"lru": "mine is better"})
    with pytest.raises(PluginError, match=r"'core'.*'mine' both .* policy 'lru'"):
        Hooks.of(mine).register_eviction_policies()


def test_a_plugin_may_change_the_default_policy() -> None:
    class Mine(LRU):
        """Another default."""

    mine = plugin(
        kvp_make_eviction_policy=lambda ctx: Mine() if ctx.name == "" else None
    )
    assert type(Hooks.of(mine).make_eviction_policy(policy_context())) is Mine
    assert type(Hooks.of(mine).make_eviction_policy(policy_context("lru"))) is LRU


def test_the_default_pool_is_ours() -> None:
    pool = Hooks.of().make_block_pool(pool_context(5))
    assert type(pool) is BlockPool
    assert pool.num_blocks == 5


def test_a_pool_may_come_from_a_plugin() -> None:
    class Mine(BlockPool):
        """Another pool."""

    mine = plugin(kvp_make_block_pool=lambda ctx: Mine(ctx.num_blocks))
    assert type(Hooks.of(mine).make_block_pool(pool_context())) is Mine


def test_managers_coordinators_and_groups_may_come_from_a_plugin() -> None:
    answer = AnyMethods()
    found = groups(("a", "b"), ("c",))
    hooks = Hooks.of(
        plugin(
            kvp_make_manager=lambda spec, ctx: answer if spec == "mine" else None,
            kvp_make_coordinator=lambda ctx: answer,
            kvp_group_layers=lambda specs: found,
        )
    )
    pool: Any = None
    settings: Any = None
    manager = ManagerContext(pool=pool, settings=settings)
    assert hooks.make_manager("mine", manager) is answer
    coordinator = CoordinatorContext(kv_cache_config=pool, pool=pool, managers=())
    assert hooks.make_coordinator(coordinator) is answer
    assert hooks.group_layers(dict.fromkeys("abc"), settings) == found


def used_pool(num_blocks: int) -> BlockPool:
    """One block of it is in use."""
    pool = BlockPool(num_blocks)
    pool.get_new_blocks(1)
    return pool


def broken_pool(count: Callable[[], Any]) -> BlockPool:
    """Of nine blocks, which it counts in its own way."""

    class BrokenPool(BlockPool):
        """Cannot count."""

        def get_num_free_blocks(self) -> int:
            return count()  # type: ignore[no-any-return]

    return BrokenPool(9)


IMPOSSIBLE: dict[str, tuple[str, Any, str]] = {
    "not a policy": ("kvp_make_eviction_policy", object(), "without bind, insert"),
    "not a filter": ("kvp_make_offload_policy", object(), "object without admit"),
    "not a pool": ("kvp_make_block_pool", 3, "int without get_num_free"),
    "a small pool": ("kvp_make_block_pool", BlockPool(8), "of 8 blocks, not of 9"),
    "a large pool": ("kvp_make_block_pool", BlockPool(10), "of 10 blocks, not of 9"),
    "a used pool": ("kvp_make_block_pool", used_pool(9), "7 of 8 blocks free"),
    "a pool of words": (
        "kvp_make_block_pool",
        broken_pool(lambda: "all"),
        "'all' of 8 blocks free",
    ),
    "a pool that fails": (
        "kvp_make_block_pool",
        broken_pool(lambda: {}["free"]),
        "BrokenPool that fails when looked at: KeyError: 'free'",
    ),
    "a class": ("kvp_make_eviction_policy", LRU, "class LRU in place of an object"),
    "not a coordinator": ("kvp_make_coordinator", [], "list without find_long"),
    "not a manager": ("kvp_make_manager", "x", "str without find_longest"),
    "not groups": ("kvp_group_layers", 1, "int in place of a list"),
    "a group of none": ("kvp_group_layers", [None], "NoneType without .* of a group"),
    "a group of five": ("kvp_group_layers", [5], "int without .* of a group"),
    "lists for layers": (
        "kvp_group_layers",
        groups(("a", []), ("b",)),  # type: ignore[arg-type]
        "a list that fails when looked at: TypeError",
    ),
    "a layer left out": ("kvp_group_layers", groups(("a",)), "without layer 'b'"),
    "a layer twice": ("kvp_group_layers", groups(("a", "b"), ("b",)), "'b' twice"),
    "a layer of none": ("kvp_group_layers", groups(("a", "b", "c")), "'c' twice or"),
}


def call(hooks: Hooks, hook: str) -> object:
    """Use a factory."""
    anything: Any = SimpleNamespace()
    match hook:
        case "kvp_make_eviction_policy":
            return hooks.make_eviction_policy(policy_context())
        case "kvp_make_offload_policy":
            return hooks.make_offload_policy(OffloadPolicyContext(num_blocks=9))
        case "kvp_make_block_pool":
            return hooks.make_block_pool(pool_context())
        case "kvp_make_manager":
            ctx = ManagerContext(pool=anything, settings=anything)
            return hooks.make_manager(anything, ctx)
        case "kvp_make_coordinator":
            return hooks.make_coordinator(
                CoordinatorContext(kv_cache_config=anything, pool=anything, managers=())
            )
        case _:
            return hooks.group_layers(dict.fromkeys("ab"), anything)


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_impossible_answer_ends_the_start_and_names_plugin_and_hook(case: str) -> None:
    hook, answer, complaint = IMPOSSIBLE[case]
    hooks = Hooks.of(
        plugin(**{hook: lambda: answer}),
        plugin("innocent", **{hook: lambda: None}),
    )
    with pytest.raises(PluginError, match=f"'mine' answered {hook} .*{complaint}"):
        call(hooks, hook)


FACTORIES = [hook for hook in ONE_ANSWER if not hook.startswith("kvp_choose_")]


@pytest.mark.parametrize("hook", FACTORIES)
def test_factory_that_fails_ends_the_start_and_is_named(hook: str) -> None:
    def fail() -> None:
        raise RuntimeError("not today")

    hooks = Hooks.of(plugin(**{hook: fail}))
    with pytest.raises(PluginError, match=f"'mine' failed in {hook}: .*not today"):
        call(hooks, hook)


@pytest.mark.parametrize("error", [ConfigError("that key"), CapacityError("so few")])
def test_what_the_user_can_change_reaches_him_as_it_is(error: Exception) -> None:
    def refuse() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        Hooks.of(plugin(kvp_make_block_pool=refuse)).make_block_pool(pool_context())
    assert raised.value is error


def test_wrong_lists_of_names_are_blamed_on_their_plugin() -> None:
    for answer in (["lfu"], {"lfu": 3}, {"": "nameless"}):
        mine = plugin(kvp_register_eviction_policies=lambda answer=answer: answer)
        with pytest.raises(PluginError, match="'mine' answered kvp_register_evic"):
            Hooks.of(mine).register_eviction_policies()


def test_two_commands_of_one_name_in_one_plugin_are_an_error() -> None:
    command = SimpleNamespace(name="dig")
    mine = plugin(kvp_register_commands=lambda: [command, command])
    with pytest.raises(PluginError, match="both contribute the command 'dig'"):
        Hooks.of(mine).register_commands()


def test_a_wrapper_sees_the_answer_and_fails_in_its_own_name() -> None:
    seen = []

    class Wrapping:
        """Watches the pool."""

        @hookimpl(wrapper=True)
        def kvp_make_block_pool(self):
            pool = yield
            seen.append(pool)
            if pool.num_blocks == 7:
                raise RuntimeError("seven")
            return pool

    hooks = Hooks.of(Wrapping())
    assert seen == [hooks.make_block_pool(pool_context())]
    with pytest.raises(PluginError, match=r"failed in kvp_make_block_pool.*seven"):
        hooks.make_block_pool(pool_context(7))


def test_what_is_taken_one_by_one_cannot_be_wrapped() -> None:
    class Wrapping:
        """Would like to change what others contribute."""

        @hookimpl(wrapper=True)
        def kvp_register_commands(self):
            return (yield)

    with pytest.raises(PluginError, match="wraps kvp_register_commands"):
        Hooks.of(Wrapping())


# -- asked -------------------------------------------------------------------------


def test_every_boundary_is_a_checkpoint_by_default() -> None:
    hooks = Hooks.of()
    assert not hooks.chooses_checkpoints
    assert list(hooks.choose_checkpoints(checkpoint_context())) == [4, 8, 12, 16]


def test_a_plugin_may_choose_checkpoints_or_have_no_opinion() -> None:
    hooks = Hooks.of(plugin(kvp_choose_checkpoints=lambda ctx: {8, 16}))
    assert hooks.chooses_checkpoints
    assert sorted(hooks.choose_checkpoints(checkpoint_context())) == [8, 16]
    hooks = Hooks.of(plugin(kvp_choose_checkpoints=lambda: None))
    assert list(hooks.choose_checkpoints(checkpoint_context())) == [4, 8, 12, 16]


@pytest.mark.parametrize("answer", [3, [4, 5], [0], [20], ["4"], None])
def test_a_choice_that_fails_is_logged_and_made_by_the_built_in(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def choose() -> Any:
        if answer is None:
            raise RuntimeError("no idea")
        return answer

    hooks = Hooks.of(plugin(kvp_choose_checkpoints=choose))
    assert list(hooks.choose_checkpoints(checkpoint_context())) == [4, 8, 12, 16]
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "plugin 'mine'" in caplog.text


# -- told --------------------------------------------------------------------------

TELL: dict[str, tuple[str, tuple[Any, ...]]] = {
    "kvp_on_events": ("hears_events", (["event"],)),
    "kvp_on_request_freed": (
        "hears_request_freed",
        ("r", FreedContext(num_tokens=5, num_blocks=(2, 1))),
    ),
    "kvp_on_lost_hit": ("hears_lost_hit", ("why",)),
}


@pytest.mark.parametrize("hook", TOLD)
def test_everybody_who_listens_is_told_though_one_fails(
    hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Any] = []
    names = list(inspect.signature(getattr(HookSpecs, hook)).parameters)[1:]

    def listener(name: str) -> Any:
        scope: dict[str, Any] = {"heard": heard}
        arguments = ", ".join(names)
        source = f"lambda {arguments}: heard.append(('{name}', {arguments}))"
        return plugin(name, **{hook: eval(source, scope)})  # noqa: S307

    def fail() -> None:
        heard.append("failed")
        raise RuntimeError("I'd rather not know")

    hooks = Hooks.of(listener("a"), plugin("deaf", **{hook: fail}), listener("b"))
    attribute, arguments = TELL[hook]
    assert getattr(hooks, attribute)
    getattr(hooks, hook.removeprefix("kvp_"))(*arguments)
    assert heard == [("b", *arguments), "failed", ("a", *arguments)]
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "plugin 'deaf'" in record.getMessage()
    assert hook in record.getMessage()


@pytest.mark.parametrize("hook", TOLD)
def test_nobody_listens_by_default(hook: str) -> None:
    hooks = Hooks.of()
    attribute, arguments = TELL[hook]
    assert not getattr(hooks, attribute)
    getattr(hooks, hook.removeprefix("kvp_"))(*arguments)


@pytest.mark.parametrize("hook", TOLD)
def test_a_wrapper_that_fails_around_listeners_disturbs_nobody(
    hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    def wrap() -> Any:
        yield
        raise RuntimeError("too late")

    mine = SimpleNamespace(__name__="mine", **{hook: hookimpl(wrapper=True)(wrap)})
    getattr(Hooks.of(mine), hook.removeprefix("kvp_"))(*TELL[hook][1])
    assert "plugin 'mine' failed" in caplog.text


# -- the short way -----------------------------------------------------------------


@pytest.mark.parametrize("hook", ONE_ANSWER)
def test_pluggy_is_skipped_where_only_the_built_in_answers(hook: str) -> None:
    def skips(hooks: Hooks) -> bool:
        return hooks._call[hook] is hooks._built_in[hook]

    assert skips(Hooks.of())
    assert not skips(Hooks.of(plugin(**{hook: lambda: None})))
