"""The lab finds what a connector does wrong, and no run of it lasts for ever."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvplugin.contract import EngineBlocks
from kvplugin.errors import IntegrityError
from kvplugin.spec import KVCacheSpec
from kvplugin.testing import COMPLETES, LATE, TWICE, Fate
from kvplugin.testing import Lab as PublicLab
from kvplugin.testing.references import CountedBlocks
from tests.core.manager_setups import full, mamba, window
from tests.testing.lab import Lab

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"


@cache
def example() -> dict[str, Any]:
    """The names of the page's connector."""
    (source, *_) = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(source, PAGE.name, "exec"), names)  # noqa: S102
    return names


# -- connectors that are wrong ---------------------------------------------------------


class Careless:
    """References to blocks that nobody takes."""

    def acquire(self, ids: list[int]) -> None: ...
    def release(self, ids: list[int]) -> None: ...


def no_references(half: Any, worker: Any) -> None:
    half.bind_blocks(Careless())


def leaks(half: Any, worker: Any) -> None:
    half.blocks.release = lambda ids: None


def wrong_places(half: Any, worker: Any) -> None:
    plan = half._plan
    half._plan = lambda name, store, ids, places: plan(
        name, store, ids, places if store else [*places[1:], places[0]]
    )


def releases_twice(half: Any, worker: Any) -> None:
    release = half.blocks.release
    half.blocks.release = lambda ids: (release(ids), release(ids))


def hears_of_no_load(half: Any, worker: Any) -> None:
    poll = worker.poll
    worker.poll = lambda: _without_loads(poll())


def _without_loads(outcome: Any) -> Any:
    return type(outcome)(report=outcome.report)


def reports_early(half: Any, worker: Any) -> None:
    begin, poll = worker.begin_step, worker.poll
    started: set[str] = set()

    def begin_step(plan: bytes) -> None:
        begin(plan)
        started.update(name for name, _ in worker.loads.values())

    def early() -> Any:
        outcome = poll()
        ended = frozenset(started) | outcome.finished_loads
        started.clear()
        return type(outcome)(ended, report=outcome.report)

    worker.begin_step, worker.poll = begin_step, early


def hides_failures(half: Any, worker: Any) -> None:
    poll = worker.poll

    def lucky() -> Any:
        outcome = poll()
        return type(outcome)(outcome.finished_loads, report=outcome.report)

    worker.poll = lucky


def is_never_done(half: Any, worker: Any) -> None:
    half.has_pending_work = lambda: True


BROKEN: dict[Callable[[Any, Any], None], tuple[str, dict[bool, Fate]]] = {
    no_references: ("which is free|handed to|holds", {True: LATE}),
    leaks: (r"no progress: .*'connector references': \[1", {}),
    wrong_places: ("holds other bytes", {}),
    releases_twice: ("releases blocks", {}),
    hears_of_no_load: ("no progress", {}),
    reports_early: ("position", {False: LATE}),
    hides_failures: ("position", {False: Fate(error="x")}),
    is_never_done: ("no progress", {}),
}
"""By defect: the message, and fates of stores (True) and loads that show it."""


def pressed(depth: int, fates: dict[bool, Fate], broken: Callable[..., None]) -> None:
    """Requests that store and load, in a pool that holds one and a half of them."""
    names = example()
    half = names["Store"]()
    lab = PublicLab(
        [names["SPEC"]],
        16,
        depth=depth,
        connector=half,
        make_worker=names["Copies"],
        fate_of=lambda job: fates.get(job.store, COMPLETES),
    )
    broken(half, lab.model.workers[0])
    for first in (0, 100, 0, 100):
        lab.add(range(first, first + 37), 3)
        lab.run()
    lab.drain()
    assert any(not job.store for job in lab.transport.submitted)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_connector_is_found(
    broken: Callable[[Any, Any], None], depth: int
) -> None:
    message, fates = BROKEN[broken]
    with pytest.raises((AssertionError, IntegrityError), match=message):
        pressed(depth, fates, broken)
    pressed(depth, fates, lambda *_: None)


def test_references_are_counted() -> None:
    taken: list[list[int]] = []

    class Blocks(Careless):
        def acquire(self, ids: list[int]) -> None:
            taken.append(ids)

    blocks: EngineBlocks = CountedBlocks(Blocks())
    blocks.acquire([3, 0, 3, 4])
    blocks.release([3, 0])
    assert isinstance(blocks, CountedBlocks)
    assert blocks.taken == [3, 4]
    assert taken == [[3, 0, 3, 4]]
    with pytest.raises(AssertionError, match=r"releases blocks \[3\]"):
        blocks.release([3, 3])


# -- runs that would never end ---------------------------------------------------------


def never_decides(lab: Lab) -> None:
    lab.remote.undecided.add(lab.add(range(9), 2, remote_tokens=8))


def never_sends(lab: Lab) -> None:
    """Nobody is left, but blocks are held."""
    lab.remote.sends.add(lab.add(range(9), 2))


def never_has_done(lab: Lab) -> None:
    lab.add(range(9), 2)
    lab.remote.has_pending_work = lambda: True  # type: ignore[method-assign]


def never_reports(lab: Lab) -> None:
    lab.add(range(9), 2, remote_tokens=8)
    lab.transport.poll = lambda wait: []  # type: ignore[method-assign]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "hang", [never_decides, never_sends, never_has_done, never_reports]
)
def test_a_hang_is_an_error(hang: Callable[[Lab], None], depth: int) -> None:
    lab = Lab((full(), window(6)), 20, depth=depth)
    hang(lab)
    with pytest.raises(AssertionError, match="no progress"):
        lab.drain()


@pytest.mark.parametrize("depth", [1, 2])
def test_others_go_on_while_one_hangs(depth: int) -> None:
    lab = Lab((full(),), 20, depth=depth)
    never_decides(lab)
    other = lab.add(range(50, 59), 6)
    with pytest.raises(AssertionError, match="no progress"):
        lab.drain()
    assert lab.reasons == {other: "length"}


# -- fates -----------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_a_fate_of_many_polls_is_no_hang(depth: int) -> None:
    fates = {True: Fate(polls=25), False: Fate(polls=40, reports=TWICE.reports)}
    pressed(depth, fates, lambda *_: None)


# -- weights ---------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_new_weights_while_steps_are_in_flight(
    seed: int, depth: int, drafts: int
) -> None:
    """Old rows hold what old weights computed, new ones what the new ones do."""
    random = Random(seed)
    specs: tuple[KVCacheSpec, ...] = (full(), window(6), mamba("all", drafts=drafts))
    lab = Lab(specs, 40, depth=depth, drafts=drafts, lookahead=drafts, held=False)
    epoch = 0
    for _ in range(60):
        if random.random() < 0.3 and len(lab.scheduler.requests) < 5:
            prompt = range(random.randrange(1, 30))
            lab.add(prompt, random.randrange(1, 12), weight_epoch=epoch)
        if random.random() < 0.1:
            epoch += 1
            lab.scheduler.reset_prefix_cache(weight_epoch=epoch)
        lab.step()
    lab.drain()
    assert epoch > 2
    assert any(len(spans) > 1 for spans in lab._spans.values())


def test_a_lab_without_a_connector_serves_identities_apart() -> None:
    lab = PublicLab([full()], 20)
    for salt in (None, "a", "b"):
        lab.add(range(12), 4, cache_salt=salt)
        lab.run()
    lab.drain()
    assert len({tuple(tokens) for tokens in lab.outputs.values()}) == 3
    assert not lab.transport.submitted


def test_a_stop_token_ends_a_request() -> None:
    lab = PublicLab([full()], 20)
    name = lab.add(range(12), 4)
    lab.drain()
    again = lab.add(range(12), 4, stop_token_ids=lab.outputs[name][1:2])
    lab.drain()
    assert lab.reasons[again] == "stop"
    assert lab.outputs[again] == lab.outputs[name][:2]
