"""Every load succeeds, and everybody ends: whoever has blocks goes first, and nobody
who waits takes the room that it needs."""

from random import Random
from typing import Any

import pytest

from kvplugin.contract import WorkerOutcome
from kvplugin.request import RequestError
from tests.scheduler.harness import Harness, full, loaded, next_token, window

LIMIT = 3000
"""Steps of a run that gets somewhere; it takes a hundred or two."""


def test_a_loaded_request_keeps_the_room_that_others_gave_up_for_it() -> None:
    """It needs more than one victim, and their loads end one after the other."""
    engine = Harness(13, connects=True, max_num_batched_tokens=64)
    ends: dict[str, int] = {}
    for i, (name, length) in enumerate((("a", 40), ("b", 17), ("c", 17))):
        engine.add(
            name, range(100 * i, 100 * i + length), skip_reading_prefix_cache=True
        )
        engine.connector.offers[name] = 16
        ends[name] = 1 + 2 * i
    for step in range(40):
        engine.step(loaded(*[name for name, end in ends.items() if step >= end]))
        loading = engine.scheduler.state()["loading"]
        ends |= {name: step + 4 for name in loading if step >= ends[name]}
    assert next(iter(engine.reasons)) == "a"
    assert len(engine.reasons) == 3
    assert engine.is_idle()


def test_small_requests_do_not_overtake_a_loaded_one() -> None:
    """However many come: those that run end, and then there is room."""
    engine = Harness(8, connects=True, max_num_batched_tokens=64)
    small = 0

    def come(n: int) -> None:
        nonlocal small
        for _ in range(n):
            engine.add(f"s{small}", range(1000 + 9 * small, 1002 + 9 * small), 3)
            small += 1

    come(1)
    engine.step()
    engine.add("L", range(24))
    engine.connector.offers["L"] = 8
    come(2)
    engine.step()
    come(2)
    engine.step(loaded("L"))
    for _ in range(4):
        come(2)
        engine.step()
    assert engine.reasons["L"] == "length"


def test_nobody_overtakes_a_request_that_waits_for_frees() -> None:
    """A send will end soon: until then nobody takes what is left."""
    engine = Harness(
        7,
        connects=True,
        max_num_batched_tokens=12,
        scheduler_reserve_full_isl=False,
    )
    engine.add("h", range(200, 208))
    engine.connector.keeps.add("h")
    engine.add("a", range(23))
    engine.step()
    engine.step()
    engine.connector.frees_pending = True
    free = engine.kv.block_pool.get_num_free_blocks()
    assert free == 1
    for i in range(3):
        engine.add(f"f{i}", range(50 + 10 * i, 52 + 10 * i), 2)
        assert engine.step().num_scheduled_tokens == {}
        assert engine.kv.block_pool.get_num_free_blocks() == free
    engine.connector.frees_pending = False
    engine.step(WorkerOutcome(finished_sends=frozenset(["h"])))
    engine.run()
    assert list(engine.reasons)[:2] == ["h", "a"]
    assert engine.is_idle()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("ahead", [False, True])
def test_who_runs_loses_its_blocks_after_those_that_do_not(
    policy: str, ahead: bool
) -> None:
    """It waits for a load that is under way, and takes the blocks of who is loaded; by
    priority only if that one is not ahead of it."""
    engine = Harness(6, connects=True, policy=policy, scheduler_reserve_full_isl=False)
    runs = engine.add("runs", range(15), 4, priority=1)
    engine.step()
    loads = engine.add("loads", range(50, 70), priority=0 if ahead else 2)
    engine.connector.offers["loads"] = 8
    assert engine.step().num_scheduled_tokens == {"runs": 1}
    assert engine.step().num_scheduled_tokens == {}
    assert engine.step(loaded("loads")).num_scheduled_tokens == {}
    engine.step()
    gives_way = policy == "priority" and ahead
    assert [runs.num_preemptions, loads.num_preemptions] == [gives_way, not gives_way]
    while engine.scheduler.has_work():
        engine.step(loaded("loads"))
    assert engine.is_idle()


class Loads:
    """Loads that take as many steps as a seed says."""

    def __init__(self, engine: Harness, random: Random, longest: int) -> None:
        self.engine, self.random, self.longest = engine, random, longest
        self.left: dict[str, int] = {}

    def ended(self) -> list[str]:
        """Those that end with this step."""
        loading = self.engine.scheduler.state()["loading"]
        for name in loading:
            self.left.setdefault(name, self.random.randrange(self.longest + 1))
        names = [name for name in loading if self.left[name] <= 0]
        self.left = {n: k - 1 for n, k in self.left.items() if n not in names}
        return names


def run_to_the_end(engine: Harness, loads: Loads, depth: int) -> None:
    for _ in range(LIMIT):
        if not engine.scheduler.has_work():
            return
        while len(engine.in_flight) < (depth if engine.scheduler.requests else 1):
            engine.schedule()
        engine.land(loaded(*loads.ended()))
    raise AssertionError(f"nobody gets anywhere: {engine.scheduler.state()}")


def random_run(seed: int, **settings: Any) -> int:
    """A few requests, mostly too large for the pool together; preemptions."""
    random = Random(seed)
    depth = random.choice([1, 2])
    engine = Harness(
        random.randrange(6, 20),
        random.choice([None, None, [full(), window(7)]]),
        connects=True,
        pipeline_depth=depth,
        max_num_batched_tokens=random.choice([4, 8, 16, 64]),
        scheduler_reserve_full_isl=random.random() < 0.5,
        policy=random.choice(["fcfs", "priority"]),
        **settings,
    )
    loads = Loads(engine, random, random.choice([0, 1, 3, 9]))
    hits = random.random() < 0.5
    expected = {}
    for i in range(random.randrange(2, 7)):
        prompt = [random.randrange(9) for _ in range(random.randrange(1, 50))]
        name, priority = f"r{i}", random.randrange(2)
        try:
            engine.add(
                name,
                prompt,
                random.randrange(1, 9),
                priority=priority,
                skip_reading_prefix_cache=not hits,
            )
        except RequestError:
            continue
        engine.connector.offers[name] = random.randrange(len(prompt) + 1)
        expected[name] = next_token(prompt)
        for _ in range(random.randrange(3)):
            if engine.scheduler.requests and len(engine.in_flight) < depth:
                engine.schedule()
                if len(engine.in_flight) == depth:
                    engine.land(loaded(*loads.ended()))
    requests = [entry.request for entry in engine.scheduler.requests.values()]
    run_to_the_end(engine, loads, depth)
    assert engine.is_idle()
    assert {name: engine.outputs[name][0] for name in expected} == expected
    return sum(request.num_preemptions for request in requests)


@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_everybody_ends_if_every_load_succeeds(first: int) -> None:
    preemptions = sum(random_run(seed) for seed in range(first, first + 250))
    assert preemptions > 100, "the runs are too tame"


@pytest.mark.parametrize("seed", [6705, 11441])
def test_equals_do_not_take_turns_at_losing_their_blocks(seed: int) -> None:
    """Two steps in flight, by priority, and nobody has an arrival time."""
    random_run(seed)


@pytest.mark.full
@pytest.mark.parametrize("first", range(1000, 21000, 1000))
def test_everybody_ends_if_every_load_succeeds_for_long(first: int) -> None:
    for seed in range(first, first + 1000):
        random_run(seed)
