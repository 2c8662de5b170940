"""What a scheduling step says to the workers, and what they say back.

Field names are those of vLLM 0.19.1 (`v1/core/sched/output.py`, `v1/outputs.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvplugin.contract import WorkerOutcome

BlockIds = tuple[list[int], ...]
"""Block ids, a list a group."""


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """A request that the workers have not seen, or not since it lost its blocks."""

    req_id: str
    token_ids: Sequence[int]
    """Prompt, and output so far of one that was preempted."""
    block_ids: BlockIds
    """Its whole rows."""
    num_computed_tokens: int
    """Tokens whose KV is in the rows: local and external hits."""


@dataclass(frozen=True, slots=True)
class CachedRequestData:
    """A request that the workers know."""

    req_id: str
    new_block_ids: BlockIds | None
    """What its rows grew by, None for nothing; replaces them if `resumed`."""
    num_computed_tokens: int
    resumed: bool = False
    """It was preempted, and `new_block_ids` are its whole new rows."""
    token_ids: Sequence[int] | None = None
    """Of one that resumed: all its tokens (workers may have sampled one that was
    discarded)."""


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step."""

    step: int
    """Its number, counting from 1."""
    scheduled_new_reqs: Sequence[NewRequestData] = ()
    scheduled_cached_reqs: Sequence[CachedRequestData] = ()
    num_scheduled_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens to compute, drafts included, by request, in the order of the batch."""
    scheduled_spec_decode_tokens: Mapping[str, Sequence[int]] = field(
        default_factory=dict
    )
    """Drafts to verify, the last of a request's scheduled tokens."""
    num_common_prefix_blocks: Sequence[int] = ()
    """Of each group the leading blocks that all running requests share."""
    new_block_ids_to_zero: Sequence[int] = ()
    preempted_req_ids: frozenset[str] = frozenset()
    """Preempted since the last step."""
    finished_req_ids: frozenset[str] = frozenset()
    """Ended since the last step: workers forget them."""
    connector_plan: bytes = b""
    """For the connector's worker halves."""

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(self.num_scheduled_tokens.values())


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """What came of a step."""

    step: int
    """The number of the `SchedulerOutput` that was executed."""
    sampled_token_ids: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """New tokens by request, accepted drafts first; none while a prompt is not done.
    Of requests of that step only, ended ones too."""
    draft_token_ids: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Drafts proposed after these tokens, by request. With two steps in flight the
    first ones are stale; from then on the request waits for its drafts."""
    outcomes: Sequence[WorkerOutcome] = ()
    """What the connector's worker halves said, one a rank; nothing without one."""
    invalid_block_ids: frozenset[int] = frozenset()
    """Blocks that a synchronous load was to fill and did not."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """News of one request for its user."""

    req_id: str
    new_token_ids: Sequence[int] = ()
    finish_reason: str | None = None
    """stop, length, abort or error; None while it goes on."""
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed, from first admission."""
    kv_transfer_params: Mapping[str, Any] | None = None
    """What a connector hands over when it ends, for whoever is to go on with it."""
