"""States that are shared out over other numbers of ranks: every row arrives."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.errors import LayoutMismatchError
from kvplugin.layout import Run, Section, StatePart, state_parts, state_slices

BLOCKS = 3


@dataclass(frozen=True)
class Tensor:
    """One tensor of a state, over all ranks: [outer, channels, inner]."""

    outer: tuple[int, ...]
    sections: tuple[tuple[int, int], ...]
    """Rows over all ranks, and entries of the axis a row."""
    inner: tuple[int, ...]


def held(total: int, ranks: int, rank: int) -> range:
    """Rows of a rank."""
    each = max(1, total // ranks)
    first = rank * total // ranks
    return range(first, first + each)


def whole(tensor: Tensor, blocks: int, seed: int) -> list[np.ndarray]:
    """Content by section: [blocks, *outer, rows, width, *inner]."""
    rng = np.random.default_rng(seed)
    return [
        rng.integers(
            0, 256, (blocks, *tensor.outer, total, width, *tensor.inner), np.uint8
        )
        for total, width in tensor.sections
    ]


def of_rank(
    tensors: list[Tensor], content: list[list[np.ndarray]], ranks: int, rank: int
) -> tuple[np.ndarray, tuple[StatePart, ...]]:
    """A rank's pages [blocks, bytes], as an engine lays them out; its parts."""
    columns: list[np.ndarray] = []
    parts: list[StatePart] = []
    for i, (tensor, sections) in enumerate(zip(tensors, content, strict=True)):
        axis = len(tensor.outer)
        pieces = []
        for (total, width), values in zip(tensor.sections, sections, strict=True):
            own = np.take(values, list(held(total, ranks, rank)), axis + 1)
            shape = own.shape
            merged = (*shape[: axis + 1], shape[axis + 1] * width, *shape[axis + 3 :])
            pieces.append(own.reshape(merged))
        local = np.concatenate(pieces, axis + 1)
        parts += state_parts(
            local.shape[1:],
            axis,
            [
                Section(f"{i}.{j}", len(held(total, ranks, rank)), total, width)
                for j, (total, width) in enumerate(tensor.sections)
            ],
            itemsize=1,
            offset=parts[-1].end if parts else 0,
        )
        columns.append(local.reshape(len(local), -1))
    pages = np.concatenate(columns, 1)
    assert parts[-1].end == pages.shape[1]
    return pages, tuple(parts)


TENSORS = st.lists(
    st.builds(
        Tensor,
        st.lists(st.integers(1, 3), max_size=2).map(tuple),
        st.lists(
            st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 3)),
            min_size=1,
            max_size=3,
        ).map(tuple),
        st.lists(st.integers(1, 3), max_size=2).map(tuple),
    ),
    min_size=1,
    max_size=3,
)
RANKS = st.sampled_from([1, 2, 4, 8])


@settings(deadline=None)
@given(TENSORS, RANKS, RANKS, st.data())
def test_every_row_arrives(
    tensors: list[Tensor], theirs: int, ours: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, ours - 1), label="rank")
    content = [whole(tensor, BLOCKS, i) for i, tensor in enumerate(tensors)]
    sources = [of_rank(tensors, content, theirs, peer) for peer in range(theirs)]
    wanted, parts = of_rank(tensors, content, ours, rank)
    got = np.zeros_like(wanted)
    filled = np.zeros(wanted.shape[1], int)
    page = Run(0, wanted.shape[1], wanted.shape[1])
    size = sources[0][0].shape[1]
    pages = [Run(1000 * peer, size, size) for peer in range(theirs)]
    for one in state_slices((sources[0][1], pages), (parts, page), ours, rank):
        memory = sources[one.source_rank][0]
        for there, here in zip(one.source, one.target, strict=True):
            assert there.nbytes == here.nbytes
            assert (there.stride, here.stride) == (size, page.stride)
            to = slice(here.offset, here.offset + here.nbytes)
            start = there.offset - pages[one.source_rank].offset
            got[:, to] = memory[:, start : start + there.nbytes]
            filled[to] += 1
    np.testing.assert_array_equal(got, wanted)
    assert (filled == 1).all(), "bytes that nobody or several ranks filled"


def test_pages_may_lie_anywhere() -> None:
    parts = state_parts((4, 3), 0, [Section("heads", 4, 4)], itemsize=2, offset=6)
    assert parts == (StatePart("heads", 6, 4, 6, 4, 1, 24),)
    half = (StatePart("heads", 0, 2, 6, 4, 1, 24),)
    (one,) = state_slices((parts, [Run(100, 64, 40)]), (half, Run(7, 32, 12)), 2, 1)
    assert one.source_rank == 0
    assert one.source == (Run(100 + 6 + 2 * 6, 64, 12),)
    assert one.target == (Run(7, 32, 12),)


def test_an_axis_that_is_longer_than_what_lies_along_it() -> None:
    with pytest.raises(ValueError, match=r"have 6 entries, axis 1 of \(3, 8\)"):
        state_parts((3, 8), 1, [Section("x", 3, 3, 2)], itemsize=1, offset=0)


def test_rows_that_ranks_cannot_share_evenly() -> None:
    parts = (StatePart("heads", 0, 6, 6, 6, 1, 36),)
    page = Run(0, 36, 36)
    with pytest.raises(LayoutMismatchError, match="split evenly over 4 ranks"):
        list(state_slices((parts, [page]), (parts, page), 4, 0))


@pytest.mark.parametrize(("theirs", "ours"), [(4, 2), (2, 4), (8, 4), (1, 2), (4, 4)])
def test_copies_are_read_from_a_rank_that_is_read_anyway(
    theirs: int, ours: int
) -> None:
    """A single group of inputs, eight heads."""

    def parts(ranks: int) -> tuple[StatePart, ...]:
        heads = Section("heads", 8 // ranks, 8)
        inputs = Section("inputs", 1, 1, 4)
        width = heads.rows + inputs.width
        return state_parts((3, width), 1, [inputs, heads], itemsize=1, offset=0)

    for rank in range(ours):
        pages = [Run(0, 64, 64)] * theirs
        found = list(
            state_slices((parts(theirs), pages), (parts(ours), pages[0]), ours, rank)
        )
        assert len(found) == max(1, theirs // ours)
