"""Policies that fail: no results, and none is lost."""

from collections.abc import Mapping

import pytest

from kvplugin.errors import PluginError
from kvplugin.hooks import EvictionPolicyContext, Hooks, hookimpl
from kvplugin.policies.eviction import LRU
from kvplugin.replay import Replay, ReplaySettings, RunFailedError, replay
from kvplugin.replay.cache import ReplayCache
from kvplugin.replay.run import run_requests
from tests.replay.traces import make_trace


class _Failing(LRU):
    def victims(self, n: int) -> list[int]:
        raise RuntimeError("no")


class _Uncountable(LRU):
    def __len__(self) -> int:
        raise RuntimeError("who counts?")


POLICIES = {"failing": _Failing, "uncountable": _Uncountable}


class FailingPlugin:
    @hookimpl
    def kvp_register_eviction_policies(self) -> Mapping[str, str]:
        return dict.fromkeys(POLICIES, "fails")

    @hookimpl
    def kvp_make_eviction_policy(self, ctx: EvictionPolicyContext) -> LRU | None:
        made = POLICIES.get(ctx.name)
        return made() if made else None


def failing(semantics: str = "chained", **more: object) -> ReplaySettings:
    rules = {"policies": ("failing",), "references": "none", "semantics": semantics}
    return ReplaySettings(**{**rules, **more})


def test_plugins_policies_run_and_failures_are_no_results() -> None:
    trace = make_trace([[1], [2], [3]])
    hooks = Hooks.of(FailingPlugin())
    with pytest.raises(PluginError, match="'failing' failed and was replaced"):
        replay(trace, failing(capacities=(2,)), hooks=hooks)
    result = replay(trace, failing(capacities=(3,)), hooks=hooks)
    assert result.runs[0].closed is None


@pytest.mark.parametrize("semantics", ["chained", "flat"])
def test_runs_before_a_failure_are_kept(semantics: str) -> None:
    trace = make_trace([[i] for i in range(50)])
    rules = failing(semantics, policies=("arc", "failing", "sieve"), capacities=(99, 2))
    with pytest.raises(RunFailedError, match="'failing' failed") as caught:
        replay(trace, rules, hooks=Hooks.of(FailingPlugin()))
    ran = [(run.policy, run.capacity) for run in caught.value.result.runs]
    assert ran == [("arc", 99), ("failing", 99), ("sieve", 99), ("arc", 2)]
    assert caught.value.result.rules


def test_a_run_ends_where_its_policy_fails() -> None:
    made = Replay(
        make_trace([[i] for i in range(50)]),
        failing(capacities=(2,)),
        hooks=Hooks.of(FailingPlugin()),
    )
    cache = ReplayCache(made.served, 2, "failing", {}, made.hooks)
    served: list[int] = []
    with pytest.raises(PluginError):
        run_requests(cache, made.requests, block_size=16, ticks=[served.append])
    assert len(served) == 3


def test_a_failing_host_policy_is_named() -> None:
    rules = failing(
        policies=("lru",), capacities=(2,), host_capacity=2, host_policy="failing"
    )
    with pytest.raises(PluginError, match="'failing' of the host tier failed"):
        replay(make_trace([[1], [2], [3]]), rules, hooks=Hooks.of(FailingPlugin()))


def test_a_policy_that_cannot_be_checked_is_named() -> None:
    rules = failing(policies=("lru", "uncountable"), capacities=(2,))
    with pytest.raises(RunFailedError, match=r"_Uncountable.*who counts") as caught:
        replay(make_trace([[1], [2]]), rules, hooks=Hooks.of(FailingPlugin()))
    assert [run.policy for run in caught.value.result.runs] == ["lru"]
