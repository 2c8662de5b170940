"""Plugins may keep waiting requests out; outputs stay the same and nobody stalls."""

import logging
from collections import Counter
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from kvplugin import hookimpl
from kvplugin.hooks import AdmissionContext, Hooks, VictimContext, WaitingContext
from kvplugin.testing import Lab
from tests.core.manager_setups import FORMAT, full, window

ADMISSION = "kvp_choose_admission"
DEPTHS = [1, 2]


def hooks_of(**implementations: Callable[..., Any]) -> Hooks:
    marked = {hook: hookimpl(function) for hook, function in implementations.items()}
    return Hooks.of(SimpleNamespace(__name__="mine", **marked))


def context() -> AdmissionContext:
    request: Any = SimpleNamespace(request_id="r")
    return AdmissionContext(
        request=request,
        step=1,
        num_running=1,
        num_waiting=1,
        free_blocks=3,
        num_blocks=8,
        policy="fcfs",
    )


def fail() -> bool:
    raise RuntimeError("no idea")


# -- the facade --------------------------------------------------------------------


def test_the_built_in_says_yes_and_is_not_asked_by_the_scheduler() -> None:
    assert not Hooks.of().chooses_admission
    assert Hooks.of().choose_admission(context()) is True


@pytest.mark.parametrize("answer", [True, False])
def test_the_answer_of_a_plugin_counts(answer: bool) -> None:
    hooks = hooks_of(**{ADMISSION: lambda: answer})
    assert hooks.chooses_admission
    assert hooks.choose_admission(context()) is answer


def test_without_an_opinion_the_next_one_is_asked() -> None:
    assert hooks_of(**{ADMISSION: lambda: None}).choose_admission(context()) is True


@pytest.mark.parametrize("wrong", [0, 1, "no", [], fail])
def test_a_plugin_that_fails_or_answers_nonsense_is_named(
    wrong: Any, caplog: pytest.LogCaptureFixture
) -> None:
    hooks = hooks_of(**{ADMISSION: wrong if callable(wrong) else lambda: wrong})
    assert hooks.choose_admission(context()) is True
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "plugin 'mine'" in caplog.text
    assert ADMISSION in caplog.text


def test_a_bool_that_is_not_pythons_is_told_apart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = type("bool", (), {"__module__": "numpy"})
    hooks = hooks_of(**{ADMISSION: lambda: other()})
    assert hooks.choose_admission(context()) is True
    assert "a numpy.bool in place of a bool" in caplog.text


# -- the scheduler -----------------------------------------------------------------


def lab_of(hooks: Hooks, depth: int = 1, usable: int = 20, **settings: Any) -> Lab:
    return Lab(
        [full(), window(8)],
        usable,
        hooks=hooks,
        depth=depth,
        hash_format=FORMAT,
        **settings,
    )


@pytest.mark.parametrize("depth", DEPTHS)
def test_nobody_is_asked_where_nobody_runs(depth: int) -> None:
    """An engine that always hears no serves one after the other."""
    most: list[int] = []

    class Never:
        """Says no."""

        @hookimpl
        def kvp_choose_admission(self, ctx: AdmissionContext) -> bool:
            most.append(ctx.num_running)
            return False

    lab = lab_of(Hooks.of(Never()), depth)
    for i in range(4):
        lab.add(range(10 * i, 10 * i + 7), 5)
    lab.drain()
    assert set(most) == {1}
    assert list(lab.reasons) == ["r0", "r1", "r2", "r3"]


@pytest.mark.parametrize("depth", DEPTHS)
def test_each_request_is_asked_about_once_a_step_when_it_is_its_turn(
    depth: int,
) -> None:
    asked: list[AdmissionContext] = []
    lab = lab_of(
        hooks_of(**{ADMISSION: lambda ctx: asked.append(ctx)}), depth, max_num_seqs=3
    )
    for i in range(5):
        lab.add([i] * 4, 4)
    lab.step()
    # r0 found nobody running; for r3 there is no room.
    told = [(c.request.request_id, c.num_running, c.num_waiting) for c in asked]
    assert told == [("r1", 1, 4), ("r2", 2, 3)]
    assert {(c.step, c.num_blocks, c.policy) for c in asked} == {(1, 20, "fcfs")}
    assert [c.free_blocks for c in asked] == [18, 16]
    lab.drain()
    times = Counter((c.step, c.request.request_id) for c in asked)
    assert set(times.values()) == {1}


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_no_ends_the_admissions_of_the_step(depth: int) -> None:
    refused = {"r1"}
    hooks = hooks_of(**{ADMISSION: lambda ctx: ctx.request.request_id not in refused})
    lab = lab_of(hooks, depth)
    for i in range(3):
        lab.add([i] * 4, 6)
    lab.step()
    assert [e.id for e in lab.scheduler._roster.running] == ["r0"]
    refused.clear()
    lab.step()
    assert [e.id for e in lab.scheduler._roster.running] == ["r0", "r1", "r2"]
    lab.drain()


def test_what_is_cached_and_what_comes_free_can_be_asked() -> None:
    cached: dict[str, int] = {}
    freed: dict[str, int] = {}
    asked: list[int] = []

    class Asks:
        """Asks everything."""

        @hookimpl
        def kvp_choose_waiting_order(self, ctx: WaitingContext) -> None:
            for request in ctx.waiting:
                if not request.num_preemptions:
                    cached[request.request_id] = ctx.cached_tokens(request)

        @hookimpl
        def kvp_choose_admission(self, ctx: AdmissionContext) -> None:
            asked.append(ctx.cached_tokens(ctx.request))

        @hookimpl
        def kvp_choose_victim(self, ctx: VictimContext) -> None:
            for request in ctx.candidates:
                freed.setdefault(request.request_id, ctx.freed_blocks(request))

    lab = Lab([full()], 9, hooks=Hooks.of(Asks()), hash_format=FORMAT)
    lab.add(range(12), 1)
    lab.run()
    stats = lab.kv.prefix_cache_stats
    for i in range(2):
        lab.add([*range(12), 50 + i], 16)
    lab.drain()
    assert cached == {"r0": 0, "r1": 12, "r2": 12}
    assert asked[0] == 12
    # Nine blocks: three are common, so each has three of its own.
    assert freed == {"r1": 3, "r2": 3}
    assert lab.kv.prefix_cache_stats is stats


# -- whatever they choose ----------------------------------------------------------


class Wild:
    """Yes, no, nothing, nonsense or an error, by a seed."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.refused = 0

    @hookimpl
    def kvp_choose_admission(self, ctx: AdmissionContext) -> Any:
        answer = self.random.choice([True, False, False, None, 3, "error"])
        if answer == "error":
            raise RuntimeError(ctx.request.request_id)
        self.refused += answer is False
        return answer


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_no_answer_changes_outputs_or_starves_anybody(policy: str, depth: int) -> None:
    for seed in range(5):
        random, wild = Random(seed), Wild(seed)
        lab = lab_of(Hooks.of(wild), depth, policy=policy)
        for i in range(8):
            prompt = [*range(random.randrange(12)), *[i] * random.randrange(1, 9)]
            lab.add(prompt, random.randrange(1, 9), priority=random.randrange(3))
        lab.drain()  # judges outputs, and that nothing is held
        assert set(lab.reasons.values()) == {"length"}
        assert wild.refused
