"""Ids of blocks or chunks, as callers give them and as engines want them."""

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvplugin.kernels.region import Ids

MAX_INT64: Final = (1 << 63) - 1
AnyIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer]
"""Flat: a list, a range, an array of any kind of integers."""


def checked_pairs(
    source_ids: AnyIds,
    target_ids: AnyIds,
    source_count: int,
    target_count: int,
    unit: str = "blocks",
) -> tuple[Ids, Ids]:
    """The ids of a copy, good and in order of the source.

    Reading upwards is the faster order, and what can be joined lies side by side.

    Args:
        source_ids: an id may appear more than once.
        target_ids: as many, each at most once.
        source_count: ids of the source are 0 to source_count-1.
        target_count: the same for the target.
        unit: what an id counts, for messages.

    Raises:
        ValueError: ids are not flat lists of integers of one length, are out of
            range, or a target id is repeated.
    """
    sources = flat_integers(source_ids, "source ids")
    targets = flat_integers(target_ids, "target ids")
    if len(sources) != len(targets):
        raise ValueError(
            f"{len(sources)} source ids do not pair with {len(targets)} target ids"
        )
    if len(targets):
        check_range(sources, source_count, "source id", unit)
        check_range(targets, target_count, "target id", unit)
        _check_distinct(targets, target_count)
    return _by_source(sources, targets)


def flat_integers(values: AnyIds, what: str) -> Ids:
    """The values as int64; `what` names them in messages.

    Always a copy: writable, contiguous, and no one else's to change in mid-copy.

    Raises:
        ValueError: they are not a flat list of integers.
    """
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"{what} must be a flat list of integers, not {array.dtype} of shape "
            f"{array.shape}"
        )
    if array.dtype == np.uint64 and array.size and array.max() > MAX_INT64:
        raise ValueError(f"{what}: {array.max()} is more than {MAX_INT64}")
    return np.array(array, dtype=np.int64)


def check_range(ids: Ids, count: int, what: str, unit: str = "blocks") -> None:
    """Check that ids, of which there is at least one, are 0 to count-1.

    Raises:
        ValueError: one is not.
    """
    for extreme in (int(ids.min()), int(ids.max())):
        if not 0 <= extreme < count:
            raise ValueError(
                f"{what} {extreme} is out of range: there are {count} {unit}, "
                f"0 to {count - 1}"
            )


def _check_distinct(targets: Ids, count: int) -> None:
    seen = np.zeros(count, np.bool_)
    seen[targets] = True
    if np.count_nonzero(seen) < len(targets):
        ids, counts = np.unique(targets, return_counts=True)
        raise ValueError(f"target id {ids[counts > 1][0]} appears more than once")


def _by_source(sources: Ids, targets: Ids) -> tuple[Ids, Ids]:
    # Ids have 31 bits: one number a pair sorts faster than an argsort of the sources.
    pairs = (sources << 32) | targets
    pairs.sort()
    return pairs >> 32, pairs & 0xFFFF_FFFF
