"""How many questions it takes to find a boundary, and what it is for single groups.

That it is the right one for any mix of groups is in `test_hybrid_boundaries.py`.
"""

from collections.abc import Set as AbstractSet

import pytest

from kvplugin.connectors.offload.boundary import Boundaries
from kvplugin.connectors.offload.chunks import Chunking, chunkings
from kvplugin.contract import GroupInfo, GroupKind
from tests.offload.half import engine, group

FULL, WINDOW, STATE = GroupKind.FULL, GroupKind.SLIDING_WINDOW, GroupKind.MAMBA


class Asked:
    """What is there, and every question about it."""

    def __init__(
        self, *groups: GroupInfo, missing: AbstractSet[tuple[int, int]] = frozenset()
    ) -> None:
        self.boundaries = Boundaries(chunkings(engine(*groups), 1))
        self.missing = missing
        self.questions: list[tuple[int, int]] = []

    def __call__(self, cut: Chunking, number: int) -> bool:
        self.questions.append((cut.index, number))
        return (cut.index, number) not in self.missing

    def largest(self, limit: int, local: int = 0) -> int:
        return self.boundaries.largest(local, limit, self)


def test_where_all_is_there_each_needed_block_is_asked_for_once() -> None:
    asked = Asked(group(FULL, 0), group(WINDOW, 1, window=9), group(STATE, 2))
    assert asked.largest(43) == 40
    assert asked.questions == [
        *((0, block) for block in range(10)),
        *((1, 9), (1, 8)),
        (2, 9),
    ]


def test_what_lies_behind_the_first_missing_block_of_a_prefix_is_not_asked_for() -> (
    None
):
    asked = Asked(group(FULL, 0), group(WINDOW, 1, window=9), missing={(0, 3)})
    assert asked.largest(400) == 12
    assert max(number for _, number in asked.questions) == 3


def test_without_room_for_a_boundary_nothing_is_asked() -> None:
    asked = Asked(group(FULL, 0), group(STATE, 1, size=16))
    assert asked.boundaries.unit == 16
    assert asked.largest(31, local=16) == 16
    assert not asked.questions


def test_a_prefix_that_ends_at_once_ends_all_questions() -> None:
    asked = Asked(group(FULL, 0), group(WINDOW, 1, window=9), missing={(0, 0)})
    assert asked.largest(400) == 0
    assert asked.questions == [(0, 0)]


@pytest.mark.parametrize(
    ("missing", "boundary"),
    [((), 40), ((9,), 36), ((8,), 32), ((9, 8, 7), 28), ((7,), 40), (range(10), 0)],
)
def test_a_window_ends_at_its_last_missing_block(
    missing: tuple[int, ...], boundary: int
) -> None:
    asked = Asked(group(WINDOW, window=9), missing={(0, block) for block in missing})
    assert asked.largest(40) == boundary


@pytest.mark.parametrize(("there", "boundary"), [((9,), 40), ((3, 6), 28), ((), 0)])
def test_a_state_is_found_wherever_one_is(
    there: tuple[int, ...], boundary: int
) -> None:
    missing = {(0, block) for block in range(10) if block not in there}
    assert Asked(group(STATE), missing=missing).largest(40) == boundary


@pytest.mark.parametrize("missing", [None, 10, 9])
def test_a_drafter_costs_one_unit_at_most(missing: int | None) -> None:
    gone = set() if missing is None else {(0, missing)}
    asked = Asked(group(FULL, has_drafter=True), missing=gone)
    assert asked.largest(40) == {None: 40, 10: 36, 9: 32}[missing]


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
@pytest.mark.parametrize("drafter", [0, 1, 2])
def test_windows_that_disagree_ask_for_no_block_twice(
    order: tuple[int, int], drafter: int
) -> None:
    """One window has nothing, a long one all: boundaries fall block by block."""
    empty, whole = order
    windows = {empty: 9, whole: 400}
    asked = Asked(
        group(FULL, 0, has_drafter=drafter == 0),
        *(
            group(WINDOW, i, window=windows[i], has_drafter=drafter == i)
            for i in (1, 2)
        ),
        missing={(empty, block) for block in range(1001)},
    )
    assert asked.largest(4000) == 0
    assert len(set(asked.questions)) == len(asked.questions)
