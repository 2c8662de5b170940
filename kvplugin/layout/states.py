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
    """Rows of a rank that follow each other, at one place of every page or at several,
    as for each of the last inputs of a convolution."""

    name: str
    offset: int
    """Bytes from the start of a page to the first row."""
    rows: int
    """At each place."""
    row_bytes: int
    total_rows: int
    """Over all ranks. They are split in order and evenly, and copied where there are
    more ranks, as KV heads are (`kvplugin.layout.head_slices`)."""
    places: int
    place_stride: int
    """Bytes from place to place."""

    @property
    def end(self) -> int:
        """Bytes from the start of a page to where the last row ends."""
        last = (self.places - 1) * self.place_stride
        return self.offset + last + self.rows * self.row_bytes

    def runs(self, page: Run, first: int, count: int) -> Iterator[Run]:
        """Some of its rows, place by place."""
        start = page.offset + self.offset + first * self.row_bytes
        for place in range(self.places):
            at = start + place * self.place_stride
            yield Run(at, page.stride, count * self.row_bytes)


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
    places, stride = math.prod(shape[:axis]), shape[axis] * inner
    found = []
    for name, rows, total_rows, width in sections:
        size = width * inner
        found.append(StatePart(name, offset, rows, size, total_rows, places, stride))
        offset += rows * size
    return tuple(found)


def state_slices(
    source: tuple[Sequence[StatePart], Sequence[Run]],
    target: tuple[Sequence[StatePart], Run],
    target_ranks: int,
    target_rank: int,
) -> Iterator[StateSlice]:
    """Where a target rank finds its rows, by the rank that has them.

    Of rows that several ranks hold, those of a rank are read that has others too.

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
    parts = zip(source[0], target[0], strict=True)
    ranks = len(source[1])
    for there, here in sorted(parts, key=lambda pair: -pair[1].total_rows):
        total = here.total_rows
        for holder, (first, own, count) in head_slices(
            total, ranks, target_ranks, target_rank
        ):
            copies = max(1, ranks // total)
            twins = range(holder - holder % copies, holder - holder % copies + copies)
            rank = next((twin for twin in twins if twin in found), holder)
            theirs, ours = found.setdefault(rank, ([], []))
            theirs += there.runs(source[1][rank], first, count)
            ours += here.runs(target[1], own, count)
    for rank, (theirs, ours) in sorted(found.items()):
        yield StateSlice(rank, tuple(theirs), tuple(ours))
