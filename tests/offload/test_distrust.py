"""Blocks that another connector did not fill: nothing computed on them is kept."""

import pytest

from kvplugin.connectors.offload.messages import Plan
from kvplugin.contract import MISS, GroupKind, Lookup, ScheduledRequest, Step
from kvplugin.wire import decode
from tests.offload.half import Half, engine, group, request

DOCUMENT = [*range(16)]
BAD = {11, 12, 13, 14}
"""Blocks of the document that somebody was to fill."""


def stored_before(half: Half) -> None:
    """The document is in host memory, of good bytes."""
    first = request(DOCUMENT, name="first")
    half.admit(first, [1, 2, 3, 4])
    half.store(first, 0, 16)
    half.scheduler.finished(first)


@pytest.mark.parametrize("is_stored", [True, False])
def test_what_a_step_computes_on_top_of_them_is_not_kept(is_stored: bool) -> None:
    """With the document in host memory, only blocks behind the bad ones are stored."""
    half = Half(engine(group(GroupKind.FULL)))
    if is_stored:
        stored_before(half)
    prompt = [*DOCUMENT, *range(50, 58)]
    owner = request(prompt, name="owner")
    half.admit(owner, [11, 12, 13, 14, 15, 16], lookup=False)
    plan = half.step(owner, 16, 8)
    assert plan is not None
    half.scheduler.distrust(BAD)
    for order in plan.stores:
        half.end(order.id)
    assert half.stat("failed_stores") == 1
    assert half.offered(prompt) == (Lookup(16) if is_stored else MISS)


def test_nor_what_another_request_computes_on_top_of_them() -> None:
    """It shares them by a local hit, and has ended before the failure is heard."""
    half = Half(engine(group(GroupKind.FULL)))
    stored_before(half)
    sharer = request([*DOCUMENT, *range(60, 68)], name="sharer")
    other = request([*range(300, 308)], name="other")
    half.admit(sharer, [11, 12, 13, 14, 17, 18], lookup=False)
    half.admit(other, [21, 22])
    progress = [
        ScheduledRequest("sharer", (), 16, 8),
        ScheduledRequest("other", (), 0, 8),
    ]
    plan = decode(half.scheduler.plan_step(Step(progress, (), 16)), Plan)
    half.scheduler.finished(sharer)
    half.scheduler.distrust(BAD)
    for order in plan.stores:
        half.end(order.id)
    assert half.offered([*DOCUMENT, *range(60, 68)]) == Lookup(16)
    assert half.offered([*range(300, 308)]) == Lookup(8), "it has none of them"


def test_nothing_more_is_stored_until_the_request_begins_again() -> None:
    half = Half(engine(group(GroupKind.FULL)))
    prompt = [*DOCUMENT, *range(50, 66)]
    owner = request(prompt, name="owner")
    half.admit(owner, [11, 12, 13, 14, 15, 16], lookup=False)
    plan = half.step(owner, 16, 4)
    assert plan is not None
    half.scheduler.distrust({11})
    half.end(plan.stores[0].id)
    assert "owner" not in half.scheduler.watched
    assert half.step(owner, 20, 4) is None
    assert half.step(preempted=["owner"]) is None
    half.admit(owner, [*range(31, 39)], lookup=False)
    assert half.store(owner, 0, 32) == {0: [*range(31, 39)]}


@pytest.mark.parametrize("kind", [GroupKind.SLIDING_WINDOW, GroupKind.MAMBA])
def test_a_bad_block_of_one_group_says_so_of_all(kind: GroupKind) -> None:
    window = {"window": 8} if kind is GroupKind.SLIDING_WINDOW else {}
    half = Half(engine(group(GroupKind.FULL), group(kind, 1, **window)))
    owner = request([*DOCUMENT, *range(50, 58)], name="owner")
    half.admit(owner, [1, 2, 3, 4, 5, 6], [0, 0, 23, 24, 25, 26], lookup=False)
    plan = half.step(owner, 16, 8)
    assert plan is not None
    half.scheduler.distrust({24})
    for order in plan.stores:
        half.end(order.id)
    assert half.offered([*DOCUMENT, *range(50, 58)]) == MISS
