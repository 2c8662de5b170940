"""What a step costs does not grow with what is there already."""

from collections import Counter
from typing import Any

import pytest

from kvplugin.block_pool import BlockPool
from kvplugin.connectors.offload.boundary import Boundaries
from kvplugin.connectors.offload.host_tier import HostTier
from kvplugin.connectors.offload.step_parts import StepParts
from kvplugin.contract import LATER, MISS, GroupKind, Lookup
from tests.offload.half import BLOCK, Half, engine, group, request
from tests.offload.setup_model import View

FULL, WINDOW = GroupKind.FULL, GroupKind.SLIDING_WINDOW
BLOCKS = 60


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each of these was called."""
    counted: Counter[str] = Counter()

    def count(kind: type, name: str) -> None:
        right: Any = getattr(kind, name)

        def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return right(self, *args, **kwargs)

        monkeypatch.setattr(kind, name, counting)

    count(HostTier, "hold")
    count(HostTier, "find")
    count(HostTier, "is_writing")
    count(BlockPool, "free_blocks")
    count(Boundaries, "largest")
    count(StepParts, "dense")
    return counted


def prompt(blocks: int = BLOCKS, name: str = "r") -> View:
    return request(range(blocks * BLOCK), name=name)


def rows_of(half: Half, blocks: int = BLOCKS) -> list[range]:
    return [range(1, blocks + 1) for _ in half.engine.groups]


def stored(half: Half, blocks: int = BLOCKS) -> None:
    view = prompt(blocks)
    half.admit(view, *rows_of(half, blocks))
    half.store(view, 0, blocks * BLOCK)
    half.scheduler.finished(view)


@pytest.mark.parametrize("groups", [1, 3])
def test_what_is_all_there_is_made_recent_at_once(
    groups: int, calls: Counter[str]
) -> None:
    half = Half(engine(*(group(FULL, i) for i in range(groups))))
    stored(half)
    view = prompt(name="again")
    half.scheduler.lookup(view, (BLOCKS - 1) * BLOCK)
    half.scheduler.allocated(view, rows_of(half), 0)
    calls.clear()
    assert half.step(view, (BLOCKS - 1) * BLOCK, BLOCK) is None
    assert calls["hold"] == groups
    assert calls["free_blocks"] == len(half.scheduler.host_pools) == 1
    assert calls["find"] == 0, "chunk by chunk"
    assert not list(half.scheduler._admissions.uses())


def test_the_end_of_the_last_store_releases_all_at_once(calls: Counter[str]) -> None:
    half = Half(engine(*(group(FULL, i) for i in range(3))))
    view = prompt()
    half.admit(view, *rows_of(half))
    for first in range(0, BLOCKS - 10, 10):
        half.store(view, first * BLOCK, 10 * BLOCK)
    plan = half.step(view, (BLOCKS - 10) * BLOCK, 10 * BLOCK)
    assert plan is not None
    calls.clear()
    half.end(plan.stores[0].id)
    assert calls["free_blocks"] == 1
    assert not list(half.scheduler._admissions.uses())


def test_groups_of_one_pool_leave_it_together_tail_first() -> None:
    half = Half(
        engine(*(group(FULL, i) for i in range(3))), cpu_bytes_to_use=64 * 3 * 40
    )
    stored(half, 40)
    other = request([7] * 20 * BLOCK, name="other")
    half.admit(other, *rows_of(half, 20))
    half.store(other, 0, 20 * BLOCK)
    assert half.offered(range(40 * BLOCK)) == Lookup(20 * BLOCK)


class TestAskedAgain:
    """A waiting request is asked each step."""

    def test_the_same_question_is_not_answered_twice(self, calls: Counter[str]) -> None:
        half = Half(engine(group(FULL), group(WINDOW, 1, window=13)))
        stored(half)
        view = request(range(BLOCKS * BLOCK + 1), name="waits")
        answer = half.scheduler.lookup(view, 0)
        calls.clear()
        assert [half.scheduler.lookup(view, 0) for _ in range(5)] == [answer] * 5
        assert answer == Lookup(BLOCKS * BLOCK)
        assert not calls

    def test_nor_while_it_waits(self, calls: Counter[str]) -> None:
        half = Half(engine(group(FULL)))
        view = prompt()
        half.admit(view, *rows_of(half))
        assert half.step(view, 0, BLOCKS * BLOCK)
        waiting = request(range(BLOCKS * BLOCK + 1), name="waits")
        assert half.scheduler.lookup(waiting, 0) == LATER
        calls.clear()
        assert half.scheduler.lookup(waiting, 0) == LATER
        assert not calls

    def test_other_questions_get_other_answers(self) -> None:
        half = Half(engine(group(FULL)))
        stored(half)
        view = request(range(BLOCKS * BLOCK + 1), name="waits")
        for local in (0, 8, 4, 0):
            answer = half.scheduler.lookup(view, local)
            assert answer == Lookup(BLOCKS * BLOCK - local)

    @pytest.mark.parametrize(
        "change", ["commit", "reserve", "abandon", "evict", "drop", "clear"]
    )
    def test_what_changes_meanwhile_is_noticed(self, change: str) -> None:
        half = Half(engine(group(FULL)), cpu_bytes_to_use=64 * BLOCKS)
        view, other = prompt(), request([7] * BLOCKS * BLOCK, name="other")
        half.admit(view, *rows_of(half))
        waiting = request(range(BLOCKS * BLOCK + 1), name="waits")
        everything = Lookup(BLOCKS * BLOCK)
        if change == "reserve":
            assert half.scheduler.lookup(waiting, 0) == MISS
        plan = half.step(view, 0, BLOCKS * BLOCK)
        assert plan is not None
        assert half.scheduler.lookup(waiting, 0) == LATER
        (order,) = plan.stores
        if change == "abandon":
            half.end(order.id, "broken")
            assert half.scheduler.lookup(waiting, 0) == MISS
            return
        half.end(order.id)
        assert half.scheduler.lookup(waiting, 0) == everything
        if change == "evict":
            half.admit(other, *rows_of(half))
            assert half.step(other, 0, BLOCKS * BLOCK)
        elif change == "clear":
            half.scheduler.reset()
        elif change == "drop":
            half.scheduler._tier.drop(0, [1])
        else:
            return
        assert half.scheduler.lookup(waiting, 0) == MISS


def test_a_step_that_fills_no_block_costs_nothing(calls: Counter[str]) -> None:
    half = Half(engine(group(FULL)), offload_prompt_only=False)
    view = request(range(8), [9] * 16)
    half.admit(view, range(1, 7))
    half.store(view, 0, 8)
    calls.clear()
    stored_blocks = [half.store(view, computed, 1) for computed in range(8, 24)]
    assert calls["dense"] == 4
    assert [block for step in stored_blocks for block in step.get(0, ())] == [
        3,
        4,
        5,
        6,
    ]
