"""What is different in vLLM 0.19, beside names that `translate` looks for.

It does not step an engine for a connector's sake, so what is under way when the last
request ends must end in the one step that follows. It hears a scheduler half's numbers
only beside a worker's, and in `vllm.LLM` only in steps that bring an answer. And it
leaves no room for loads that wait.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from kvplugin.contract import GroupInfo
from kvplugin.integration.vllm.versions import has_standard_views
from kvplugin.spec import cdiv


@dataclass(frozen=True, slots=True)
class StepNotes:
    """What the worker halves must know of a step, beside its plan."""

    drains: bool = False
    """It may be the last for a while: stores under way end within it."""
    tells: bool = False
    """Somebody gets an answer: numbers told now are heard."""


NO_NOTES: Final = StepNotes()
"""Of every step of 0.32."""


def step_notes(pending: bool, live: Mapping[str, Any], output: Any) -> StepNotes:
    """About a step of 0.19.

    Args:
        pending: transfers are under way.
        live: vLLM's requests that have been looked up and have not ended, by id.
        output: what the scheduler decided; nothing of it is counted as computed yet.
    """
    return StepNotes(
        drains=pending and not live,
        tells=any(
            request_id in live
            and live[request_id].num_computed_tokens + count
            >= live[request_id].num_tokens
            for request_id, count in output.num_scheduled_tokens.items()
        ),
    )


def ends_uncounted(request: Any) -> None:
    """A request ends. One whose load failed before it ran has -1 cached tokens, and
    0.19 adds that to a Prometheus counter, which ends its front end."""
    request.num_cached_tokens = max(request.num_cached_tokens, 0)


class LoadRoom:
    """Keeps loads from taking each other's room.

    A request that waits for its load, or after it, holds blocks and is never preempted,
    and 0.19 admits the next load without counting what these still need. So all of
    them together must fit the pool with their whole prompts: then the first can go on
    when those that run have ended, at the latest. Nobody overtakes one that has been
    refused, or smaller ones could keep it waiting for ever.

    Args:
        num_blocks: of the engine's pool, the null block included.
        block_sizes: tokens of a block, by group.
    """

    def __init__(self, num_blocks: int, block_sizes: Sequence[int]) -> None:
        self._usable = num_blocks - 1
        self._block_sizes = block_sizes
        self._waiting: dict[str, int] = {}
        self._next: str | None = None
        """Has been refused, and is the next to load."""

    def admits(self, request: Any) -> bool:
        """Whether a load may begin for the request; if not, then later."""
        if self._next not in (None, request.request_id):
            return False
        others = sum(self._waiting.values()) - self._waiting.get(request.request_id, 0)
        fits = not others or others + self._blocks(request) <= self._usable
        self._next = None if fits else request.request_id
        return fits

    def allocated(self, request: Any, num_external_tokens: int) -> None:
        """It has blocks: for a load, or to run."""
        if num_external_tokens:
            self._waiting[request.request_id] = self._blocks(request)
        else:
            self.leaves(request)

    def leaves(self, request: Any) -> None:
        """It does not wait any more."""
        self._waiting.pop(request.request_id, None)
        if self._next == request.request_id:
            self._next = None

    def _blocks(self, request: Any) -> int:
        # One token more: the first that it generates.
        return sum(cdiv(request.num_tokens + 1, size) for size in self._block_sizes)


def takes_states(group: GroupInfo) -> bool:
    """Whether this vLLM takes hits of a connector for a group of states: 0.19 asserts
    that there are none where a step leaves one state only."""
    return group.state_every_block or has_standard_views()


def has_unnamed_drafter(vllm_config: Any) -> bool:
    """Whether a drafter's layers are in some group that only 0.32 would name."""
    speculative = vllm_config.speculative_config
    if has_standard_views() or speculative is None:
        return False
    return bool(speculative.use_eagle())


def pages_of_states(states: Sequence[torch.Tensor]) -> torch.Tensor:
    """The pages of a recurrent layer [blocks, bytes]; 0.19 gives one view into them
    for each state, the first of which begins where the page does."""
    first = states[0]
    page = first.stride(0) * first.element_size()
    whole = torch.empty(0, dtype=torch.uint8, device=first.device)
    return whole.set_(
        first.untyped_storage(),
        first.storage_offset() * first.element_size(),
        (first.shape[0], page),
        (page, 1),
    )
