"""Recurrent states that ranks share among them: which rows of whose state are ours.

A state is a few tensors in one page, and tensor-parallel ranks have some rows of each:
heads of a matrix, channels of a convolution. A page of one rank has them part by part,
so that the page of a rank among fewer is no stretch of anybody's.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvplugin.layout.heads import head_slices
from kvplugin.layout.runs import Run


class StatePart(NamedTuple):
    """Rows of a rank that follow each other, at one place of every page."""

    name: str
    offset: int
    """Bytes from the start of a page to the first row."""
    rows: int
    row_bytes: int
    total_rows: int
    """Over all ranks. They are split in order and evenly, and copied where there are
    more ranks, as KV heads are (`kvplugin.layout.head_slices`)."""

    @property
    def end(self) -> int:
        """Bytes from the start of a page to where the last row ends."""
        return self.offset + self.rows * self.row_bytes


class Section(NamedTuple):
    """Neighbours along an axis that is split over ranks."""

    name: str
    rows: int
    """Of this rank."""
    total_rows: int
    """Over all ranks."""
    width: int = 1
    """Entries of the axis that are one row: what no rank has a part of."""


class StateSlice(NamedTuple):
    """What one source rank has for a target rank: runs of bytes, pairwise."""

    source_rank: int
    source: tuple[Run, ...]
    target: tuple[Run, ...]


def state_parts(
    shape: Sequence[int],
    axis: int,
    sections: Sequence[Section],
    *,
    itemsize: int,
    offset: int,
) -> tuple[StatePart, ...]:
    """The parts of one tensor of a state.

    Args:
        shape: of the tensor in one page, where its elements follow each other.
        axis: that is split over ranks.
        sections: what lies along it, all of it.
        itemsize: bytes of an element.
        offset: bytes from the start of a page to the tensor.

    Raises:
        ValueError: the sections are not as long as the axis.
    """
    length = sum(section.rows * section.width for section in sections)
    if length != shape[axis]:
        raise ValueError(f"{sections} have {length} entries, axis {axis} of {shape}")
    inner = math.prod(shape[axis + 1 :]) * itemsize
    found = []
    for place in range(outer := math.prod(shape[:axis])):
        for section in sections:
            name = f"{section.name} {place}" if outer > 1 else section.name
            size = section.width * inner
            found.append(
                StatePart(name, offset, section.rows, size, section.total_rows)
            )
            offset = found[-1].end
    return tuple(found)


def state_slices(
    source: tuple[Sequence[StatePart], Sequence[Run]],
    target: tuple[Sequence[StatePart], Run],
    target_ranks: int,
    target_rank: int,
) -> Iterator[StateSlice]:
    """Where a target rank finds its rows, by the rank that has them.

    Args:
        source: parts of the side that is read, and the pages of each of its ranks.
        target: parts of the side that is written, pairwise those of `source`, and the
            pages of the rank.
        target_ranks: tensor-parallel ranks of that side.
        target_rank: the one whose rows are wanted.

    Raises:
        LayoutMismatchError: rows cannot be split evenly over one of the sides.
    """
    found: dict[int, tuple[list[Run], list[Run]]] = {}
    pages, ranks = source[1], (len(source[1]), target_ranks)
    for there, here in zip(source[0], target[0], strict=True):
        for rank, rows in head_slices(here.total_rows, *ranks, target_rank):
            theirs, ours = found.setdefault(rank, ([], []))
            theirs.append(_run(there, pages[rank], rows.source_first, rows.num_heads))
            ours.append(_run(here, target[1], rows.target_first, rows.num_heads))
    for rank, (theirs, ours) in sorted(found.items()):
        yield StateSlice(rank, tuple(theirs), tuple(ours))


def _run(part: StatePart, page: Run, first: int, count: int) -> Run:
    start = page.offset + part.offset + first * part.row_bytes
    return Run(start, page.stride, count * part.row_bytes)
