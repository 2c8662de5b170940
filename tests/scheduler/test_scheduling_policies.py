"""Scheduling policies by name: what each decides, that nobody starves, and that no
output depends on them."""

from collections.abc import Callable, Sequence
from itertools import product
from random import Random
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin import hookimpl
from kvplugin.errors import ConfigError
from kvplugin.hooks import (
    AdmissionContext,
    CheckpointContext,
    Hooks,
    HookSpecs,
    VictimContext,
    WaitingContext,
)
from kvplugin.policies.scheduling import SCHEDULING, SchedulingKind, make_scheduling
from kvplugin.policies.scheduling import aging as aging_module
from kvplugin.policies.scheduling.aging import Aging
from kvplugin.request import Request
from kvplugin.testing import Lab
from tests.core.manager_setups import FORMAT, full, mamba, window

NAMED = [(kind, name) for kind, names in SCHEDULING.items() for name in names]
DEFAULTS = [next(iter(names)) for names in SCHEDULING.values()]


def request(name: str, tokens: int, **attributes: Any) -> Request:
    made = Request(name, [1] * tokens)
    for attribute, value in attributes.items():
        setattr(made, attribute, value)
    return made


def waiting(
    requests: Sequence[Request],
    step: int = 1,
    cached: Callable[[Any], int] = lambda request: 0,
) -> WaitingContext:
    return WaitingContext(
        waiting=tuple(requests),
        step=step,
        free_blocks=9,
        policy="fcfs",
        cached_tokens=cached,
    )


def hooks_of(kind: SchedulingKind, name: str, **options: object) -> Hooks:
    return Hooks.of(make_scheduling(kind, name, options))


# -- the registry ------------------------------------------------------------------


def test_every_kind_is_a_hook_and_has_a_default_that_asks_nobody() -> None:
    assert tuple(SCHEDULING) == get_args(SchedulingKind)
    for kind in SCHEDULING:
        assert hasattr(HookSpecs, f"kvp_choose_{kind}")
    plugins = [
        make_scheduling(kind, name)
        for kind, name in zip(SCHEDULING, DEFAULTS, strict=True)
    ]
    hooks = Hooks.of(*plugins)
    asked = hooks.orders_waiting, hooks.chooses_admission
    assert not any((*asked, hooks.chooses_victim, hooks.chooses_checkpoints))


@pytest.mark.parametrize(("kind", "name"), NAMED)
def test_a_policy_answers_the_hook_of_its_kind_alone(
    kind: SchedulingKind, name: str
) -> None:
    (info,) = [p for p in hooks_of(kind, name).plugins if p.name == f"{kind}={name}"]
    assert info.hooks == (() if name in DEFAULTS else (f"kvp_choose_{kind}",))
    assert SCHEDULING[kind][name].description


@pytest.mark.parametrize(
    ("kind", "name", "options", "message"),
    [
        ("victim", None, {}, "victim=None must be the name"),
        ("victim", "last", [], r"victim_options=\[\] must be a table"),
        ("victims", "last", {}, "'victims' in scheduling.* mean 'victim'"),
        ("victim", "most_block", {}, "'most_block' in victim.* mean 'most_blocks'"),
        ("victim", "last", {"n": 1}, "'last' takes no options, got n in victim_opt"),
        ("victim", "least_work", {"n": 1}, "'least_work' takes no options"),
        ("admission", "free_share", {"shar": 1}, "mean 'share'"),
        ("admission", "free_share", {"share": 2}, "admission_options: share=2"),
        ("waiting_order", "cached_first", {"window": 0}, "window=0 must be"),
        ("waiting_order", "shortest_first", {"most_steps": 0}, "most_steps=0 must"),
        ("checkpoints", "spaced", {"every": 0}, "every=0 must be"),
        ("checkpoints", "ends", {"chunk_tokens": "x"}, "chunk_tokens"),
    ],
)
def test_what_does_not_exist_is_refused_by_name(
    kind: Any, name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_scheduling(kind, name, options)


# -- the waiting order -------------------------------------------------------------


def order(hooks: Hooks, ctx: WaitingContext) -> list[str]:
    return list(hooks.choose_waiting_order(ctx))


def test_the_longest_cached_share_goes_first() -> None:
    requests = [request(f"r{i}", n) for i, n in enumerate((10, 100, 20, 10))]
    cached = {"r0": 0, "r1": 40, "r2": 16, "r3": 4}
    ctx = waiting(requests, cached=lambda r: cached[r.request_id])
    assert order(hooks_of("waiting_order", "cached_first"), ctx) == [
        *("r2", "r1", "r3", "r0")
    ]


def test_the_fewest_tokens_left_go_first() -> None:
    requests = [request(f"r{i}", n) for i, n in enumerate((10, 100, 20, 10))]
    cached = {"r0": 0, "r1": 98, "r2": 16, "r3": 0}
    ctx = waiting(requests, cached=lambda r: cached[r.request_id])
    assert order(hooks_of("waiting_order", "shortest_first"), ctx) == [
        *("r1", "r2", "r0", "r3")
    ]


def test_only_a_window_is_looked_at() -> None:
    requests = [request(f"r{i}", 10 - i) for i in range(6)]
    looked: list[str] = []

    def cached(request: Any) -> int:
        looked.append(request.request_id)
        return 0

    hooks = hooks_of("waiting_order", "shortest_first", window=3)
    ids = order(hooks, waiting(requests, cached=cached))
    assert ids == ["r2", "r1", "r0", "r3", "r4", "r5"]
    assert sorted(looked) == ["r0", "r1", "r2"]


@pytest.mark.parametrize("name", ["cached_first", "shortest_first"])
def test_after_so_many_steps_a_turn_comes(name: str) -> None:
    """However many better ones arrive."""
    hooks = hooks_of("waiting_order", name, most_steps=5, window=4)
    old = [request("old", 50), request("older", 60)]
    for step in range(1, 6):
        new = [request(f"new{step}.{i}", 2) for i in range(9)]
        ctx = waiting([*new, *old[step < 3 :]], step, lambda r: r.num_tokens == 2)
        assert order(hooks, ctx)[0] == f"new{step}.0"
    new = [request(f"new6.{i}", 2) for i in range(9)]
    ctx = waiting([*new, *old], 6, lambda r: r.num_tokens == 2)
    assert order(hooks, ctx)[:2] == ["older", "new6.0"]
    assert order(hooks, waiting([*new, *old], 8))[:2] == ["older", "old"]


STEPS = st.lists(st.sets(st.integers(0, 9), min_size=1), max_size=30)


@given(STEPS, st.integers(1, 6))
def test_aging_is_a_bound(steps: list[set[int]], most: int) -> None:
    """Against a model that counts the steps of each."""
    aging = Aging(most)
    since: dict[int, int] = {}
    for step, ids in enumerate(steps, 1):
        since = {i: since.get(i, step) for i in sorted(ids)}
        requests = [request(str(i), 1) for i in sorted(ids)]
        late, others = aging.overdue(requests, step)
        due = sorted((i for i in since if step - since[i] >= most), key=since.get)  # type: ignore[arg-type]
        assert [int(r.request_id) for r in late] == due
        assert [int(r.request_id) for r in others] == sorted(ids - {*due})


def test_a_preemption_does_not_begin_the_wait_anew() -> None:
    aging = Aging(10)
    old = request("old", 1)
    aging.overdue([old], 1)
    aging.overdue([], 2)  # it runs
    old.num_preemptions = 1
    new = request("new", 1)
    assert aging.overdue([new, old], 11) == ([old], [new])
    # An id that is used again is of somebody else.
    aging.overdue([], 12)
    again = request("new", 1)
    assert aging.overdue([again], 30) == ([], [again])


def test_aging_remembers_only_so_many_that_do_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aging_module, "MOST_AWAY", 3)
    aging = Aging(10)
    for step in range(20):
        aging.overdue([request(f"r{step}", 1)], step)
    assert len(aging._away) == 3


# -- admission, victims, checkpoints -----------------------------------------------


def test_admission_leaves_a_share_of_the_blocks() -> None:
    def admits(share: float, free_blocks: int) -> bool:
        ctx = AdmissionContext(
            request=request("r", 1),
            step=1,
            num_running=1,
            num_waiting=1,
            free_blocks=free_blocks,
            num_blocks=20,
            policy="fcfs",
        )
        return hooks_of("admission", "free_share", share=share).choose_admission(ctx)

    assert [admits(0.2, free) for free in (3, 4, 20)] == [False, True, True]
    assert admits(0, 0)
    assert not admits(1, 19)


def victim_of(
    name: str,
    computed: Sequence[int],
    blocks: Sequence[int],
    arrivals: Sequence[float] = (0, 1, 2),
    preempted: Sequence[int] = (0, 0, 0),
) -> str:
    running = [
        request(
            f"r{i}",
            9,
            num_computed_tokens=n,
            arrival_time=arrivals[i],
            num_preemptions=preempted[i],
        )
        for i, n in enumerate(computed)
    ]
    freed = {f"r{i}": n for i, n in enumerate(blocks)}
    ctx = VictimContext(
        needy=running[0],
        candidates=tuple(running),
        policy="fcfs",
        freed_blocks=lambda r: freed[r.request_id],
    )
    return hooks_of("victim", name).choose_victim(ctx)


def test_victims() -> None:
    assert victim_of("last", (1, 2, 3), (3, 2, 1)) == "r2"
    assert victim_of("least_work", (3, 1, 2), (1, 1, 1)) == "r1"
    assert victim_of("least_work", (3, 1, 1), (1, 1, 1)) == "r2"
    assert victim_of("most_blocks", (1, 2, 3), (3, 2, 1)) == "r1"
    assert victim_of("most_blocks", (1, 2, 3), (3, 2, 2)) == "r2"


@pytest.mark.parametrize("name", ["least_work", "most_blocks"])
def test_who_arrived_first_is_no_victim(name: str) -> None:
    """However little it has computed, or much it holds."""
    worst = (1, 9, 9), (9, 1, 1)
    assert victim_of(name, *worst) == "r2"
    assert victim_of(name, *worst, arrivals=(1, 0, 1)) == "r0"
    # Of those that arrived at once the one that has lost most often.
    assert victim_of(name, *worst, (0, 0, 0), (0, 1, 0)) == "r0"
    assert victim_of(name, *worst, (0, 0, 0), (2, 1, 0)) == "r2"
    # Unless nobody else runs.
    assert victim_of(name, (1,), (3,)) == "r0"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("order", ["configured", "shortest_first", "cached_first"])
@pytest.mark.parametrize("victim", ["least_work", "most_blocks"])
def test_a_long_prompt_ends_however_many_better_ones_come(
    victim: str, order: str, depth: int
) -> None:
    """All others hit a common prefix: they have done more as soon as they come, and
    new ones come for ever."""
    options = {} if order == "configured" else {"most_steps": 20}
    chosen = [
        make_scheduling("victim", victim),
        make_scheduling("waiting_order", order, options),
    ]
    lab = Lab(
        [full()],
        20,
        depth=depth,
        hooks=Hooks.of(*chosen),
        hash_format=FORMAT,
        max_num_seqs=8,
        long_prefill_token_threshold=4,
        max_num_batched_tokens=64,
    )
    prefix = list(range(1000, 1024))
    lab.add([*prefix, 5], 1)
    lab.run()
    long = lab.add(range(40), 4)
    for n in range(300):
        while len(lab.scheduler.requests) < 14:
            lab.add([*prefix, 2000 + n + len(lab.requests)], 9)
        lab.step()
        if long in lab.reasons:
            break
    assert long in lab.reasons
    assert lab.requests[long].num_preemptions < 4


@pytest.mark.parametrize(
    ("name", "options", "prompt", "expected"),
    [
        ("all", {}, 10, [4, 8, 12, 16, 20, 24]),
        ("ends", {}, 10, [8]),
        ("ends", {}, 12, [8, 12]),
        ("ends", {"chunk_tokens": 6}, 20, [4, 12, 16, 20]),
        ("ends", {}, 3, []),
        ("spaced", {"every": 2}, 10, [8, 16, 24]),
        ("spaced", {"every": 3}, 10, [8, 12, 24]),
        ("spaced", {"every": 99}, 22, [20]),
    ],
)
def test_checkpoints(
    name: str, options: dict[str, object], prompt: int, expected: list[int]
) -> None:
    ctx = CheckpointContext(
        request=request("r", prompt), group=0, block_size=4, max_tokens=24
    )
    chosen = hooks_of("checkpoints", name, **options).choose_checkpoints(ctx)
    assert list(chosen) == expected


# -- whatever they decide ----------------------------------------------------------


class Anything:
    """Decides all there is by a seed; but who was admitted first is safe."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    @hookimpl
    def kvp_choose_waiting_order(self, ctx: WaitingContext) -> list[str]:
        ids = [request.request_id for request in ctx.waiting]
        return self._random.sample(ids, self._random.randrange(1, 1 + len(ids)))

    @hookimpl
    def kvp_choose_admission(self) -> bool:
        return self._random.random() < 0.5

    @hookimpl
    def kvp_choose_victim(self, ctx: VictimContext) -> str:
        return self._random.choice(ctx.candidates[1:] or ctx.candidates).request_id

    @hookimpl
    def kvp_choose_checkpoints(self, ctx: CheckpointContext) -> list[int]:
        return [b for b in ctx.boundaries if self._random.random() < 0.5]


OPTIONS: dict[str, dict[str, object]] = {
    "cached_first": {"most_steps": 4, "window": 3},
    "shortest_first": {"most_steps": 4, "window": 3},
    "free_share": {"share": 0.3},
    "ends": {"chunk_tokens": 8},
    "spaced": {"every": 2},
}
MIXES = {
    "full": ((full(),), 12),
    "full+window": ((full(), window(6)), 22),
    "full+states": ((full(), mamba("all")), 24),
}


def plugins(names: Sequence[str]) -> list[object]:
    """One a kind."""
    return [
        make_scheduling(kind, name, OPTIONS.get(name))
        for kind, name in zip(SCHEDULING, names, strict=True)
    ]


def run(seed: int, mix: str, hooks: Hooks, depth: int, policy: str) -> Lab:
    """Requests come while others run, in a pool that is too small for them."""
    specs, usable = MIXES[mix]
    random = Random(seed)
    lab = Lab(
        specs,
        usable,
        hooks=hooks,
        depth=depth,
        policy=policy,
        hash_format=FORMAT,
        scheduler_reserve_full_isl=bool(seed % 3),
    )
    for i in range(8):
        shared = random.randrange(20)
        prompt = [*range(shared), *[50 + i] * random.randrange(1, 8)]
        lab.add(prompt, random.randrange(1, 13), priority=random.randrange(2))
        for _ in range(random.randrange(3)):
            lab.step()
    lab.drain()  # outputs are those of a run with everything off; nothing is held
    assert set(lab.reasons.values()) == {"length"}
    assert len(lab.reasons) == 8
    return lab


CHOICES = st.tuples(*(st.sampled_from([*names]) for names in SCHEDULING.values()))


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    mix=st.sampled_from([*MIXES]),
    names=st.one_of(CHOICES, st.none()),
    depth=st.sampled_from([1, 2]),
    policy=st.sampled_from(["fcfs", "priority"]),
)
def test_any_policy_gives_the_same_outputs_and_everybody_ends(
    seed: int, mix: str, names: Any, depth: int, policy: str
) -> None:
    chosen = [Anything(seed)] if names is None else plugins(names)
    run(seed, mix, Hooks.of(*chosen), depth, policy)


@pytest.mark.full
@pytest.mark.parametrize("mix", MIXES)
def test_every_combination(mix: str) -> None:
    everything = product(*SCHEDULING.values(), (1, 2), ("fcfs", "priority"))
    for seed, (*names, depth, policy) in enumerate(everything):
        run(seed, mix, Hooks.of(*plugins(names)), depth, policy)


@pytest.mark.parametrize("name", ["least_work", "most_blocks"])
@pytest.mark.parametrize("depth", [1, 2])
def test_nobody_takes_turns_at_losing_what_it_has(name: str, depth: int) -> None:
    """Long prompts that are admitted by their first chunk: the pool has room for one
    of them and a bit."""
    hooks = Hooks.of(make_scheduling("victim", name))
    lab = Lab(
        [full()],
        12,
        hooks=hooks,
        depth=depth,
        hash_format=FORMAT,
        scheduler_reserve_full_isl=False,
        long_prefill_token_threshold=4,
    )
    for i in range(4):
        lab.add([i] * 40, 4)
    lab.drain()
    assert set(lab.reasons.values()) == {"length"}
    assert any(request.num_preemptions for request in lab.requests.values())
