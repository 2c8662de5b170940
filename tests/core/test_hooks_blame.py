"""An error of a plugin names the plugin whose fault it is, wrappers included."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvplugin import BlockPool, KVCacheManager, hookimpl
from kvplugin.errors import CapacityError, ConfigError, PluginError
from kvplugin.hooks import (
    BlockPoolContext,
    CheckpointContext,
    EvictionPolicyContext,
    Hooks,
)
from kvplugin.policies.eviction import LRU
from kvplugin.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

POLICY, POOL = "kvp_make_eviction_policy", "kvp_make_block_pool"
CHOICE = "kvp_choose_checkpoints"
NAMES = "kvp_register_eviction_policies"


def plugin(name: str, **implementations: Callable[..., Any]) -> Any:
    """A plugin registered in code."""
    marked = {hook: hookimpl(function) for hook, function in implementations.items()}
    return SimpleNamespace(__name__=name, **marked)


def wrapper(name: str, hook: str, function: Callable[..., Any], **options: bool) -> Any:
    """A plugin that wraps a hook."""
    marked = hookimpl(**(options or {"wrapper": True}))(function)
    return SimpleNamespace(__name__=name, **{hook: marked})


def engine(*plugins: Any, policy: str = "", **settings: Any) -> KVCacheManager:
    spec = FullAttentionSpec(
        block_size=4, num_kv_heads=1, head_size=8, dtype="bfloat16"
    )
    config = KVCacheConfig(9, (), (KVCacheGroupSpec(("a",), spec),))
    hooks = Hooks.of(*plugins)
    return KVCacheManager(
        config, 64, 4, eviction_policy=policy, hooks=hooks, **settings
    )


def policy_of(hooks: Hooks, name: str = "") -> Any:
    return hooks.make_eviction_policy(EvictionPolicyContext(name=name, num_blocks=9))


def choose(hooks: Hooks) -> list[int]:
    ctx = CheckpointContext(
        request=SimpleNamespace(request_id="r"), group=0, block_size=4, max_tokens=9
    )
    return list(hooks.choose_checkpoints(ctx))


# -- policies that cannot be bound -------------------------------------------------


class Unbindable(LRU):
    """Refuses its pool."""

    def bind(self, num_blocks: int, info: Any) -> None:
        raise RuntimeError("no pool of mine")


class Narrow(LRU):
    """Has `bind` with another signature."""

    def bind(self, num_blocks: int) -> None:  # type: ignore[override]
        del num_blocks


@pytest.mark.parametrize(
    ("policy", "complaint"),
    [
        (Unbindable, "a Unbindable whose bind fails: RuntimeError: no pool of mine"),
        (Narrow, "a Narrow whose bind fails: TypeError"),
    ],
)
@pytest.mark.parametrize("own_pool", [False, True])
def test_a_policy_that_cannot_be_bound_is_its_plugins_fault(
    policy: type[LRU], complaint: str, own_pool: bool
) -> None:
    def pool(ctx: BlockPoolContext) -> BlockPool | None:
        return BlockPool(ctx.num_blocks, policy=ctx.policy) if own_pool else None

    guilty = plugin("guilty", **{POLICY: lambda: policy()})
    with pytest.raises(
        PluginError, match=f"'guilty' answered {POLICY} with {complaint}"
    ):
        engine(guilty, plugin("innocent", kvp_make_block_pool=lambda ctx: pool(ctx)))


def test_a_pool_that_fails_after_it_bound_a_policy_is_its_own_fault() -> None:
    def pool(ctx: BlockPoolContext) -> BlockPool:
        BlockPool(ctx.num_blocks, policy=ctx.policy)
        raise RuntimeError("no pool of mine")

    innocent = plugin("innocent", **{POLICY: lambda: LRU()})
    guilty = plugin("guilty", kvp_make_block_pool=lambda ctx: pool(ctx))
    with pytest.raises(PluginError, match=f"'guilty' failed in {POOL}"):
        engine(innocent, guilty)


def test_a_policy_of_nobody_we_know_is_not_tried() -> None:
    hooks = Hooks.of()
    ctx = BlockPoolContext(num_blocks=9, policy=Unbindable())
    with pytest.raises(PluginError, match=f"'core'.* failed in {POOL}: .*no pool of"):
        hooks.make_block_pool(ctx)


def test_events_that_are_wanted_must_be_collected() -> None:
    mine = plugin("mine", kvp_make_block_pool=lambda ctx: BlockPool(ctx.num_blocks))
    with pytest.raises(PluginError, match=f"'mine' answered {POOL} .*no events"):
        engine(mine, enable_kv_cache_events=True)
    assert engine(mine).take_events() == []


# -- wrappers ----------------------------------------------------------------------


def to_garbage() -> Any:
    yield
    return 5


def to_none() -> Any:
    yield
    return None


def to_garbage_the_old_way() -> Any:
    result = yield
    result.force_result(5)


def unchanged() -> Any:
    return (yield)


def unchanged_the_old_way() -> Any:
    yield


def never() -> Any:
    return 5
    yield


def twice() -> Any:
    yield
    yield


WRONG: dict[str, tuple[Callable[..., Any], dict[str, bool], str]] = {
    "garbage": (to_garbage, {}, "answered {} with a int without"),
    "old": (to_garbage_the_old_way, {"hookwrapper": True}, "answered {} with a int w"),
    "nothing": (to_none, {}, "answered {} with None in place of an answer"),
    "no yield": (never, {}, "failed in {}: RuntimeError: a wrapper must yield"),
    "two": (twice, {}, "failed in {}: RuntimeError: a wrapper must yield only once"),
}


@pytest.mark.parametrize("hook", [POLICY, POOL, "kvp_make_manager"])
@pytest.mark.parametrize("case", WRONG)
def test_what_a_wrapper_puts_in_place_of_an_answer_is_its_own(
    hook: str, case: str
) -> None:
    function, options, complaint = WRONG[case]
    with pytest.raises(PluginError, match=f"'guilty' {complaint.format(hook)}"):
        engine(
            wrapper("above", hook, unchanged),
            wrapper("guilty", hook, function, **options),
            wrapper("below", hook, unchanged_the_old_way, hookwrapper=True),
        )


@pytest.mark.parametrize("options", [{"wrapper": True}, {"hookwrapper": True}])
def test_what_a_wrapper_passes_on_is_not_its_own(options: dict[str, bool]) -> None:
    function = unchanged if "wrapper" in options else unchanged_the_old_way
    around = wrapper("innocent", POLICY, function, **options)
    with pytest.raises(PluginError, match=r"'guilty' answered .* a int without"):
        engine(plugin("guilty", **{POLICY: lambda: 5}), around)
    with pytest.raises(PluginError, match=r"'guilty' failed in .*ZeroDivision"):
        engine(plugin("guilty", **{POLICY: lambda: 1 / 0}), around)
    with pytest.raises(ConfigError, match="unknown eviction policy 'x'"):
        engine(around, policy="x")


def test_a_wrapper_may_answer_where_nobody_else_does() -> None:
    def rescue() -> Any:
        try:
            return (yield) or LRU()
        except PluginError:
            return LRU()

    around = wrapper("kind", POLICY, rescue)
    assert type(policy_of(Hooks.of(around), "x")) is LRU
    failing = plugin("failing", **{POLICY: lambda: 1 / 0})
    assert type(policy_of(Hooks.of(failing, around))) is LRU


def test_a_plugin_that_calls_hooks_itself_takes_nobody_elses_blame() -> None:
    inner = Hooks.of(plugin("inner", **{POLICY: lambda: LRU()}))

    def asks() -> None:
        policy_of(inner)

    def asks_around() -> Any:
        answer = yield
        policy_of(inner)
        return answer

    hooks = Hooks.of(
        plugin("guilty", **{POLICY: lambda: 5}),
        plugin("asks", **{POLICY: asks}),
        wrapper("around", POLICY, asks_around),
    )
    with pytest.raises(PluginError, match="'guilty' answered"):
        policy_of(hooks)


# -- names of policies -------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "lru", "mine"])
def test_two_plugins_with_one_policy_name_do_not_start(name: str) -> None:
    def one(owner: str) -> Any:
        return plugin(
            owner,
            kvp_register_eviction_policies=lambda: {"mine": "the best"},
            kvp_make_eviction_policy=lambda ctx: LRU() if ctx.name == "mine" else None,
        )

    engine(one("first"), policy=name)
    with pytest.raises(PluginError, match=r"'first' and .*'second' both .* 'mine'"):
        engine(one("first"), one("second"), policy=name)


def test_a_plugin_that_offers_lru_does_not_start() -> None:
    mine = plugin("mine", kvp_register_eviction_policies=lambda: {"lru": "better"})
    with pytest.raises(PluginError, match=r"'core'.*'mine' both .* 'lru'"):
        engine(mine)


def test_a_plugin_that_makes_the_policy_of_another_one_is_an_error() -> None:
    mine = plugin("mine", **{POLICY: lambda: LRU()})
    with pytest.raises(
        PluginError, match=r"'mine' makes .* 'lru', .* taken by .*'core'"
    ):
        engine(mine, policy="lru")
    assert type(policy_of(Hooks.of(mine), "another")) is LRU


def test_a_wrapper_may_replace_the_policy_of_another_one() -> None:
    class Watched(LRU):
        """What it put in place of LRU."""

    def watch() -> Any:
        yield
        return Watched()

    assert type(policy_of(Hooks.of(wrapper("w", POLICY, watch)), "lru")) is Watched


def test_names_are_asked_once() -> None:
    asked = []
    mine = plugin("mine", **{NAMES: lambda: asked.append(1)})
    hooks = Hooks.of(mine)
    for _ in range(3):
        policy_of(hooks)
    assert asked == [1]


# -- the version of the hooks ------------------------------------------------------


@pytest.mark.parametrize("version", ["1", None, 1.0, True])
def test_the_version_of_the_hooks_is_an_integer(version: object) -> None:
    mine = SimpleNamespace(__name__="mine", KVP_HOOK_API_VERSION=version)
    with pytest.raises(
        PluginError, match=f"'mine' .*{version!r}: it must be an integer"
    ):
        Hooks.of(mine)


# -- choices -----------------------------------------------------------------------

ERRORS = [ConfigError("no key"), CapacityError("no room"), PluginError("no idea")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("wraps", [False, True])
def test_whatever_a_choice_raises_the_log_names_its_plugin(
    error: Exception, wraps: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> Any:
        raise error

    def fail_around() -> Any:
        yield
        raise error

    guilty = (
        wrapper("guilty", CHOICE, fail_around)
        if wraps
        else plugin("guilty", **{CHOICE: fail})
    )
    innocent = wrapper("innocent", CHOICE, unchanged)
    assert choose(Hooks.of(guilty, innocent)) == [4, 8]
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    kind = type(error).__name__
    assert f"'guilty' failed in {CHOICE}: {kind}: {error}" in record.getMessage()
    assert "innocent" not in record.getMessage()


def test_a_wrapper_that_drops_a_choice_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert choose(Hooks.of(wrapper("guilty", CHOICE, to_none))) == [4, 8]
    assert "'guilty' answered kvp_choose_checkpoints with None" in caplog.text


def test_a_wrapper_of_listeners_is_named_whatever_it_raises(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> Any:
        yield
        raise ConfigError("no key")

    Hooks.of(wrapper("guilty", "kvp_on_events", fail)).on_events([])
    (record,) = caplog.records
    assert "'guilty' failed in kvp_on_events" in record.getMessage()
