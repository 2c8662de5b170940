"""Offload policies by name: the core's, plugins', and those of nobody."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvplugin import hookimpl
from kvplugin.errors import ConfigError, PluginError
from kvplugin.hooks import Hooks, OffloadPolicyContext
from kvplugin.policies.offload import AdmitAll, OffloadContext
from kvplugin.policies.offload.registry import OFFLOAD_POLICIES

REGISTER, MAKE = "kvp_register_offload_policies", "kvp_make_offload_policy"


def plugin(**implementations: Callable[..., Any]) -> Any:
    marked = {hook: hookimpl(function) for hook, function in implementations.items()}
    return SimpleNamespace(__name__="mine", **marked)


def context(name: str = "", **options: object) -> OffloadPolicyContext:
    return OffloadPolicyContext(name=name, options=options, num_blocks=9)


def store(request_id: str = "r", prefix_tokens: int = 16) -> OffloadContext:
    return OffloadContext(
        request_id=request_id, block_tokens=4, prefix_tokens=prefix_tokens
    )


def test_all_is_the_default_under_both_its_names() -> None:
    for name in ("", "all"):
        policy = Hooks.of().make_offload_policy(context(name))
        assert type(policy) is AdmitAll
        assert policy.admit([b"a", b"b"], store()) == [True, True]


def test_the_core_offers_what_it_makes() -> None:
    assert Hooks.of().register_offload_policies().keys() == OFFLOAD_POLICIES.keys()
    for name in OFFLOAD_POLICIES:
        policy = Hooks.of().make_offload_policy(context(name))
        assert len(policy.admit([b"a", b"b"], store())) == 2


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("al", {}, r"'al' in offload_policy\. Did you mean 'all'"),
        ("all", {"memory": 3}, "'all' takes no options, got memory"),
        ("second_touch", {"memry": 3}, "mean 'memory'"),
        ("second_touch", {"memory": 0}, "offload_policy_options: memory=0 must be"),
        ("min_depth", {"min_tokens": 0.5}, "offload_policy_options: .*min_tokens"),
    ],
)
def test_what_nobody_makes_is_refused(
    name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Hooks.of().make_offload_policy(context(name, **options))


def test_a_policy_may_come_from_a_plugin() -> None:
    class Mine(AdmitAll):
        """Another one."""

    def make(ctx: OffloadPolicyContext) -> AdmitAll | None:
        return Mine() if ctx.name == "mine" else None

    hooks = Hooks.of(plugin(**{REGISTER: lambda: {"mine": "better"}, MAKE: make}))
    assert type(hooks.make_offload_policy(context("mine"))) is Mine
    assert type(hooks.make_offload_policy(context())) is AdmitAll
    assert "mine" in hooks.register_offload_policies()


def test_names_have_one_owner() -> None:
    hooks = Hooks.of(plugin(**{REGISTER: lambda: {"all": "mine is better"}}))
    with pytest.raises(PluginError, match=r"'core'.*'mine' both .* policy 'all'"):
        hooks.register_offload_policies()
    hooks = Hooks.of(plugin(**{MAKE: lambda: AdmitAll()}))
    with pytest.raises(PluginError, match="'mine' makes the offload policy 'all'"):
        hooks.make_offload_policy(context("all"))
    hooks = Hooks.of(plugin(**{REGISTER: lambda: {"most": "nearly all"}}))
    with pytest.raises(PluginError, match="'mine' offers 'most'"):
        hooks.make_offload_policy(context("most"))


# -- what they want ----------------------------------------------------------------


def wants(name: str, **options: object) -> Callable[..., list[bool]]:
    policy = Hooks.of().make_offload_policy(context(name, **options))
    return lambda keys, ctx: list(policy.admit([key.encode() for key in keys], ctx))


def test_second_touch_wants_what_a_second_request_comes_with() -> None:
    admit = wants("second_touch")
    assert admit("abc", store("r1")) == [False] * 3
    assert admit("abc", store("r1")) == [False] * 3  # again, after a preemption
    assert admit("abd", store("r2")) == [True, True, False]
    assert admit("ab", store("r2")) == [True, True]  # it has been evicted meanwhile
    assert admit("d", store("r3")) == [True]


def test_second_touch_remembers_so_much_and_no_more() -> None:
    admit = wants("second_touch", memory=3)
    admit("abc", store("r1"))
    assert admit("a", store("r2")) == [True]
    admit("d", store("r2"))  # of b and c, seen longest ago, c is the tail
    assert admit("abd", store("r3")) == [True] * 3
    assert admit("c", store("r3")) == [False]


def test_min_depth_wants_all_of_a_long_prefix() -> None:
    admit = wants("min_depth", min_tokens=12)
    assert admit("ab", store(prefix_tokens=12)) == [True, True]
    assert admit("ab", store(prefix_tokens=8)) == [False, False]
