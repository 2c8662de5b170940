"""A layout is accepted only if no two rows share a byte."""

from collections import Counter

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvplugin.errors import LayoutMismatchError
from kvplugin.layout import KVLayout, Part


def counts(layout: KVLayout) -> Counter[int]:
    """How many rows each byte belongs to."""
    return Counter(
        layout.row(i, block, token, head, column) + byte
        for i, part in enumerate(layout.parts)
        for block in range(layout.num_blocks)
        for token in range(layout.tokens)
        for head in range(layout.heads)
        for column in range(part.columns)
        for byte in range(part.row_bytes // part.columns)
    )


strides = st.sampled_from([2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96])
rows = st.sampled_from([1, 2, 3, 4, 8])


@st.composite
def columns(draw: st.DrawFn) -> tuple[int, int, int]:
    """Bytes of a row, its columns, and from one to the next."""
    nbytes = draw(rows)
    count = draw(st.sampled_from([n for n in (1, 2, 4) if nbytes % n == 0]))
    return nbytes, count, draw(strides)


@st.composite
def pairs_of_parts(draw: st.DrawFn) -> tuple[Part, ...]:
    steps = draw(st.tuples(strides, strides, strides))
    others = (
        steps if draw(st.booleans()) else draw(st.tuples(strides, strides, strides))
    )
    offsets = draw(st.tuples(st.just(0), st.sampled_from([1, 2, 4, 8, 16, 64, 192])))
    return (
        Part("k", offsets[0], *steps, *draw(columns())),
        Part("v", offsets[1], *others, *draw(columns())),
    )


@settings(deadline=None)
@given(pairs_of_parts(), st.tuples(*[st.integers(1, 3)] * 3))
def test_accepted_rows_share_no_byte(
    parts: tuple[Part, ...], sizes: tuple[int, int, int]
) -> None:
    try:
        layout = KVLayout(parts, *sizes)
    except LayoutMismatchError:
        event("refused")
        return
    event("accepted")
    assert max(counts(layout).values()) == 1


def part(name: str, offset: int, nbytes: int = 16) -> Part:
    return Part(name, offset, 256, 64, 32, nbytes)


@pytest.mark.parametrize("offset", [0, 8, 15, 24, 31, 32 + 8, 64, 256 + 24])
def test_overlapping_parts_are_refused(offset: int) -> None:
    with pytest.raises(LayoutMismatchError, match="rows of parts 'k' and 'v' overlap"):
        KVLayout((part("k", 0), part("v", offset)), 3, 4, 2)


@pytest.mark.parametrize(
    "parts",
    [
        (part("k", 0), part("v", 16)),
        (part("v", 16), part("k", 0)),
        (part("k", 0, 8), part("v", 8, 24)),
        (part("k", 0), part("v", 768)),
        (Part("k", 0, 256, 32, 16, 16), Part("v", 128, 256, 16, 64, 16)),
        (Part("k", 0, 8, 2, 1, 1), Part("v", 24, 96, 24, 12, 12)),
    ],
    ids=[
        "side by side",
        "in any order",
        "unequal",
        "one after the other",
        "unlike",
        "one after the other, unlike",
    ],
)
def test_parts_beside_each_other_are_accepted(parts: tuple[Part, ...]) -> None:
    layout = KVLayout(parts, 3, 4, 2)
    assert max(counts(layout).values()) == 1
