"""What a step leaves of windows and recurrent states that can be stored."""

from collections.abc import Sequence

from kvplugin.connectors.coverage import State
from kvplugin.connectors.offload.admissions import Admission
from kvplugin.connectors.offload.chunks import Chunking
from kvplugin.contract import ScheduledRequest


def left_by(
    step: ScheduledRequest, admission: Admission, cut: Chunking, end: int
) -> dict[int, int]:
    """Engine blocks of one group that are whole after the step and still there, by
    their number in the request.

    Args:
        step: the request's part of it.
        admission: with the row as it is in this step; moves on in it.
        cut: a group that is not dense.
        end: tokens up to which blocks may be stored.
    """
    if isinstance(cut.coverage, State):
        found = _states(step, admission, cut, end)
    else:
        found = _window(step, admission, cut, end)
    return {number: block for number, block in found.items() if block}


def _window(
    step: ScheduledRequest, admission: Admission, cut: Chunking, end: int
) -> dict[int, int]:
    alive = cut.coverage.alive(step.num_computed_tokens)
    first = max(admission.next_chunk[cut.index], alive)
    admission.next_chunk[cut.index] = last = max(first, end // cut.tokens)
    return {number: admission.block(cut, number) for number in range(first, last)}


def _states(
    step: ScheduledRequest, admission: Admission, cut: Chunking, end: int
) -> dict[int, int]:
    size = cut.group.block_size
    after = step.num_tokens_after
    numbers: Sequence[int] = ()
    if cut.group.state_every_block:
        numbers = range(cut.coverage.alive(step.num_computed_tokens), end // size)
    elif after <= end and after % size == 0:
        numbers = (after // size - 1,)
    found = {number: admission.block(cut, number) for number in numbers}
    for state in step.states:
        tokens = state.num_tokens
        if state.group == cut.index and tokens <= end and tokens % size == 0:
            found[tokens // size - 1] = state.block
    chosen = admission.checkpoints.get(cut.index)
    if chosen is None:
        return found
    return {n: block for n, block in found.items() if (n + 1) * size in chosen}
