"""Rows: the block ids of a request, a list a group, and what they hold."""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

from kvplugin.block import NULL_BLOCK

Rows = tuple[list[int], ...]


def first_wrong_token(
    wrong: AbstractSet[int], rows: Rows, block_sizes: Sequence[int]
) -> int | None:
    """Where the first wrong block of any group begins; None if there is none."""
    starts = [
        i * size
        for row, size in zip(rows, block_sizes, strict=True)
        for i, block in enumerate(row)
        if block in wrong
    ]
    return min(starts, default=None)


def blocks_from(token: int, rows: Rows, block_sizes: Sequence[int]) -> Iterator[int]:
    """Blocks of all groups that hold something computed from `token` on."""
    for row, size in zip(rows, block_sizes, strict=True):
        yield from (block for block in row[token // size :] if block != NULL_BLOCK)
