"""Failed synchronous loads under the schedulers of both versions, also where steps
overlap: nobody is served what was computed from them. vLLM's own class runs the same
scripts, and goes wrong."""

from itertools import product
from typing import Any

import pytest

from kvplugin.errors import ConfigError
from kvplugin.integration.vllm.policy_config import read_policy_config
from tests.core.vllm_drives import FULL, WINDOW
from tests.oracles import V019, V032, ask
from tests.oracles.load_drive import Ask, LoadOutcome, LoadRun
from tests.oracles.policy_drive import PolicyRun

ON: dict[str, Any] = {}
"""What is configured: nothing; protection is on by default."""
OFF: dict[str, Any] = {"protect_from_failed_loads": False}
GROUPS = {"full": [FULL], "window": [WINDOW], "both": [FULL, WINDOW]}
PROMPT = list(range(2, 35))
"""Eight blocks of four tokens and one token more."""
OWNER = Ask("owner", PROMPT, claimed=32, fails_at=0)
NEXT = Ask("next", PROMPT)
LOADING = Ask("owner", PROMPT, claimed=32, fails_at=2, is_async=True)

Script = dict[int, list[Ask | str]]

SCRIPTS: dict[str, Script] = {
    "owner leaves before its step returns": {0: [OWNER, "owner"], 2: [NEXT]},
    "owner leaves after its step": {0: [OWNER], 2: ["owner"], 3: [NEXT]},
    "another arrives while it recomputes": {0: [OWNER], 2: [NEXT]},
    "another is in the next step": {0: [OWNER], 1: [NEXT]},
    "another is in the next step, and both leave": {
        0: [OWNER],
        1: [Ask("other", [*PROMPT, 40, 41, 42, 43, 44]), "owner", "other"],
        3: [Ask("next", [*PROMPT, 40, 41, 42, 43, 44, 45])],
    },
    "others share it from the first step": {
        0: [OWNER, NEXT, Ask("half", [*PROMPT[:16], 77, 78, 79])],
    },
    "it would end in that step": {0: [Ask("owner", PROMPT, 32, 0, answer=1)]},
    "a part is sound": {0: [Ask("owner", PROMPT, 32, 3)], 2: [NEXT]},
    "every load fails": {
        0: [Ask(f"r{i}", [*PROMPT, 50 + i], 32, 0) for i in range(3)],
        1: [Ask("r3", PROMPT, 32, 1)],
        4: [Ask("r4", PROMPT, 32, 2), Ask("unrelated", PROMPT[5:], 20)],
    },
    "another loads beside it": {
        0: [OWNER],
        1: [Ask("next", [*PROMPT[:20], *range(50, 70)], 36, None, is_async=True)],
    },
}
"""By name: what happens by step. Loads of `OWNER` fail."""
WRONG_UNPROTECTED = {
    1: (
        "owner leaves before its step returns",
        "owner leaves after its step",
        "another arrives while it recomputes",
        "others share it from the first step",
    ),
    2: ("another is in the next step", "it would end in that step"),
}
"""By steps under way: scripts that vLLM's own recovery serves wrongly."""
WRONG_WINDOWS: dict[str, tuple[int, Script]] = {
    name: (n, SCRIPTS[name])
    for name, n in (
        ("owner leaves after its step", 1),
        ("another is in the next step", 2),
        ("others share it from the first step", 2),
    )
} | {"an asynchronous load fails": (1, {0: [LOADING], 3: [NEXT]})}
"""With windows alone: steps under way, and a script that ends in wrong texts."""


def run_of(
    groups: str = "full",
    in_flight: int = 1,
    settings: dict[str, Any] | None = None,
    *,
    num_blocks: int = 60,
    seed: int = 0,
    policy: str = "recompute",
    **more: Any,
) -> LoadRun:
    return LoadRun(
        PolicyRun(
            groups=GROUPS[groups],
            settings=settings,
            in_flight=in_flight,
            num_blocks=num_blocks * len(GROUPS[groups]),
            seed=seed,
            steps=60 if "script" not in more else 6,
        ),
        failure_policy=policy,
        **more,
    )


def scripted() -> dict[Any, LoadRun]:
    """By script, groups, steps under way and policy; chunks of one block."""
    return {
        (name, groups, n, policy): run_of(
            groups, n, ON, policy=policy, script=script, chunk=4
        )
        for (name, script), groups, n, policy in product(
            SCRIPTS.items(), GROUPS, (1, 2), ("recompute", "fail")
        )
    }


def unprotected() -> dict[Any, LoadRun]:
    return (
        {
            ("unprotected", name, n): run_of(
                "full", n, OFF, script=SCRIPTS[name], chunk=4
            )
            for n, names in WRONG_UNPROTECTED.items()
            for name in names
        }
        | {
            ("unprotected window", name): run_of(
                "window", n, OFF, script=script, chunk=4
            )
            for name, (n, script) in WRONG_WINDOWS.items()
        }
        | {
            ("unprotected", "several groups"): run_of(
                "both", 1, OFF, script=SCRIPTS["a part is sound"]
            )
        }
    )


def random_runs() -> dict[Any, LoadRun]:
    """Workloads with aborts, a pool that is too small, and loads of both kinds."""
    return {
        ("random", groups, n, policy, pipelined): run_of(
            groups,
            n,
            ON | {"eviction_policy": "sieve" if pipelined else "lru"},
            policy=policy,
            num_blocks=40,
            asynchronous=0.3,
            pipelined=pipelined,
            seed=n,
        )
        for groups, policy in product(GROUPS, ("recompute", "fail"))
        for n, pipelined in ((1, False), (2, False), (2, True))
    }


def special() -> dict[Any, LoadRun]:
    return {
        "asynchronous": run_of("full", 1, ON, script={0: [LOADING]}),
        "no failure": run_of("full", 2, ON, failures=0.0),
        "no failure, unprotected": run_of("full", 2, OFF, failures=0.0),
        "not as expected": run_of(
            "full", 1, ON, script={0: [OWNER]}, missing="_preempt_request"
        ),
    }


@pytest.fixture(scope="module", params=[V032, V019])
def asked(request: Any) -> dict[Any, LoadOutcome]:
    """All that is asked of one version, in one process."""
    runs = scripted() | unprotected() | random_runs() | special()
    outcomes = ask(request.param, "load_runs", list(runs.values()))
    return dict(zip(runs, outcomes, strict=True))


def assert_nobody_is_harmed(outcome: LoadOutcome) -> None:
    assert outcome.error == ""
    assert outcome.wrong == outcome.short == []
    assert (outcome.poisoned, outcome.leaked, outcome.errors) == (0, 0, [])


@pytest.mark.parametrize("name", SCRIPTS)
def test_nobody_is_served_what_was_computed_from_a_failed_load(asked, name):
    for groups, n, policy in product(GROUPS, (1, 2), ("recompute", "fail")):
        outcome = asked[name, groups, n, policy]
        assert_nobody_is_harmed(outcome)
        assert outcome.bad_loads > 0
        if policy == "recompute":
            assert outcome.failed == []


@pytest.mark.parametrize("n", WRONG_UNPROTECTED)
def test_vllms_own_recovery_serves_it(asked, n):
    """Else the scripts would show nothing."""
    for name in WRONG_UNPROTECTED[n]:
        outcome = asked["unprotected", name, n]
        assert outcome.wrong or outcome.poisoned or outcome.error


@pytest.mark.parametrize("name", WRONG_WINDOWS)
def test_where_there_are_windows_alone_its_texts_are_wrong(asked, name):
    assert asked["unprotected window", name].wrong


def test_several_groups_end_vllms_engine_and_not_ours(asked):
    assert asked["unprotected", "several groups"].error
    assert_nobody_is_harmed(asked["a part is sound", "both", 1, "recompute"])


@pytest.mark.parametrize("n", [1, 2])
def test_whoever_comes_later_finds_nothing_of_it(asked, n):
    outcome = asked["owner leaves before its step returns", "full", n, "recompute"]
    assert outcome.cached["next"] == 0


@pytest.mark.parametrize("n", [1, 2])
def test_what_was_loaded_well_is_kept(asked, n):
    outcome = asked["a part is sound", "full", n, "recompute"]
    assert outcome.cached["owner"] == outcome.counts["owner"] == 12


def test_sharers_are_preempted_once_and_others_are_not(asked):
    outcome = asked["others share it from the first step", "full", 1, "recompute"]
    assert sorted(outcome.preempted) == ["half", "next", "owner"]
    everything = asked["every load fails", "full", 1, "recompute"]
    assert "unrelated" not in everything.preempted


def test_a_connector_that_always_fails_is_not_asked_again(asked):
    for groups, n in product(GROUPS, (1, 2)):
        outcome = asked["every load fails", groups, n, "recompute"]
        assert all(claims == 1 for claims in outcome.claims.values())


def test_under_fail_who_read_it_ends_with_an_error(asked):
    outcome = asked["others share it from the first step", "full", 1, "fail"]
    assert sorted(outcome.failed) == ["half", "next", "owner"]
    alone = asked["another arrives while it recomputes", "full", 1, "fail"]
    assert alone.failed == ["owner"]
    assert alone.cached["next"] == 0


def test_asynchronous_failures_stay_vllms(asked):
    outcome = asked["asynchronous"]
    assert_nobody_is_harmed(outcome)
    assert outcome.preempted == []
    assert outcome.cached["owner"] == 8


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_whatever_happens_texts_and_cache_are_right(asked, groups, policy):
    for n, pipelined in ((1, False), (2, False), (2, True)):
        outcome = asked["random", groups, n, policy, pipelined]
        assert_nobody_is_harmed(outcome)
        assert outcome.bad_loads > 0


def test_without_failures_nothing_is_decided_otherwise(asked):
    ours, theirs = asked["no failure"], asked["no failure, unprotected"]
    assert ours.kind == "KVPluginProtectedAsyncScheduler"
    assert theirs.kind == "KVPluginAsyncScheduler"
    assert ours.cached == theirs.cached
    assert ours.preempted == theirs.preempted
    assert_nobody_is_harmed(ours)


def test_what_does_not_fit_is_switched_off_with_one_error(asked):
    outcome = asked["not as expected"]
    assert outcome.kind == "KVPluginScheduler"
    (error,) = outcome.errors
    assert "protection from failed synchronous loads are off" in error
    assert "_preempt_request" in error


def test_it_is_on_unless_it_is_switched_off():
    assert read_policy_config({}).protect_from_failed_loads
    assert not read_policy_config({"kvplugin": OFF}).protect_from_failed_loads
    with pytest.raises(ConfigError, match="protect_from_failed_loads"):
        read_policy_config({"kvplugin": {"protect_from_failed_loads": "no"}})
