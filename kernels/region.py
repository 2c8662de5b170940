"""What an engine is given: regions of memory, in pairs to copy, and ids.

Types shared by the operations of this package and their engines.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

MAX_BLOCKS: Final = 1 << 31
"""Ids have 31 bits, so that a pair of them is one int64."""


@dataclass(frozen=True, slots=True)
class Region:
    """Equal-sized runs of bytes, one per block, `stride` bytes apart.

    Nothing needs to be aligned. Whoever makes a region vouches that the memory it
    names exists for as long as anything copies from or to it.

    Raises:
        ValueError: a value is not positive, runs would overlap, or there are more
            than `MAX_BLOCKS`.
    """

    address: int
    """Of block 0's first byte."""
    stride: int
    """Bytes from one block's run to the next one's, at least `nbytes`."""
    nbytes: int
    """Contiguous bytes of one block."""
    blocks: int
    """Number of blocks: ids are 0 to blocks-1."""

    def __post_init__(self) -> None:
        for name in ("address", "nbytes", "blocks"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} {getattr(self, name)} is not positive")
        if self.stride < self.nbytes:
            raise ValueError(
                f"stride {self.stride} is smaller than nbytes {self.nbytes}: the runs "
                "of neighbouring blocks would overlap"
            )
        if self.blocks > MAX_BLOCKS:
            raise ValueError(f"blocks {self.blocks} is more than {MAX_BLOCKS}")

    def continues(self, other: "Region") -> bool:
        """Whether each run starts where the same block's run of `other` ends."""
        return (
            self.address == other.address + other.nbytes
            and self.blocks == other.blocks
            and self.stride == other.stride >= self.nbytes + other.nbytes
        )


Pairs: TypeAlias = Sequence[tuple[Region, Region]]
"""Sources with their targets, of equal `nbytes`."""
Ids: TypeAlias = npt.NDArray[np.int64]
"""Block ids: flat, contiguous, in range."""
Copy: TypeAlias = Callable[[Ids, Ids], None]
"""Copies blocks from source ids to as many target ids, each of which comes once."""


def check_sides(sources: Sequence[Region], targets: Sequence[Region]) -> None:
    """Check that regions pair up.

    Raises:
        ValueError: the sides differ in length or in a region's bytes, or are empty.
    """
    if len(sources) != len(targets):
        raise ValueError(
            f"{len(sources)} source regions do not pair with "
            f"{len(targets)} target regions"
        )
    if not sources:
        raise ValueError("a copier needs at least one region a side")
    for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if source.nbytes != target.nbytes:
            raise ValueError(
                f"region {i} has {source.nbytes} bytes a block in the source and "
                f"{target.nbytes} in the target"
            )


def join_neighbours(pairs: Iterable[tuple[Region, Region]]) -> Pairs:
    """The same bytes in fewer pairs.

    Slices that continue each other on both sides become one: between two pools a
    slot of thirty layers is a single run.
    """
    joined: list[tuple[Region, Region]] = []
    for source, target in pairs:
        if joined:
            before, after = joined[-1]
            if source.continues(before) and target.continues(after):
                nbytes = before.nbytes + source.nbytes
                joined[-1] = (
                    replace(before, nbytes=nbytes),
                    replace(after, nbytes=nbytes),
                )
                continue
        joined.append((source, target))
    return joined


def staging_regions(
    address: int, sizes: Sequence[int], blocks: int, stride: int | None = None
) -> list[Region]:
    """A buffer that holds whole blocks one after the other, as one side of a copy.

    Copying to it gathers, copying from it scatters; block i lies at i times `stride`.

    Args:
        address: where the buffer begins.
        sizes: bytes of a block's runs, in order: those of the other side's regions.
        blocks: that fit the buffer.
        stride: bytes from one block to the next; None for the sum of the sizes.

    Raises:
        ValueError: as `Region`.
    """
    stride, offsets = stride or sum(sizes), accumulate(sizes, initial=0)
    return [
        Region(address + offset, stride, nbytes, blocks)
        for offset, nbytes in zip(offsets, sizes, strict=False)
    ]
