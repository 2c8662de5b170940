"""`KVPluginScheduler` over the schedulers of both versions, also where steps overlap,
which no platform of the tests allows an engine."""

import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from tests.core.vllm_drives import FULL, WINDOW
from tests.oracles import V019, V032, ask
from tests.oracles.policy_drive import Outcome, PolicyRun

VLLMS_OWN: dict[str, Any] = {"eviction_policy": "retention"}
"""Ranks as LRU does while nobody gives hints, behind our pool and our queue."""
CHOICES: list[dict[str, Any]] = [
    {"eviction_policy": "queue+s3fifo"},
    {"eviction_policy": "retention+queue+random"},
    {"waiting_order": "cached_first"},
    {
        "waiting_order": "shortest_first",
        "admission": "free_share",
        "admission_options": {"share": 0.3},
    },
    {"eviction_policy": "sieve", "victim": "most_blocks"},
    {"victim": "least_work"},
]
SIZES = {1: 31, 2: 52}
"""Blocks of a pool that is too small, by the number of groups."""
NEWER = {
    "kv_cache_utils.FreeKVCacheBlockQueue": "eviction policies are off",
    "sched.request_queue.RequestQueue": "waiting order, admission, demand are off",
}


def situations(version: str) -> Iterator[dict[str, Any]]:
    """Groups, vLLM's own policy, steps under way."""
    for groups, policy, in_flight in product(
        ([FULL], [FULL, WINDOW]), ("fcfs", "priority"), (1, 2)
    ):
        if in_flight == 1 or version == V032:
            yield {
                "groups": groups,
                "policy": policy,
                "in_flight": in_flight,
                "num_blocks": SIZES[len(groups)],
            }


def workloads(version: str) -> list[list[PolicyRun]]:
    """vLLM's own class, an empty configuration, `VLLMS_OWN`, then `CHOICES`."""
    return [
        [PolicyRun(settings=s, **situation) for s in (None, {}, VLLMS_OWN, *CHOICES)]
        for situation in situations(version)
    ]


def special(version: str) -> dict[str, PolicyRun]:
    """Runs that are about the start."""
    del version
    full: dict[str, Any] = {"groups": [FULL], "num_blocks": 31}
    both = {"eviction_policy": "sieve", "waiting_order": "cached_first"}
    sieve: dict[str, Any] = {
        "settings": {"eviction_policy": "sieve"},
        "fails": "policies.eviction.sieve.Sieve.bind",
    }
    refused = {"victim": "least_work"}
    return {
        "disabled": PolicyRun(
            settings={"no": "key"}, environment={"KVPLUGIN_DISABLE": "1"}, **full
        ),
        "unknown": PolicyRun(settings={"victm": "last"}, **full),
        "priority": PolicyRun(
            settings=refused | {"on_start_error": "disable"}, policy="priority", **full
        ),
        "fails": PolicyRun(**sieve, **full),
        "not started": PolicyRun(
            **sieve | {"settings": sieve["settings"] | {"on_start_error": "disable"}},
            **full,
        ),
        **{name: PolicyRun(settings=both, newer=name, **full) for name in NEWER},
    }


@pytest.fixture(scope="module", params=[V032, V019])
def asked(request) -> tuple[str, list[list[Outcome]], dict[str, Outcome]]:
    """All that is asked of one version, in one process."""
    version = request.param
    grouped, named = workloads(version), special(version)
    flat = [run for runs in grouped for run in runs]
    outcomes = iter(ask(version, "policy_runs", [*flat, *named.values()]))
    answers = [[next(outcomes) for _ in runs] for runs in grouped]
    return version, answers, dict(zip(named, outcomes, strict=True))


def decisions(outcome: Outcome) -> list[Any]:
    """The transcript without the ids of blocks."""
    return [
        (scheduled, [name for name, _ in new], preempted)
        for scheduled, new, _, preempted in outcome.transcript
    ]


def texts(outcome: Outcome, *others: Outcome) -> dict[str, list[int]]:
    """Of requests that no run aborted."""
    aborted = {name for one in (outcome, *others) for name in one.aborted}
    return {n: text for n, text in outcome.texts.items() if n not in aborted}


def test_the_base_is_the_class_that_vllm_would_take(asked):
    version, answers, _ = asked
    for situation, (own, *ours) in zip(situations(version), answers, strict=True):
        is_async = situation["in_flight"] > 1
        assert own.kind == ("AsyncScheduler" if is_async else "Scheduler")
        for outcome in ours:
            if outcome.error:
                assert situation["policy"] == "priority"
                continue
            assert outcome.kind == f"KVPlugin{own.kind}"
            assert outcome.restored


def test_nothing_configured_decides_nothing(asked):
    _, answers, _ = asked
    for own, empty, *_ in answers:
        assert empty.transcript == own.transcript


def test_our_queue_and_pool_decide_as_vllms_own(asked):
    version, answers, _ = asked
    for own, _, ours, *_ in answers:
        if version == V032:  # 0.19 mixes key-less blocks into its order
            assert decisions(ours) == decisions(own)
        assert texts(ours, own) == texts(own, ours)


def test_whatever_is_chosen_the_texts_are_the_same_and_no_block_is_lost(asked):
    version, answers, _ = asked
    for situation, outcomes in zip(situations(version), answers, strict=True):
        own = outcomes[0]
        for settings, outcome in zip(CHOICES, outcomes[3:], strict=True):
            if "victim" in settings and situation["policy"] == "priority":
                assert "victim=" in outcome.error
                continue
            assert outcome.error == ""
            assert texts(outcome, own) == texts(own, outcome)
            assert outcome.free == situation["num_blocks"] - 1
            assert (outcome.failures, outcome.errors) == (0, [])


def test_choices_make_a_difference(asked):
    """More hits of waiting prefixes and cached prompts; other victims."""
    version, answers, _ = asked
    fcfs = [
        outcomes
        for situation, outcomes in zip(situations(version), answers, strict=True)
        if situation["policy"] == "fcfs"
    ]
    hits = [sum(outcomes[i].cached for outcomes in answers) for i in range(6)]
    assert hits[3] > hits[0]
    assert hits[5] > hits[0]
    assert any(outcomes[8].preempted != outcomes[0].preempted for outcomes in fcfs)


def test_the_environment_makes_it_vllms_own_class(asked):
    *_, named = asked
    assert (named["disabled"].kind, named["disabled"].error) == ("Scheduler", "")


def test_wrong_settings_end_the_start(asked):
    *_, named = asked
    assert "Did you mean 'victim'" in named["unknown"].error
    assert "victim='least_work'" in named["priority"].error
    fails = "PluginError: eviction_policy='sieve': .*bind fails: RuntimeError: boom"
    assert re.match(fails, named["fails"].error)


def test_what_cannot_start_is_left_out_where_the_user_wants_that(asked):
    *_, named = asked
    outcome = named["not started"]
    assert (outcome.kind, outcome.error) == ("Scheduler", "")
    (error,) = outcome.errors
    assert "kvplugin policies are off, they did not start" in error


@pytest.mark.parametrize("name", NEWER)
def test_what_does_not_fit_is_switched_off_with_one_error(asked, name):
    version, _, named = asked
    outcome = named[name]
    assert (outcome.kind, outcome.error) == ("KVPluginScheduler", "")
    (error,) = outcome.errors
    assert NEWER[name] in error
    assert version in error
    assert "new methods in_a_newer_version" in error
