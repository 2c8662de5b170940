"""Blocks on their way: a copy of what a conversion reads of them, packed together.

Rows that are read over a network arrive in a staging memory and are converted from
there. What of a block has to come is a stretch of bytes of each of its runs, from the
first to the last byte that the conversion needs: a slice of heads, where a run holds
them one after the other, is just that slice. Keys and values far apart in one run have
a stretch each. Stretches of one place in their blocks lie side by side in staging, so
that neighbouring blocks are still one read:

    blocks in memory    [K of 0 | K of 1 | ...]  ...  [V of 0 | V of 1 | ...]
    staging             [K of slot 0 | K of slot 1 | ...][V of slot 0 | ...]
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from kvplugin.errors import LayoutMismatchError
from kvplugin.layout.conversion import Conversion, plan_conversion
from kvplugin.layout.heads import HeadSlice
from kvplugin.layout.interior import KVLayout, Part
from kvplugin.layout.runs import Run

ALIGNMENT: Final = 64
"""Bytes; where the first slot of a stretch begins."""
MAX_STRETCHES: Final = 1024
"""Of a block."""
_FEW: Final = 8
"""Runs that a message shows."""
MAX_GAP: Final = 32 << 10
"""Bytes that are read for nothing rather than read around. Measured over UCX between
two processes of one machine: a read more costs about 5 microseconds, in which 12 GB/s
are 60 KB."""


class Stretch(NamedTuple):
    """Bytes that every block of the source has, as its kernels count blocks: block b's
    start at offset + b*stride."""

    offset: int
    stride: int
    nbytes: int


class _Outer(NamedTuple):
    """A loop over runs: rows of a part that one run does not hold."""

    extent: int
    stride: int
    place: int
    """In `_axes`."""


@dataclass(frozen=True, slots=True)
class _Field:
    """Parts whose rows lie in the same runs."""

    offset: int
    nbytes: int
    stride: int
    outer: tuple[_Outer, ...]
    parts: tuple[int, ...]

    @property
    def stretches(self) -> int:
        return math.prod(axis.extent for axis in self.outer)


class _Runs:
    """The bytes of a block: where they are looked up."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self.all = sorted(runs)
        self._offsets = [run.offset for run in self.all]

    def around(self, offset: int, nbytes: int) -> Run | None:
        """The run that holds all of these bytes."""
        place = bisect_right(self._offsets, offset) - 1
        if place < 0:
            return None
        run = self.all[place]
        return run if offset + nbytes <= run.offset + run.nbytes else None


@dataclass(frozen=True, slots=True)
class Staging:
    """What a conversion reads of a block of its source, and how it lies in slots."""

    conversion: Conversion
    """Between the engines' memories."""
    fields: tuple[_Field, ...]

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        """What to read of a block, in order of the staging memory."""
        return tuple(
            Stretch(field.offset + start, field.stride, field.nbytes)
            for field in self.fields
            for start in _starts(field.outer)
        )

    @property
    def slot_bytes(self) -> int:
        """Of a block, without gaps for alignment."""
        return sum(stretch.nbytes for stretch in self.stretches)

    def slots(self, nbytes: int) -> int:
        """Blocks that fit so many bytes of staging."""
        gaps = len(self.stretches) * (ALIGNMENT - 1)
        return max(0, (nbytes - gaps) // self.slot_bytes)

    def offsets(self, slots: int) -> list[int]:
        """Where slot 0 of each of `stretches` begins, of so many slots."""
        sizes = [_pitch(stretch.nbytes, slots) for stretch in self.stretches]
        return list(itertools.accumulate(sizes, initial=0))[:-1]

    def onward(self, slots: int) -> Conversion:
        """From so many slots to the target."""
        plan = self.conversion
        parts = list(plan.source.parts)
        start = 0
        for field in self.fields:
            pitch = _pitch(field.nbytes, slots)
            for i in field.parts:
                parts[i] = _staged(parts[i], field, plan.heads, start, pitch)
            start += pitch * field.stretches
        source = replace(
            plan.source,
            parts=tuple(parts),
            num_blocks=slots,
            heads=plan.heads.num_heads,
            name=f"{plan.source.name} in staging".strip(),
            split=1,
        )
        heads = plan.heads._replace(source_first=0)
        return plan_conversion(source, plan.target, heads)


def plan_staging(conversion: Conversion, runs: Sequence[Run]) -> Staging:
    """What has to be read of the source's blocks.

    Args:
        conversion: between the engines' memories.
        runs: the bytes of a block of the source's pool.

    Raises:
        LayoutMismatchError: rows lie outside the runs, or in too many of them.
    """
    source, own = conversion.source, _Runs(runs)
    fields: list[_Field] = []
    for i, part in enumerate(source.parts):
        new = _field(i, part, conversion, own)
        same = [old for old in fields if _share_runs(old, new, own)]
        for old in same:
            fields.remove(old)
            new = _union(old, new)
        fields.append(new)
    if source.split * sum(field.stretches for field in fields) > MAX_STRETCHES:
        raise LayoutMismatchError(
            f"rows of a block lie in more than {MAX_STRETCHES} runs of bytes: {source}"
        )
    for field in fields:
        _check_inside(field, source, own)
    return Staging(conversion, tuple(fields))


def _check_inside(field: _Field, source: KVLayout, runs: _Runs) -> None:
    """Whether its bytes are the block's own, in every block."""
    one_block = source.num_blocks == source.split
    step = field.stride * source.split
    for j, start in itertools.product(range(source.split), _starts(field.outer)):
        run = runs.around(field.offset + j * field.stride + start, field.nbytes)
        if run is None or not (one_block or run.stride == step):
            raise LayoutMismatchError(
                f"rows of a block lie outside its bytes. Rows: {source}. Bytes of "
                f"block 0: {runs.all[:_FEW]}."
            )


def _axes(part: Part, layout: KVLayout, heads: HeadSlice) -> list[tuple[int, int]]:
    """(extent, stride) of heads, rows, columns: in this order."""
    return [
        (heads.num_heads, part.head_stride),
        (layout.rows, part.token_stride),
        (part.columns, part.column_stride),
    ]


def _field(index: int, part: Part, conversion: Conversion, runs: _Runs) -> _Field:
    """The rows of one part: loops from the inside out, as long as what they span is in
    one run of bytes."""
    heads = conversion.heads
    offset = part.offset + heads.source_first * part.head_stride
    nbytes = part.column_bytes
    outer: list[_Outer] = []
    axes = [
        _Outer(extent, stride, place)
        for place, (extent, stride) in enumerate(_axes(part, conversion.source, heads))
        if extent > 1
    ]
    for axis in sorted(axes, key=lambda axis: axis.stride):
        wider = nbytes + (axis.extent - 1) * axis.stride
        if not outer and runs.around(offset, wider) is not None:
            nbytes = wider
        else:
            outer.append(axis)
    return _Field(offset, nbytes, part.block_stride, tuple(outer), (index,))


def _share_runs(one: _Field, other: _Field, runs: _Runs) -> bool:
    """Whether two fields are better read as one: they lie in the same runs, not far
    apart, and step alike from block to block."""
    first, second = sorted((one, other), key=lambda field: field.offset)
    return (
        second.offset - first.offset - first.nbytes <= MAX_GAP
        and (one.stride, one.outer) == (other.stride, other.outer)
        and (run := runs.around(one.offset, one.nbytes)) is not None
        and run == runs.around(other.offset, other.nbytes)
    )


def _union(one: _Field, other: _Field) -> _Field:
    start = min(one.offset, other.offset)
    end = max(one.offset + one.nbytes, other.offset + other.nbytes)
    return replace(one, offset=start, nbytes=end - start, parts=one.parts + other.parts)


def _starts(outer: Sequence[_Outer]) -> Iterator[int]:
    steps = [[i * axis.stride for i in range(axis.extent)] for axis in outer]
    return (sum(step) for step in itertools.product(*steps))


def _pitch(nbytes: int, slots: int) -> int:
    return -(-nbytes * slots // ALIGNMENT) * ALIGNMENT


def _staged(
    part: Part, field: _Field, heads: HeadSlice, start: int, pitch: int
) -> Part:
    """The same rows in slots, `start` bytes into staging. Loops over runs step over
    all slots of a run."""
    first = part.offset + heads.source_first * part.head_stride
    strides = [part.head_stride, part.token_stride, part.column_stride]
    step = pitch
    for axis in reversed(field.outer):
        strides[axis.place] = step
        step *= axis.extent
    return replace(
        part,
        offset=start + first - field.offset,
        block_stride=field.nbytes,
        head_stride=strides[0],
        token_stride=strides[1],
        column_stride=strides[2],
    )
