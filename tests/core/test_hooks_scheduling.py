"""Plugins order the waiting queue and choose victims; outputs stay the same."""

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvplugin import hookimpl
from kvplugin.hooks import Hooks, VictimContext, WaitingContext
from kvplugin.request import Request
from kvplugin.scheduler import ModelOutput, Scheduler, SchedulerConfig, SchedulerOutput
from kvplugin.scheduler.entry import Entry
from kvplugin.scheduler.queues import make_queue
from tests.core.manager_setups import Setup, full, window

ORDER, VICTIM = "kvp_choose_waiting_order", "kvp_choose_victim"
POLICIES = ("fcfs", "priority")
TIGHT = Setup((full(), window(8)), num_blocks=20)


def hooks_of(**implementations: Callable[..., Any]) -> Hooks:
    """The built-in plugins and one named 'mine'."""
    marked = {hook: hookimpl(function) for hook, function in implementations.items()}
    return Hooks.of(SimpleNamespace(__name__="mine", **marked))


def ids(requests: Any) -> list[str]:
    return [request.request_id for request in requests]


def fail() -> None:
    raise RuntimeError("no idea")


def some_requests() -> tuple[Request, ...]:
    """Out of order by priority and arrival."""
    ranks = [(2, 0.0), (0, 3.0), (2, 4.0), (0, 1.0), (1, 2.0)]
    return tuple(
        TIGHT.request(f"r{i}", [1] * (5 - i), priority=priority, arrival_time=arrival)
        for i, (priority, arrival) in enumerate(ranks)
    )


def waiting_context(requests: tuple[Request, ...] = ()) -> WaitingContext:
    requests = requests or some_requests()
    return WaitingContext(waiting=requests, step=1, free_blocks=9, policy="fcfs")


def victim_context(policy: str = "fcfs") -> VictimContext:
    requests = some_requests()
    return VictimContext(needy=requests[1], candidates=requests, policy=policy)


# -- the facade --------------------------------------------------------------------


def test_the_built_in_keeps_the_order_and_is_not_asked_by_the_scheduler() -> None:
    hooks = Hooks.of()
    assert not hooks.orders_waiting
    assert not hooks.chooses_victim
    assert hooks.choose_waiting_order(waiting_context()) == ids(some_requests())


@pytest.mark.parametrize("policy", POLICIES)
def test_the_built_in_victim_is_the_last_of_the_configured_order(policy: str) -> None:
    requests = list(some_requests())
    queue = make_queue(policy)
    for request in requests:
        queue.add(Entry(request, 1))
    ctx = VictimContext(needy=requests[0], candidates=tuple(requests), policy=policy)
    *_, last = queue
    assert Hooks.of().choose_victim(ctx) == last.id


@pytest.mark.parametrize("policy", POLICIES)
def test_of_equals_the_last_admitted_loses_its_blocks(policy: str) -> None:
    equals = tuple(Request(f"r{i}", [1]) for i in range(3))
    ctx = VictimContext(needy=equals[0], candidates=equals, policy=policy)
    assert Hooks.of().choose_victim(ctx) == "r2"


def test_whom_an_order_leaves_out_comes_after_the_others() -> None:
    hooks = hooks_of(**{ORDER: lambda: ("r3", "r1")})
    assert hooks.orders_waiting
    assert not hooks.chooses_victim
    order = hooks.choose_waiting_order(waiting_context())
    assert order == ["r3", "r1", "r0", "r2", "r4"]


def test_a_plugin_without_an_opinion_leaves_it_to_the_next_one() -> None:
    hooks = hooks_of(**{ORDER: lambda: None, VICTIM: lambda: None})
    assert hooks.choose_waiting_order(waiting_context()) == ids(some_requests())
    assert hooks.choose_victim(victim_context()) == "r4"
    assert hooks.choose_victim(victim_context("priority")) == "r2"


class Equal:
    """Says that it is whatever it is compared with."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


class Fickle(Sequence[str]):
    """Says something else when it is asked again."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: Any) -> Any:
        raise NotImplementedError

    def __iter__(self) -> Iterator[str]:
        self.asked += 1
        return iter(["r3", "r1"] if self.asked == 1 else ["ghost"])


class Id(str):
    """A name that equals and hashes as it likes."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 1


def test_an_answer_is_looked_at_once() -> None:
    hooks = hooks_of(**{ORDER: lambda: Fickle(), VICTIM: lambda: Id("r1")})
    order = hooks.choose_waiting_order(waiting_context())
    assert order == ["r3", "r1", "r0", "r2", "r4"]
    victim = hooks.choose_victim(victim_context())
    assert (type(victim), victim) == (str, "r1")
    # It is no candidate, whatever it says.
    assert (
        hooks_of(**{VICTIM: lambda: Id("r9")}).choose_victim(victim_context()) == "r4"
    )


def test_a_plugin_that_always_fails_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hooks = hooks_of(**{VICTIM: fail, ORDER: fail})
    for _ in range(2500):
        assert hooks.choose_victim(victim_context()) == "r4"
    assert [bool(record.exc_info) for record in caplog.records] == [
        *[True] * 3,
        *[False] * 3,
    ]
    assert "failed in kvp_choose_victim 2000 times" in caplog.text
    caplog.clear()
    hooks.choose_waiting_order(waiting_context())  # counted by itself
    assert "the built-in answers kvp_choose_waiting_order" in caplog.text


ORDERS: dict[str, Any] = {
    "a number": (3, "int in place of a list"),
    "text": ("r1", "str in place of a list"),
    "a set": ({"r1"}, "set in place of a list"),
    "a stranger": (["r1", "r9"], "'r9', which does not wait"),
    "one twice": (["r1", "r2", "r1"], "'r1', named twice"),
    "a list": ([["r1"]], "which does not wait"),
    "requests": ([Request("r1", [1])], "a Request in place of its id"),
}
VICTIMS: dict[str, Any] = {
    "a stranger": ("r9", "'r9', which is no candidate"),
    "a number": (0, "0, which is no candidate"),
    "a list": (["r1"], "which is no candidate"),
    "a request": (Request("r1", [1]), "a Request in place of its id"),
    "what equals anything": (Equal(), "which is no candidate"),
}


@pytest.mark.parametrize("case", ORDERS)
def test_an_impossible_order_is_blamed_on_its_plugin(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer, complaint = ORDERS[case]
    order = hooks_of(**{ORDER: lambda: answer}).choose_waiting_order(waiting_context())
    assert order == ids(some_requests())
    assert_blamed(caplog, f"'mine' answered {ORDER} with", complaint)


@pytest.mark.parametrize("case", VICTIMS)
def test_an_impossible_victim_is_blamed_on_its_plugin(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer, complaint = VICTIMS[case]
    hooks = hooks_of(**{VICTIM: lambda: answer})
    assert hooks.choose_victim(victim_context()) == "r4"
    assert_blamed(caplog, f"'mine' answered {VICTIM} with", complaint)


def test_a_plugin_that_fails_is_named(caplog: pytest.LogCaptureFixture) -> None:
    hooks = hooks_of(**{ORDER: fail, VICTIM: fail})
    assert hooks.choose_waiting_order(waiting_context()) == ids(some_requests())
    assert_blamed(caplog, f"'mine' failed in {ORDER}: RuntimeError: no idea")
    caplog.clear()
    assert hooks.choose_victim(victim_context("priority")) == "r2"
    assert_blamed(caplog, f"'mine' failed in {VICTIM}: RuntimeError: no idea")


def assert_blamed(caplog: pytest.LogCaptureFixture, *texts: str) -> None:
    """One ERROR with all of this in its traceback."""
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "the built-in answers" in record.getMessage()
    assert all(text in caplog.text for text in texts)


# -- the scheduler -----------------------------------------------------------------


def scheduler_of(hooks: Hooks | None = None, **settings: Any) -> Scheduler:
    config = SchedulerConfig(**{"max_num_batched_tokens": 16, **settings})
    return Scheduler(TIGHT.manager(), config, hooks=hooks)


def next_token(request: Request) -> int:
    """What the model says: a hash of all tokens."""
    return hash(tuple(request.all_token_ids)) % 97 + 1


def compute(scheduler: Scheduler) -> SchedulerOutput:
    """One step, and its effects on the cache verified."""
    step = scheduler.schedule()
    scheduler.check()
    sampled = {}
    for request_id in step.num_scheduled_tokens:
        request = scheduler.requests[request_id].request
        if request.num_computed_tokens == request.num_tokens:
            sampled[request_id] = [next_token(request)]
    scheduler.update_from_output(ModelOutput(step.step, sampled))
    scheduler.check()
    return step


def admitted(hooks: Hooks | None, **settings: Any) -> list[str]:
    """Requests with prompts of 5 to 1 tokens, in the order of their first step."""
    scheduler = scheduler_of(hooks, max_num_seqs=2, **settings)
    for request in some_requests():
        scheduler.add_request(request, max_tokens=2)
    order: list[str] = []
    while scheduler.has_work():
        order += [r.req_id for r in compute(scheduler).scheduled_new_reqs]
    return order


def test_admission_follows_the_policy_or_the_plugin() -> None:
    fcfs, by_priority = [f"r{i}" for i in (0, 1, 2, 3, 4)], ["r3", "r1", "r4"]
    assert admitted(None) == fcfs
    assert admitted(None, policy="priority") == [*by_priority, "r0", "r2"]
    backwards = hooks_of(**{ORDER: lambda ctx: ids(reversed(ctx.waiting))})
    assert admitted(backwards) == fcfs[::-1]
    shortest = hooks_of(
        **{ORDER: lambda ctx: [min(ctx.waiting, key=lambda r: r.num_tokens).request_id]}
    )
    # Two are admitted a time: the shortest, then the first in the configured order.
    assert admitted(shortest) == ["r4", "r0", "r3", "r1", "r2"]
    for wrong in (lambda: ["r9"], fail):
        hooks = hooks_of(**{ORDER: wrong})
        assert admitted(hooks, policy="priority") == [*by_priority, "r0", "r2"]


def test_the_order_is_asked_once_a_step_and_only_if_somebody_may_come() -> None:
    seen: list[WaitingContext] = []
    scheduler = scheduler_of(hooks_of(**{ORDER: lambda ctx: seen.append(ctx)}))
    requests = [TIGHT.request(f"r{i}", range(1, 15)) for i in range(2)]
    for request in requests:
        scheduler.add_request(request, max_tokens=3)
    while scheduler.has_work():
        compute(scheduler)
    # The first step's tokens end with part of r1's prompt: then nobody waits.
    assert [(ctx.step, ctx.waiting) for ctx in seen] == [(1, tuple(requests))]
    assert (seen[0].free_blocks, seen[0].policy) == (19, "fcfs")


def test_the_hooks_are_those_of_the_manager_by_default() -> None:
    manager = TIGHT.manager()
    assert (
        Scheduler(manager, SchedulerConfig())._planner._choices.hooks is manager.hooks
    )
    mine = Hooks.of()
    scheduler = Scheduler(manager, SchedulerConfig(), hooks=mine)
    assert scheduler._planner._choices.hooks is mine
    with pytest.raises(AttributeError):
        manager.hooks = mine


def first_preempted(hooks: Hooks | None, policy: str = "fcfs") -> str:
    """Who loses its blocks first when three requests outgrow the pool."""
    scheduler = scheduler_of(hooks, policy=policy)
    for i, priority in enumerate((1, 2, 0)):
        request = TIGHT.request(f"r{i}", [i + 1] * 8, priority=priority)
        scheduler.add_request(request, max_tokens=24)
    preempted: list[list[str]] = []
    while scheduler.has_work():
        preempted.append(sorted(compute(scheduler).preempted_req_ids))
    (first,) = next(filter(None, preempted))
    return first


def test_the_victim_is_that_of_the_policy_or_of_the_plugin() -> None:
    assert first_preempted(None) == "r2"
    assert first_preempted(None, "priority") == "r1"
    seen: list[VictimContext] = []

    def first(ctx: VictimContext) -> str:
        seen.append(ctx)
        return ctx.candidates[0].request_id

    assert first_preempted(hooks_of(**{VICTIM: first})) == "r0"
    assert ids(seen[0].candidates) == ["r0", "r1", "r2"]
    assert seen[0].needy in seen[0].candidates
    assert seen[0].policy == "fcfs"
    for wrong in (lambda: "r9", fail):
        assert first_preempted(hooks_of(**{VICTIM: wrong}), "priority") == "r1"


# -- whatever they choose ----------------------------------------------------------


def shuffled(ctx: WaitingContext) -> list[str]:
    """Some of them, in any order."""
    rng = random.Random(ctx.step)
    return rng.sample(ids(ctx.waiting), rng.randint(0, len(ctx.waiting)))


def anybody(ctx: VictimContext) -> str:
    tokens = sum(request.num_tokens for request in ctx.candidates)
    return random.Random(tokens).choice(ids(ctx.candidates))


def wild(ctx: VictimContext) -> str | None:
    """Anybody, nobody, a stranger or an error."""
    rng = random.Random(sum(request.num_tokens for request in ctx.candidates))
    return rng.choice([anybody, lambda _: None, lambda _: "r?", lambda _: fail()])(ctx)


PLUGINS: dict[str, dict[str, Callable[..., Any]]] = {
    "backwards": {ORDER: lambda ctx: ids(reversed(ctx.waiting))},
    "short first": {
        ORDER: lambda ctx: ids(sorted(ctx.waiting, key=lambda r: r.num_tokens))
    },
    "shuffled": {ORDER: shuffled},
    "first": {VICTIM: lambda ctx: ctx.candidates[0].request_id},
    "needy": {VICTIM: lambda ctx: ctx.needy.request_id},
    "not needy": {VICTIM: lambda ctx: ids([*ctx.candidates[1:], ctx.needy])[0]},
    "anybody": {ORDER: shuffled, VICTIM: anybody},
    "wild": {ORDER: fail, VICTIM: wild},
}


def run(
    seed: int, policy: str, hooks: Hooks | None
) -> tuple[dict[str, list[int]], int]:
    """Outputs by request, and preemptions, of a run under memory pressure."""
    rng = random.Random(seed)
    scheduler = scheduler_of(hooks, policy=policy, max_num_seqs=5)
    common = [rng.randint(1, 9) for _ in range(12)]
    coming = []
    for i in range(12):
        prompt = common[: rng.randint(0, 12)]
        prompt += [rng.randint(1, 9) for _ in range(rng.randint(1, 12))]
        priority = rng.randint(0, 2)
        request = TIGHT.request(f"r{i}", prompt, priority=priority, arrival_time=i)
        coming.append((request, rng.randint(1, 16)))
    requests = [request for request, _ in coming]
    wanted = {request.request_id: n for request, n in coming}
    for _ in range(1000):
        for request, n in coming[: rng.randint(0, 2)]:
            scheduler.add_request(request, n)
            coming.pop(0)
        if not (coming or scheduler.has_work()):
            break
        compute(scheduler)
    assert not scheduler.has_work(), "somebody starves"
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_usable_blocks
    outputs = {request.request_id: request.output_token_ids for request in requests}
    assert {id_: len(tokens) for id_, tokens in outputs.items()} == wanted
    return outputs, sum(request.num_preemptions for request in requests)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", PLUGINS)
def test_no_choice_changes_outputs_starves_anybody_or_leaks(
    name: str, policy: str
) -> None:
    hooks = hooks_of(**PLUGINS[name])
    preemptions = 0
    for seed in range(4):
        outputs, n = run(seed, policy, hooks)
        assert outputs == run(seed, policy, None)[0]
        preemptions += n
    assert preemptions, "the pool is too large for this test"
