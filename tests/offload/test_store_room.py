"""Where host memory is too small for a step, what is kept of it can be hit."""

import pytest

from kvplugin.connectors.offload.messages import Plan
from kvplugin.contract import GroupInfo, GroupKind, ScheduledRequest, StateBlock, Step
from kvplugin.wire import decode
from tests.offload.half import BLOCK, Half, engine, group, request
from tests.offload.setup_model import View

FULL, WINDOW, STATE = GroupKind.FULL, GroupKind.SLIDING_WINDOW, GroupKind.MAMBA


def half(*groups: GroupInfo, slots: int, **settings: object) -> Half:
    return Half(engine(*groups), cpu_bytes_to_use=64 * slots, **settings)


def full_and_window(slots: int = 100) -> Half:
    """A boundary needs 3 blocks of the window at most."""
    return half(group(FULL), group(WINDOW, 1, window=13), slots=slots)


def rows_of(half: Half, blocks: int) -> list[range]:
    return [range(1, blocks + 1) for _ in half.engine.groups]


def serve(half: Half, view: View, step: int | None = None) -> None:
    """Compute a prompt, `step` blocks at a time or all at once, and store it."""
    blocks = view.num_tokens // BLOCK
    step = step or blocks
    half.admit(view, *rows_of(half, blocks))
    for first in range(0, blocks, step):
        half.store(view, first * BLOCK, min(step, blocks - first) * BLOCK)
    half.scheduler.finished(view)
    half.scheduler.check()


def prompt(blocks: int, seed: int = 0, name: str = "r") -> View:
    return request([seed, *range(1, blocks * BLOCK)], name=name)


def hit(half: Half, blocks: int, seed: int = 0) -> int:
    """Blocks of such a prompt that are offered."""
    return half.offered([seed, *range(1, blocks * BLOCK)]).tokens // BLOCK


@pytest.mark.parametrize(
    ("blocks", "step", "least"),
    [
        (96, 96, 96),
        (99, 99, 97),
        (101, 101, 97),
        (150, 150, 97),
        (150, 30, 90),
        (150, 2, 90),
    ],
)
def test_a_window_gets_its_share_of_what_is_too_small(
    blocks: int, step: int, least: int
) -> None:
    both = full_and_window()
    serve(both, prompt(blocks), step)
    assert hit(both, blocks) >= least


@pytest.mark.parametrize("windows", [(13, 13), (13, 61), (400, 13), (400, 400)])
def test_each_window_gets_its_share(windows: tuple[int, int]) -> None:
    groups = [group(WINDOW, i + 1, window=window) for i, window in enumerate(windows)]
    three = half(group(FULL), *groups, slots=100)
    serve(three, prompt(150))
    tails = [(window - 1) // BLOCK for window in windows]
    most = max(n for n in range(101) if n + sum(min(n, t) for t in tails) <= 100)
    assert hit(three, 150) >= most - 1


def test_dense_groups_of_one_pool_get_equal_shares() -> None:
    six = half(*(group(FULL, i) for i in range(6)), slots=100)
    serve(six, prompt(150))
    assert hit(six, 150) == 16
    assert six.stat("skipped_blocks") == 6 * (150 - 16)


@pytest.mark.parametrize("blocks_per_chunk", [2, 3])
def test_chunks_are_kept_whole(blocks_per_chunk: int) -> None:
    both = half(
        *(group(FULL, i) for i in range(2)),
        slots=30,
        blocks_per_chunk=blocks_per_chunk,
    )
    serve(both, prompt(60))
    assert hit(both, 60) == 15 // blocks_per_chunk * blocks_per_chunk


def test_a_drafter_keeps_the_block_behind() -> None:
    both = half(group(FULL), group(WINDOW, 1, window=13, has_drafter=True), slots=50)
    serve(both, prompt(60))
    assert hit(both, 60) >= 45


def test_nothing_gives_way_to_a_prefix_without_a_state() -> None:
    """The step leaves one state, at its end: with less than all of it nothing could
    be hit."""
    both = half(group(FULL), group(STATE, 1), slots=30)
    for view, blocks in ((prompt(8, 1, "small"), 8), (prompt(60, 2, "long"), 60)):
        row, states = range(1, blocks + 1), [0] * (blocks - 1) + [100 + blocks]
        both.admit(view, row, states)
        both.store(view, 0, blocks * BLOCK)
        both.scheduler.finished(view)
    assert hit(both, 8, 1) == 8
    assert both.stat("evicted_blocks") == 0


def test_a_prefix_goes_up_to_a_state_that_is_there() -> None:
    both = half(group(FULL), group(STATE, 1), slots=30)
    view = prompt(60)
    both.admit(view, range(1, 61), [0] * 59 + [160])
    both.store(view, 0, 60 * BLOCK, states=[StateBlock(1, 20 * BLOCK, 120)])
    assert hit(both, 60) == 20


@pytest.mark.parametrize(("slots", "least"), [(100, 1), (250, 3), (400, 4)])
def test_of_many_prompts_in_one_step_the_first_can_be_hit(
    slots: int, least: int
) -> None:
    both = full_and_window(slots)
    views = [prompt(41, seed, f"r{seed}") for seed in range(8)]
    for view in views:
        both.admit(view, *rows_of(both, 41))
    scheduled = [ScheduledRequest(v.request_id, (), 0, 41 * BLOCK) for v in views]
    plan = both.scheduler.plan_step(Step(scheduled, (), 8 * 41 * BLOCK))
    for order in decode(plan, Plan).stores:
        both.end(order.id)
    hits = [hit(both, 41, seed) for seed in range(8)]
    assert hits.count(41) >= least
    readable = both.scheduler._tier.readable(0)
    assert len(readable) == sum(hits), "no dense block that cannot be hit"


def test_after_a_shortage_a_request_stores_nothing_more() -> None:
    """Also if there is room again: what lies between would be missing."""
    both = full_and_window(20)
    view = prompt(60)
    both.admit(view, *rows_of(both, 60))
    both.store(view, 0, 30 * BLOCK)
    assert view.request_id not in both.scheduler.watched


@pytest.mark.parametrize(("blocks", "stored"), [(3, 0), (4, 8), (6, 8), (8, 16)])
def test_no_window_is_kept_behind_the_last_whole_chunk(
    blocks: int, stored: int
) -> None:
    """Nothing behind it could be hit: the dense group has no chunk there."""
    some = half(group(FULL), group(WINDOW, 1, window=13), slots=400, blocks_per_chunk=4)
    serve(some, prompt(blocks))
    assert some.scheduler.take_stats().gauges["host_blocks_stored"] == stored
    assert hit(some, blocks) == stored // 2
