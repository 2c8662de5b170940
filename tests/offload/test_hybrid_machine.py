"""Random lives of engines with models of every kind (`hybrid_life.py`).

The default run has a few dozen short ones a kind of model by seed, and some of
hypothesis, which makes a short story of what it finds; the long ones are for
`make test-full`.
"""

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, reject, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvplugin.errors import CapacityError
from tests.offload.hybrid_life import FATES, TIMEOUT, Life, random_life
from tests.offload.hybrid_mixes import MIXES

SETTINGS: Any = st.fixed_dictionaries(
    {
        "ranks": st.sampled_from([1, 2]),
        "depth": st.sampled_from([1, 2]),
        "host": st.sampled_from([4, 1, 0.3]),
        "budget": st.sampled_from([16, 24, 8]),
        "kv_load_failure_policy": st.sampled_from(["recompute", "fail"]),
        "engine": st.fixed_dictionaries({"asks_pending_work": st.booleans()}),
        "offload": st.fixed_dictionaries(
            {
                "blocks_per_chunk": st.sampled_from([1, 2, 3]),
                "offload_prompt_only": st.booleans(),
                "min_load_tokens": st.sampled_from([None, 1, 12]),
                "max_overdue_fraction": st.sampled_from([0.1, 0.0, 1.0]),
            }
        ),
    }
)
ARRIVALS = st.tuples(
    st.integers(0, 1),
    st.sampled_from([48, 40, 32, 31, 24, 17, 16, 8, 0]),
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.integers(1, 10),
    st.sampled_from(["", "", "s"]),
)
ANY = st.integers(0, 99)
"""Picks one of what there is at the time."""


class HybridMachine(RuleBasedStateMachine):
    """Few rules, each of several things that may happen: with many small ones, few
    runs would get as far as a load."""

    life: Life

    @initialize(
        name=st.sampled_from(sorted(MIXES)),
        settings=SETTINGS,
        served=st.lists(ARRIVALS, max_size=2),
    )
    def start(self, name: str, settings: dict[str, Any], served: list[Any]) -> None:
        try:
            self.life = Life(MIXES[name], **settings)
        except CapacityError:
            reject()
        for arrival in served:
            self.life.arrive(*arrival)
        self.life.lab.run()
        self.life.lab.forget_local()
        self.life.lab.hold()

    @rule(
        arrivals=st.lists(ARRIVALS, min_size=1, max_size=3),
        is_local_lost=st.booleans(),
        steps=st.integers(0, 3),
    )
    def arrive(self, arrivals: list[Any], is_local_lost: bool, steps: int) -> None:
        if is_local_lost:
            self.life.lose_local(None)
        for arrival in arrivals:
            self.life.arrive(*arrival)
        self.life.lab.steps(steps)

    @rule(
        fates=st.lists(st.sampled_from(FATES), min_size=1, max_size=6),
        steps=st.integers(1, 5),
        seconds=st.sampled_from([0.0, 0.05, TIMEOUT / 2]),
        is_late=st.booleans(),
    )
    def go_on(
        self, fates: list[str | int], steps: int, seconds: float, is_late: bool
    ) -> None:
        self.life.go_on(fates, steps, seconds, is_late)

    @rule(what=st.sampled_from(["result", "report", "drain"]), number=ANY)
    def disturb_jobs(self, what: str, number: int) -> None:
        self.life.disturb_jobs(what, number)

    @rule(is_preempted=st.booleans(), number=ANY, steps=st.integers(0, 2))
    def disturb_requests(self, is_preempted: bool, number: int, steps: int) -> None:
        if is_preempted:
            self.life.preempt(number)
        else:
            self.life.abort(number)
        self.life.lab.steps(steps)

    @rule(lost=st.none() | st.lists(st.integers(1, 14), max_size=4))
    def lose(self, lost: list[int] | None) -> None:
        self.life.lose_local(lost)

    @rule(what=st.sampled_from(["reset", "reset running", "weights"]))
    def reset(self, what: str) -> None:
        if what == "weights":
            self.life.change_weights()
        else:
            self.life.reset(reset_running=what == "reset running")

    @rule(steps=st.integers(0, 2))
    def be_overdue(self, steps: int) -> None:
        self.life.time_goes_by(TIMEOUT + 1)
        self.life.lab.steps(steps)

    @invariant()
    def all_is_well(self) -> None:
        self.life.check()

    def teardown(self) -> None:
        if hasattr(self, "life"):
            self.life.end()


BOUNDED = settings(
    deadline=None, stateful_step_count=25, suppress_health_check=list(HealthCheck)
)


class TestMachine(HybridMachine.TestCase):
    settings = settings(BOUNDED, max_examples=30)


@pytest.mark.full
class TestMachineAtLength(HybridMachine.TestCase):
    settings = settings(BOUNDED, max_examples=3000)


WANTED = (
    *("loads", "complete load", "complete store", "fail load", "fail store"),
    *("torn load", "torn store", "move load", "move store", "overdue"),
    *("preempt", "abort running", "abort waiting", "abort loading", "epoch"),
    *("result", "report", "drain", "reset True", "reset False"),
)
"""What the lives of a kind of model must have had between them."""


def lives(name: str, seeds: range) -> Counter[str]:
    happened: Counter[str] = Counter()
    for seed in seeds:
        happened += random_life(name, seed)
    return happened


def test_random_lives_of_every_model() -> None:
    happened: Counter[str] = Counter()
    for name in MIXES:
        of_this = lives(name, range(3))
        assert of_this["loads"], f"{name}: nothing was loaded"
        happened += of_this
    missing = [what for what in WANTED if not happened[what]]
    assert not missing, f"the lives are too tame: {happened}"


@pytest.mark.full
@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("first", range(100, 600, 50))
def test_many_random_lives(name: str, first: int) -> None:
    assert lives(name, range(first, first + 50))["loads"]
