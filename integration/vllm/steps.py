"""What vLLM's scheduler decided for a step, in the contract's terms."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvplugin.contract import (
    ScheduledRequest,
    SchedulerHalf,
    StateBlock,
    Step,
)


def step(half: SchedulerHalf, block_sizes: Sequence[int], output: Any) -> Step:
    """The part of a `SchedulerOutput` that `half` watches.

    Args:
        half: the scheduler half that is to hear of it.
        block_sizes: tokens of a block of each group.
        output: vLLM's.
    """
    watched, counts = half.watched, output.num_scheduled_tokens
    scheduled = []
    if watched:
        states = _states(block_sizes, output)
        for new in output.scheduled_new_reqs:
            if new.req_id in watched:
                scheduled.append(
                    ScheduledRequest(
                        new.req_id,
                        (),
                        new.num_computed_tokens,
                        counts[new.req_id],
                        states.get(new.req_id, ()),
                    )
                )
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            if request_id in watched:
                resumed = request_id in cached.resumed_req_ids
                scheduled.append(
                    ScheduledRequest(
                        request_id,
                        () if resumed else cached.new_block_ids[i] or (),
                        cached.num_computed_tokens[i],
                        counts[request_id],
                        states.get(request_id, ()),
                    )
                )
    return Step(
        scheduled,
        output.preempted_req_ids or (),
        output.total_num_scheduled_tokens,
    )


def _states(
    block_sizes: Sequence[int], output: Any
) -> Mapping[str, Sequence[StateBlock]]:
    """Recurrent states by request that their rows do not name for certain (0.32).

    Those inside a block are left out: no boundary that is offered ends there.
    """
    offered = getattr(output, "kv_connector_block_state", None)
    if offered is None or not offered.boundary_state_offloads:
        return {}
    return {
        request_id: [
            StateBlock(group, num_tokens, block)
            for group, block, num_tokens in states
            if num_tokens % block_sizes[group] == 0
        ]
        for request_id, states in offered.boundary_state_offloads.items()
    }
