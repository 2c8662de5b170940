"""Plugins choose victims and the order of waiting requests, while loads fail and steps
are in flight: outputs are those of a run with everything off, and nothing leaks."""

from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from kvplugin import hookimpl
from kvplugin.hooks import Hooks, VictimContext, WaitingContext
from tests.scheduler.test_random_runs import MIXES, PressedLab

ORDER, VICTIM = "kvp_choose_waiting_order", "kvp_choose_victim"
KINDS = ["full", "full+window", "full+states", "full+aligned states"]


class AtRandom:
    """Anybody may be next, some are not named, and anybody loses its blocks."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.chosen: Counter[str] = Counter()

    @hookimpl
    def kvp_choose_waiting_order(self, ctx: WaitingContext) -> list[str]:
        ids = [request.request_id for request in ctx.waiting]
        self.chosen[ORDER] += len(ids) > 1
        return self.random.sample(ids, self.random.randrange(1, 1 + len(ids)))

    @hookimpl
    def kvp_choose_victim(self, ctx: VictimContext) -> str:
        self.chosen[VICTIM] += len(ctx.candidates) > 1
        return self.random.choice(ctx.candidates).request_id


class TracedLab(PressedLab):
    """Remembers where everything stood after each event."""

    def check(self) -> None:
        super().check()
        self.trace = [*getattr(self, "trace", ()), self.scheduler.state()]


def run(
    name: str, seed: int, hooks: Hooks | None, *, synchronous: bool = False, **how: Any
) -> TracedLab:
    """A run, judged by the oracles: outputs, content, balance, progress."""
    mix = MIXES[name]
    lab = TracedLab(
        mix.specs(0),
        mix.usable,
        seed=seed,
        hooks=hooks,
        synchronous=synchronous,
        policy="priority" if seed % 2 else "fcfs",
        **how,
    )
    lab.go()
    return lab


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", KINDS)
def test_whoever_is_chosen_outputs_are_right(
    name: str, depth: int, synchronous: bool
) -> None:
    chosen: Counter[str] = Counter()
    happened: Counter[str] = Counter()
    for seed in range(6):
        plugin = AtRandom(seed)
        lab = run(name, seed, Hooks.of(plugin), depth=depth, synchronous=synchronous)
        chosen += plugin.chosen
        happened += lab.happened
    assert chosen[ORDER] > 20, chosen
    assert chosen[VICTIM] > 2, chosen
    assert happened["synchronous failures" if synchronous else "fail"], happened


def raises() -> None:
    raise RuntimeError("no idea")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("answer", [raises, lambda: "r-1", lambda: [["r0"]]])
def test_a_plugin_without_a_usable_answer_changes_nothing(
    answer: Any, depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    marked = {hook: hookimpl(answer) for hook in (ORDER, VICTIM)}
    useless = Hooks.of(SimpleNamespace(__name__="useless", **marked))
    for seed in range(4):
        lab = run("full+window", seed, useless, depth=depth)
        plain = run("full+window", seed, Hooks.of(), depth=depth)
        assert lab.trace == plain.trace
        assert (lab.outputs, lab.reasons) == (plain.outputs, plain.reasons)
    for hook in (ORDER, VICTIM):
        assert any("'useless'" in text and hook in text for text in caplog.messages)
