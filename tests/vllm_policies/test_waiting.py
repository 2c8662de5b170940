"""The waiting queue that stands in for vLLM's, and who asks plugins about it."""

from collections import deque
from collections.abc import Callable, Iterable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from kvplugin import hookimpl
from kvplugin.hooks import Hooks
from kvplugin.integration.vllm.turns import Turns
from kvplugin.integration.vllm.victim import VictimChooser
from kvplugin.integration.vllm.waiting import SteeredQueue

Request = SimpleNamespace


class Named(Request):
    """A request as vLLM's queues see it."""

    __hash__ = object.__hash__

    def __init__(self, name: str, **fields: Any) -> None:
        common = {
            "num_computed_tokens": 0,
            "num_preemptions": 0,
            "num_tokens": 9,
            "block_hashes": [name.encode()],
            "skip_reading_prefix_cache": False,
            "status": SimpleNamespace(name="WAITING"),
        }
        super().__init__(request_id=name, **(common | fields))

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        return str(self.request_id)


class Fcfs(deque[Any]):
    """vLLM's queue of the policy fcfs, in its terms."""

    add_request = deque.append
    pop_request = deque.popleft
    prepend_request = deque.appendleft
    prepend_requests = deque.extendleft
    remove_request = deque.remove

    def peek_request(self) -> Any:
        return self[0]

    def remove_requests(self, requests: Iterable[Any]) -> None:
        kept = [request for request in self if request not in set(requests)]
        self.clear()
        self.extend(kept)


class Heard:
    """Who waits, as a listener knows it."""

    def __init__(self) -> None:
        self.waiting: set[Any] = set()

    def add(self, request: Any) -> None:
        assert request not in self.waiting
        self.waiting.add(request)

    def remove(self, request: Any) -> None:
        self.waiting.discard(request)


def always(request: Any) -> bool:
    return True


@pytest.mark.parametrize("seed", range(20))
def test_in_the_chosen_order_and_nobody_is_lost(seed: int) -> None:
    """Against a list: the chosen order first, then the base order."""
    random, heard = Random(seed), Heard()
    queue = SteeredQueue(Fcfs(), heard, always)
    base: list[Any] = []
    order: list[Any] = []
    for i in range(400):
        action = random.randrange(7)
        if action == 0:
            order = random.sample(base, len(base))
            queue.choose_order(order)
        elif action == 1 and base:
            first = (order or base)[0]
            assert queue.peek_request() is first
            assert queue.pop_request() is first
            order = order[1:]
            base.remove(first)
        elif action == 2 and base:
            gone = random.sample(base, min(2, len(base)))
            queue.remove_requests([*gone, Named("not here")])
            base, order = [r for r in base if r not in gone], []
        elif action == 3:
            pair = [Named(f"a{i}"), Named(f"b{i}")]
            queue.prepend_requests(pair)
            base = [*reversed(pair), *base]
        else:
            one = Named(f"r{i}")
            queue.add_request(one) if action < 6 else queue.prepend_request(one)
            base = [*base, one] if action < 6 else [one, *base]
        assert len(queue) == len(base)
        assert bool(queue) is bool(base)
        assert heard.waiting == {*base}
        if random.random() < 0.2:
            assert list(queue) == base


def test_a_closed_gate_hides_nobody_from_counts() -> None:
    queue = SteeredQueue(Fcfs([Named("a")]), Heard(), lambda request: False)
    assert not queue
    assert len(queue) == 1


def hooks_of(**implementations: Callable[..., Any]) -> Hooks:
    marked = {hook: hookimpl(function) for hook, function in implementations.items()}
    return Hooks.of(SimpleNamespace(__name__="mine", **marked))


def scheduler_of(waiting: Iterable[Any], running: Iterable[Any] = ()) -> Any:
    """What `Turns` reads of a scheduler of vLLM's."""
    pool = SimpleNamespace(get_num_free_blocks=lambda: 5, num_gpu_blocks=11)
    found = SimpleNamespace(find_longest_cache_hit=lambda hashes, most: ((), most))
    return SimpleNamespace(
        waiting=Fcfs(waiting),
        running=list(running),
        policy=SimpleNamespace(value="fcfs"),
        max_num_running_reqs=4,
        kv_cache_manager=SimpleNamespace(
            block_pool=pool, coordinator=found, enable_caching=True
        ),
    )


def test_the_order_is_asked_once_a_step_and_only_with_room() -> None:
    asked = []

    def backwards(ctx: Any) -> list[str]:
        asked.append((ctx.step, ctx.free_blocks, ctx.policy))
        assert [ctx.cached_tokens(request) for request in ctx.waiting] == [8, 8]
        return [request.request_id for request in reversed(ctx.waiting)]

    scheduler = scheduler_of([Named("a"), Named("b")])
    turns = Turns(scheduler, hooks_of(kvp_choose_waiting_order=backwards), Heard())
    turns.begin_step()
    assert [scheduler.waiting.peek_request().request_id for _ in range(3)] == ["b"] * 3
    assert asked == [(1, 5, "fcfs")]
    scheduler.running = [Named(f"r{i}") for i in range(4)]
    turns.begin_step()
    assert scheduler.waiting.peek_request().request_id == "a"
    assert len(asked) == 1


def test_admission_is_asked_once_a_request_and_step_while_others_run() -> None:
    asked = []

    def never(ctx: Any) -> bool:
        asked.append((ctx.request.request_id, ctx.step, ctx.num_running))
        assert (ctx.num_waiting, ctx.free_blocks, ctx.num_blocks) == (2, 5, 10)
        return False

    scheduler = scheduler_of([Named("a"), Named("b")], [Named("r")])
    turns = Turns(scheduler, hooks_of(kvp_choose_admission=never), Heard())
    for step in (1, 2):
        turns.begin_step()
        assert not scheduler.waiting
        assert not scheduler.waiting
        assert len(asked) == step
    scheduler.running.clear()
    assert scheduler.waiting, "the engine would stall"
    assert len(asked) == 2


def test_what_0_19_passed_over_waits_again_unless_it_holds_blocks() -> None:
    scheduler = scheduler_of([Named("a")])
    loads = SimpleNamespace(name="WAITING_FOR_REMOTE_KVS")
    scheduler.skipped_waiting = Fcfs(
        [Named("s"), Named("loads", status=loads), Named("t")]
    )
    turns = Turns(scheduler, hooks_of(), Heard())
    turns.begin_step()
    assert [r.request_id for r in scheduler.skipped_waiting] == ["loads"]
    assert [r.request_id for r in scheduler.waiting] == ["s", "t", "a"]


def running_scheduler(names: str, free: int) -> Any:
    """Requests that each hold two blocks and need a third."""
    running = [
        Named(
            name,
            num_tokens_with_spec=9,
            num_output_placeholders=0,
            num_computed_tokens=8,
        )
        for name in names
    ]
    rows = {name: [SimpleNamespace(ref_cnt=1)] * 2 for name in names}
    return SimpleNamespace(
        running=running,
        max_num_scheduled_tokens=64,
        max_model_len=64,
        num_lookahead_tokens=0,
        kv_cache_manager=SimpleNamespace(
            block_pool=SimpleNamespace(get_num_free_blocks=lambda: free),
            coordinator=SimpleNamespace(
                single_type_managers=[SimpleNamespace(block_size=4, req_to_blocks=rows)]
            ),
            get_blocks=lambda name: SimpleNamespace(blocks=(rows[name],)),
        ),
    )


def first_of(ctx: Any) -> str:
    return str(ctx.candidates[0].request_id)


@pytest.mark.parametrize(
    ("free", "order"),
    [(4, "abcd"), (3, "bcda"), (1, "bcda"), (0, "cdba"), (-3, "dcba")],
)
def test_as_many_victims_as_it_takes_stand_last(free: int, order: str) -> None:
    scheduler = running_scheduler("abcd", free)
    VictimChooser(scheduler, hooks_of(kvp_choose_victim=first_of)).prepare()
    assert "".join(request.request_id for request in scheduler.running) == order


def test_candidates_stand_in_the_order_of_their_admission() -> None:
    seen = []

    def second(ctx: Any) -> str:
        seen.append("".join(request.request_id for request in ctx.candidates))
        assert ctx.needy.request_id == "d"
        assert ctx.freed_blocks(ctx.needy) == 2
        return str(ctx.candidates[1].request_id)

    scheduler = running_scheduler("abcd", 3)
    chooser = VictimChooser(scheduler, hooks_of(kvp_choose_victim=second))
    chooser.prepare()
    chooser.prepare()
    assert seen == ["abcd", "abcd"]
    scheduler.running[-1].num_preemptions += 1  # and it was admitted again
    chooser.prepare()
    assert seen[-1] == "acdb"
