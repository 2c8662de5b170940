"""The table decides; what it does not know gets a rule that says so."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.errors import IntegrityError
from kvplugin.kernels.choice import (
    ANY_CARD,
    MEASURED,
    TABLE,
    UNMEASURED,
    Engine,
    Row,
    choose,
    find_row,
)
from kvplugin.kernels.streams import Direction

LOAD, STORE = Direction
DMA, TRITON = Engine
CARD = "NVIDIA H200"
KIB = 1 << 10


def row(direction: Direction, kib: int, pieces: int, engine: Engine) -> Row:
    return Row(CARD, direction, kib * KIB, pieces, engine, "1.0 / 0.5, today")


KNOWN = (
    row(LOAD, 16, 16, DMA),
    row(LOAD, 16, 1024, TRITON),
    row(LOAD, 64, 16, TRITON),
    row(LOAD, 256, 16, DMA),
    *UNMEASURED,
)


@pytest.mark.parametrize(
    ("kib", "pieces", "engine"),
    [
        (16, 16, DMA),
        (16, 1023, DMA),
        (63, 1024, TRITON),
        (64, 16, TRITON),
        (255, 5000, TRITON),
        (256, 16, DMA),
        (4096, 1 << 20, DMA),
    ],
)
def test_the_largest_size_and_number_that_are_reached(
    kib: int, pieces: int, engine: Engine
) -> None:
    found = find_row(CARD, LOAD, kib * KIB, pieces, KNOWN)
    assert found.engine == engine
    assert found.measured
    assert choose(CARD, LOAD, kib * KIB, pieces, KNOWN[::-1]) == engine


@pytest.mark.parametrize(
    ("card", "direction", "kib", "pieces"),
    [
        ("Another card", LOAD, 64, 64),
        (CARD, STORE, 64, 64),
        (CARD, LOAD, 8, 64),
        (CARD, LOAD, 64, 8),
    ],
)
def test_what_was_not_measured_gets_a_rule(
    card: str, direction: Direction, kib: int, pieces: int
) -> None:
    found = find_row(card, direction, kib * KIB, pieces, KNOWN)
    assert not found.measured
    assert found.evidence.startswith("not measured: ")


@pytest.mark.parametrize(
    ("direction", "piece_bytes", "pieces", "engine"),
    [
        (LOAD, 16 * KIB, 15, DMA),
        (LOAD, 16 * KIB, 16, TRITON),
        (LOAD, 28 * KIB - 1, 4096, TRITON),
        (LOAD, 28 * KIB, 4096, DMA),
        (STORE, 16 * KIB, 4096, DMA),
    ],
)
def test_the_rule(
    direction: Direction, piece_bytes: int, pieces: int, engine: Engine
) -> None:
    assert choose("Another card", direction, piece_bytes, pieces) == engine


@settings(deadline=None)
@given(
    st.text(max_size=5),
    st.sampled_from(Direction),
    st.integers(1, 1 << 40),
    st.integers(1, 1 << 40),
)
def test_there_is_always_a_row(
    card: str, direction: Direction, piece_bytes: int, pieces: int
) -> None:
    assert find_row(card, direction, piece_bytes, pieces).evidence


def test_rows_are_of_one_kind_and_decide_one_thing_each() -> None:
    assert all(row.card == ANY_CARD for row in UNMEASURED)
    assert all(row.card != ANY_CARD for row in MEASURED)
    assert len({row[:4] for row in TABLE}) == len(TABLE)
    assert all(row.evidence for row in TABLE)


@pytest.mark.parametrize(("piece_bytes", "pieces"), [(0, 1), (1, 0)])
def test_no_copy(piece_bytes: int, pieces: int) -> None:
    with pytest.raises(ValueError, match="no copy"):
        choose(CARD, LOAD, piece_bytes, pieces)


def test_a_table_without_rules() -> None:
    with pytest.raises(IntegrityError, match="no row for 'Another card', load"):
        choose("Another card", LOAD, KIB, 1, KNOWN[:4])
