"""Jobs end as their fate says, and content moves with them."""

from collections.abc import Callable

import pytest

from kvplugin.contract import CopyJob, CopyResult
from kvplugin.testing import ContentError, ContentTier, Fate, FaultyTransport, Row
from kvplugin.testing.faults import (
    BLOCK_BYTES,
    COMPLETES,
    FAILS,
    LATE,
    NEVER_ENDS,
    REPORTED_LATE,
    TORN,
    TWICE,
)
from kvplugin.testing.rules import PLAIN
from tests.core.manager_setups import full
from tests.testing.test_content import memory_of

HISTORIES = PLAIN.histories(range(8))


def transport_of(fate: Fate) -> tuple[FaultyTransport, Callable[[], int]]:
    """A transport that stores blocks 1 and 2 of the engine to 7 and 8 of a tier; how
    many of them are there."""
    memory = memory_of(full())
    memory.write(0, Row("r", [1, 2]), 0, HISTORIES)
    tier = ContentTier(memory)
    transport = FaultyTransport(tier.execute, lambda job: fate)
    transport.submit(CopyJob(1, True, [(0, [1, 2], [7, 8])]))
    return transport, lambda: len(tier.blocks)


OK = CopyResult(1, nbytes=2 * BLOCK_BYTES)


@pytest.mark.parametrize(
    ("fate", "polls"),
    [
        (COMPLETES, [(2, [OK]), (2, [])]),
        (LATE, [(0, []), (0, []), (2, [OK])]),
        (REPORTED_LATE, [(2, []), (2, []), (2, [OK]), (2, [])]),
        (TWICE, [(2, [OK, OK]), (2, [])]),
        (FAILS, [(0, [CopyResult(1, FAILS.error)]), (0, [])]),
        (TORN, [(1, [CopyResult(1, TORN.error)])]),
        (NEVER_ENDS, [(0, [])] * 9),
        (Fate(1, moves_at_once=True, error="x"), [(2, []), (2, [CopyResult(1, "x")])]),
    ],
)
def test_fates(fate: Fate, polls: list[tuple[int, list[CopyResult]]]) -> None:
    transport, stored = transport_of(fate)
    for there, results in polls:
        assert transport.poll(0.0) == results
        assert stored() == there


def test_a_test_can_still_end_a_job_itself() -> None:
    transport, stored = transport_of(NEVER_ENDS)
    transport.poll(0.0)
    transport.complete(1)
    assert transport.poll(0.0) == [OK]
    assert stored() == 2


@pytest.mark.parametrize(
    ("fate", "polls"),
    [
        (NEVER_ENDS, [[OK], []]),
        (Fate(polls=-1, error="x"), [[CopyResult(1, "x")], []]),
        (LATE, [[], [], [OK]]),
        (FAILS, [[CopyResult(1, FAILS.error)]]),
    ],
)
def test_after_release_everything_ends_by_its_fate(
    fate: Fate, polls: list[list[CopyResult]]
) -> None:
    transport, _ = transport_of(fate)
    transport.release()
    assert [transport.poll(0.0) for _ in polls] == polls


@pytest.mark.parametrize(
    ("fate", "states"),
    [(LATE, 3), (REPORTED_LATE, 3), (Fate(polls=7), 8), (NEVER_ENDS, 1)],
)
def test_the_state_says_how_long_a_job_takes_yet(fate: Fate, states: int) -> None:
    transport, _ = transport_of(fate)
    seen = []
    for _ in range(10):
        seen.append(repr(transport.state()))
        transport.poll(0.0)
        if not transport.pending:
            break
    assert len(set(seen)) == states


def test_content_comes_back() -> None:
    memory = memory_of(full())
    memory.write(0, Row("r", [1, 2]), 0, HISTORIES)
    tier = ContentTier(memory)
    tier.execute(CopyJob(1, True, [(0, [1, 2], [7, 8])]))
    memory.handed_out([1, 2])
    tier.execute(CopyJob(2, False, [(0, [4, 3], [7, 8])]))
    memory.read(0, Row("r", [4, 3]), range(8), HISTORIES)
    tier.execute(CopyJob(3, False, [(0, [5], [8])]), num_slots=1)
    memory.read(0, Row("r", [4, 5]), range(5), HISTORIES)
    with pytest.raises(ContentError, match="position 5"):
        memory.read(0, Row("r", [4, 5]), range(8), HISTORIES)


def test_what_was_never_stored_cannot_be_loaded() -> None:
    tier = ContentTier(memory_of(full()))
    transport = FaultyTransport(tier.execute)
    transport.submit(CopyJob(1, False, [(0, [1], [7])]))
    (result,) = transport.poll(0.0)
    assert "KeyError" in result.error
