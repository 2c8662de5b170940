"""What plugins are handed of a user's configuration, and names that cannot be."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvplugin import hookimpl
from kvplugin.errors import ConfigError, PluginError
from kvplugin.hooks import EvictionPolicyContext, Hooks, OffloadPolicyContext
from kvplugin.policies.eviction import LRU
from kvplugin.policies.offload import AdmitAll

CONTEXTS: dict[str, Any] = {
    "eviction": EvictionPolicyContext,
    "offload": OffloadPolicyContext,
}
KINDS = sorted(CONTEXTS)


def make(hooks: Hooks, kind: str, name: Any, options: Any) -> object:
    ctx = CONTEXTS[kind](name=name, options=options, num_blocks=9)
    made: Callable[[Any], object] = getattr(hooks, f"make_{kind}_policy")
    return made(ctx)


def plugin(kind: str, name: str, take: Callable[[Any], object]) -> Any:
    def implementation(ctx: Any) -> object:
        if ctx.name != name:
            return None
        take(ctx)
        return LRU() if kind == "eviction" else AdmitAll()

    hooks = {
        f"kvp_register_{kind}_policies": hookimpl(lambda: {name: "for a test"}),
        f"kvp_make_{kind}_policy": hookimpl(implementation),
    }
    return SimpleNamespace(__name__="mine", **hooks)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plugin_may_take_its_options_apart(kind: str) -> None:
    seen = []

    def take(ctx: Any) -> None:
        seen.append((ctx.options.pop("size"), ctx.options["table"].pop("deep")))
        ctx.options["list"][0].clear()

    options = {"size": 64, "table": {"deep": 1}, "list": [{"deeper": 2}]}
    hooks = Hooks.of(plugin(kind, "mine", take))
    for _ in range(2):
        make(hooks, kind, "mine", options)
    assert seen == [(64, 1)] * 2
    assert options == {"size": 64, "table": {"deep": 1}, "list": [{"deeper": 2}]}


def test_also_behind_another_one() -> None:
    hooks = Hooks.of(plugin("eviction", "mine", lambda ctx: ctx.options.clear()))
    options = {"mine": {"size": 64}}
    make(hooks, "eviction", "retention+mine", options)
    assert options == {"mine": {"size": 64}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [None, 5, ["lru"], b"lru"])
def test_a_name_that_is_no_text_is_refused(kind: str, name: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{kind}_policy=.* must be the name"):
        make(Hooks.of(), kind, name, {})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [None, [], "size=3", 5])
def test_options_that_are_no_table_are_refused(kind: str, options: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{kind}_policy_options=.* must be a table"):
        make(Hooks.of(), kind, "", options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_with_a_plus_is_refused_where_it_is_offered(kind: str) -> None:
    hooks = Hooks.of(plugin(kind, "a+b", lambda ctx: None))
    with pytest.raises(PluginError, match=r"'mine'.* with the name 'a\+b'"):
        getattr(hooks, f"register_{kind}_policies")()


@pytest.mark.parametrize("name", ["queue", "queue+lru", "retention+queue+arc"])
def test_who_needs_demand_serves_the_engines_own_blocks_only(name: str) -> None:
    hooks = Hooks.of()
    ctx = EvictionPolicyContext(name=name, num_blocks=9)
    hooks.make_eviction_policy(ctx)
    ctx = EvictionPolicyContext(name=name, num_blocks=9, medium="CPU")
    with pytest.raises(ConfigError, match=r"'queue'.* 'CPU': .* eviction_policy"):
        hooks.make_eviction_policy(ctx)
