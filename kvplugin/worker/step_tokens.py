"""The tokens of a step, of which slots are made."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class StepTokens(NamedTuple):
    """The tokens of a step one after the other, request by request, on the host."""

    rows: npt.NDArray[np.int32]
    """Row of each token's request, [tokens]."""
    positions: npt.NDArray[np.int64]
    """Of each token in its request, [tokens]."""
    starts: npt.NDArray[np.int32]
    """Where each request's tokens start, and where the last's end, [requests + 1]."""


def step_tokens(
    num_computed: npt.NDArray[np.int32], num_scheduled: npt.NDArray[np.int32]
) -> StepTokens:
    """The tokens that follow the computed ones.

    Args:
        num_computed: tokens before the step, [requests].
        num_scheduled: tokens of the step, [requests].
    """
    starts = np.zeros(len(num_scheduled) + 1, np.int32)
    np.cumsum(num_scheduled, out=starts[1:])
    rows = np.repeat(np.arange(len(num_scheduled), dtype=np.int32), num_scheduled)
    first = num_computed.astype(np.int64) - starts[:-1]
    return StepTokens(rows, np.arange(starts[-1]) + first[rows], starts)
