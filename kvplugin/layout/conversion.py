"""Plans that carry rows from one page layout into another.

Both sides' blocks are cut into *chunks*, the largest run of tokens that neither side
splits: the greatest common divisor of the block sizes. A chunk has one id a side, its
block's id times the chunks of a block plus its place in there. Where kernels count in
blocks smaller than the pool's (`KVLayout.split`), a block of the pool is simply more
chunks; their ids follow each other all the same. What a chunk holds is a
few `Box`es: strided copies of up to two axes around contiguous bytes. A row that holds
several tokens (`KVLayout.tokens_per_row`) is never split: chunks are whole rows.

    block sizes 64 -> 128: chunks of 64 tokens, one a source block, two a target block
    block sizes 48 -> 32:  chunks of 16 tokens, three a source block, two a target block
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from kvplugin.errors import LayoutMismatchError
from kvplugin.layout.heads import HeadSlice
from kvplugin.layout.interior import KVLayout, Part

MAX_AXES: Final = 2
"""Of a box: what engines loop over."""


class Axis(NamedTuple):
    """A loop around what a box copies at once; strides in bytes."""

    extent: int
    source_stride: int
    target_stride: int


class Side(NamedTuple):
    """Where a box begins on one side: offset + block * block_stride + place of the
    chunk in its block * chunk_stride, in bytes; 0 where a block is one chunk."""

    offset: int
    block_stride: int
    chunk_stride: int


@dataclass(frozen=True, slots=True)
class Box:
    """The same rows of every chunk."""

    source: Side
    target: Side
    axes: tuple[Axis, ...]
    """Outermost on the target first; at most two."""
    nbytes: int
    """Contiguous on both sides."""

    @property
    def total_bytes(self) -> int:
        """Of one chunk."""
        return self.nbytes * math.prod(axis.extent for axis in self.axes)


@dataclass(frozen=True, slots=True)
class Conversion:
    """How blocks of one layout become blocks of another."""

    source: KVLayout
    target: KVLayout
    heads: HeadSlice
    """That move."""
    chunk_tokens: int
    boxes: tuple[Box, ...]

    @property
    def source_chunks(self) -> int:
        """Chunks of a source block, as its kernels count blocks."""
        return self.source.tokens // self.chunk_tokens

    @property
    def target_chunks(self) -> int:
        """Chunks of a target block, likewise."""
        return self.target.tokens // self.chunk_tokens

    @property
    def chunk_bytes(self) -> int:
        """Bytes that move with one chunk."""
        return sum(box.total_bytes for box in self.boxes)

    @property
    def copies_whole_runs(self) -> bool:
        """Whether a block is runs of bytes on both sides: nothing is reordered."""
        one_chunk = self.source_chunks == self.target_chunks == 1
        return one_chunk and all(not box.axes for box in self.boxes)

    def pair_chunks(
        self,
        source_ids: Sequence[int],
        target_ids: Sequence[int],
        num_tokens: int | None = None,
    ) -> tuple[list[int], list[int]]:
        """Chunk ids that belong together in two rows of one request.

        Args:
            source_ids: blocks of the pool (as schedulers and regions count them) that
                hold its tokens from a common first one on.
            target_ids: blocks of the pool that are to hold them.
            num_tokens: how many; rounded up to a chunk. None for all of the rows,
                which must then hold equally many.

        Raises:
            LayoutMismatchError: a row is too short, or too long for None.
            ValueError: `num_tokens` is negative.
        """
        if num_tokens is not None and num_tokens < 0:
            raise ValueError(f"num_tokens {num_tokens} is negative")
        sources = _chunks_of(source_ids, self.source_chunks * self.source.split)
        targets = _chunks_of(target_ids, self.target_chunks * self.target.split)
        room = min(len(sources), len(targets))
        wanted = room if num_tokens is None else -(-num_tokens // self.chunk_tokens)
        if wanted > room or (num_tokens is None and len(sources) != len(targets)):
            held = [side.tokens * side.split for side in (self.source, self.target)]
            raise LayoutMismatchError(
                f"{len(source_ids)} source blocks of {held[0]} tokens and "
                f"{len(target_ids)} target blocks of {held[1]} do not both "
                f"hold {'the same' if num_tokens is None else num_tokens} tokens"
            )
        return sources[:wanted], targets[:wanted]

    def runs(self, source_chunk: int, target_chunk: int) -> Iterator[tuple[int, ...]]:
        """Contiguous copies of one pair of chunks: (source offset, target offset,
        bytes). For descriptors, and to check engines against."""
        for box in self.boxes:
            source = _start(box.source, source_chunk, self.source_chunks)
            target = _start(box.target, target_chunk, self.target_chunks)
            yield from _walk(source, target, box.axes, box.nbytes)


def plan_conversion(
    source: KVLayout, target: KVLayout, heads: HeadSlice | None = None
) -> Conversion:
    """Plan the copy of rows between two layouts of the same content.

    Args:
        source: where rows are read.
        target: where they are written.
        heads: the heads that move; None for all, which both sides must have.

    Raises:
        LayoutMismatchError: parts, row sizes, dtypes, packings or heads do not
            correspond, or a row's columns differ so that a part takes more than two
            loops around contiguous bytes; shows both sides.
    """
    _check_rows(source, target)
    if heads is None:
        if source.heads != target.heads:
            raise _refusal("they have different numbers of heads", source, target)
        heads = HeadSlice(0, 0, source.heads)
    _check_heads(heads, source, target)
    rows = math.gcd(source.rows, target.rows)
    chunks = source.rows // rows, target.rows // rows
    boxes = [
        _box(s, t, heads, rows, chunks)
        for s, t in zip(source.parts, target.parts, strict=True)
    ]
    for box in boxes:
        if len(box.axes) > MAX_AXES:
            raise _refusal(
                f"rows of {len(box.axes)} nested strides would be moved in pieces of "
                f"{box.nbytes} bytes",
                source,
                target,
            )
    tokens = rows * source.tokens_per_row
    return Conversion(source, target, heads, tokens, _join(boxes))


def _check_rows(source: KVLayout, target: KVLayout) -> None:
    if (source.packing, source.tokens_per_row) != (
        target.packing,
        target.tokens_per_row,
    ):
        raise _refusal(
            f"rows of {source.tokens_per_row} tokens packed as {source.packing!r} do "
            f"not become rows of {target.tokens_per_row} packed as {target.packing!r}",
            source,
            target,
        )
    rows = [[(p.name, p.row_bytes) for p in side.parts] for side in (source, target)]
    if rows[0] != rows[1] or source.dtype != target.dtype:
        raise _refusal("their rows differ", source, target)
    for s, t in zip(source.parts, target.parts, strict=True):
        few, many = sorted((s.columns, t.columns))
        if many % few:
            raise _refusal(
                f"{s.columns} columns of a row do not become {t.columns}",
                source,
                target,
            )


def _check_heads(heads: HeadSlice, source: KVLayout, target: KVLayout) -> None:
    for first, side in ((heads.source_first, source), (heads.target_first, target)):
        if heads.num_heads < 1 or first < 0 or first + heads.num_heads > side.heads:
            raise _refusal(f"{heads} is not among the heads", source, target)


def _box(
    source: Part, target: Part, heads: HeadSlice, rows: int, chunks: Sequence[int]
) -> Box:
    """The rows of a part in one chunk of so many; `chunks` in a block of each side."""
    steps = [
        rows * part.token_stride * (count > 1)
        for part, count in zip((source, target), chunks, strict=True)
    ]
    columns, piece = _columns(source, target)
    axes = [
        Axis(rows, source.token_stride, target.token_stride),
        Axis(heads.num_heads, source.head_stride, target.head_stride),
        *columns,
    ]
    merged, nbytes = _merge(axes, piece)
    first = heads.source_first * source.head_stride
    return Box(
        Side(source.offset + first, source.block_stride, steps[0]),
        Side(
            target.offset + heads.target_first * target.head_stride,
            target.block_stride,
            steps[1],
        ),
        merged,
        nbytes,
    )


def _columns(source: Part, target: Part) -> tuple[list[Axis], int]:
    """The loops inside a row, and the bytes that neither side splits: each column of
    the side with fewer of them is several of the other's, one after the other."""
    pieces = max(source.columns, target.columns)
    piece = source.row_bytes // pieces
    few = min(source.columns, target.columns)
    steps = [
        (side.column_stride, piece)
        if side.columns == few < pieces
        else (pieces // few * side.column_stride, side.column_stride)
        for side in (source, target)
    ]
    outer, inner = zip(*steps, strict=True)
    return [Axis(few, *outer), Axis(pieces // few, *inner)], piece


def _merge(axes: Sequence[Axis], nbytes: int) -> tuple[tuple[Axis, ...], int]:
    """The same copy in fewer loops: what is contiguous on both sides is one run, and
    two axes that step as one are one."""
    left = sorted(
        (axis for axis in axes if axis.extent > 1), key=lambda axis: -axis.target_stride
    )
    while left and left[-1][1:] == (nbytes, nbytes):
        nbytes *= left.pop().extent
    merged: list[Axis] = []
    for inner in left:
        step = (inner.extent * inner.source_stride, inner.extent * inner.target_stride)
        if merged and merged[-1][1:] == step:
            inner = inner._replace(extent=merged.pop().extent * inner.extent)
        merged.append(inner)
    return tuple(merged), nbytes


def _join(boxes: Sequence[Box]) -> tuple[Box, ...]:
    """Boxes that continue each other on both sides become one."""
    joined: list[Box] = []
    for box in boxes:
        if joined and _continues(box, joined[-1]):
            joined[-1] = replace(joined[-1], nbytes=joined[-1].nbytes + box.nbytes)
        else:
            joined.append(box)
    return tuple(_merge_again(box) for box in joined)


def _merge_again(box: Box) -> Box:
    """Joined rows may fill what lay between them."""
    axes, nbytes = _merge(box.axes, box.nbytes)
    return replace(box, axes=axes, nbytes=nbytes)


def _continues(box: Box, before: Box) -> bool:
    sides = ((box.source, before.source), (box.target, before.target))
    return box.axes == before.axes and all(
        after.offset == first.offset + before.nbytes and after[1:] == first[1:]
        for after, first in sides
    )


def _chunks_of(ids: Sequence[int], chunks: int) -> list[int]:
    return [block * chunks + place for block in ids for place in range(chunks)]


def _start(side: Side, chunk: int, chunks: int) -> int:
    block, place = divmod(chunk, chunks)
    return side.offset + block * side.block_stride + place * side.chunk_stride


def _walk(
    source: int, target: int, axes: Sequence[Axis], nbytes: int
) -> Iterator[tuple[int, ...]]:
    if not axes:
        yield source, target, nbytes
        return
    axis = axes[0]
    for i in range(axis.extent):
        yield from _walk(
            source + i * axis.source_stride,
            target + i * axis.target_stride,
            axes[1:],
            nbytes,
        )


def _refusal(why: str, source: KVLayout, target: KVLayout) -> LayoutMismatchError:
    return LayoutMismatchError(
        f"KV blocks can't be converted: {why}. Source: {source}. Target: {target}."
    )
