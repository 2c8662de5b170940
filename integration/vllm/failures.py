"""What becomes of a load that failed, by vLLM's version and the model's groups.

Block ids serve one group of full attention alone: vLLM goes back to the first bad block
and computes on in the same row. In a row of a window or of states that entry may be the
null block, and with several groups an id names none of them.

One table: the connector picks its channel from it, `kvplugin doctor` prints it, and
`docs/failed-loads.md` is compared with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from kvplugin.contract import GroupKind
from kvplugin.integration.vllm.environment import is_disabled
from kvplugin.integration.vllm.policy_config import (
    SCHEDULER_CLASS,
    read_policy_config,
)
from kvplugin.integration.vllm.versions import has_standard_views


class Channel(StrEnum):
    """How a worker says that a load failed."""

    BLOCKS = "block ids"
    """`get_block_ids_with_load_errors`: the blocks before the first one that failed
    are kept."""
    REQUESTS = "request ids"
    """`get_transfer_results`: nothing of the load is kept."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class FailedLoads:
    """One row: a kind of engine, and what its users see."""

    vllm: str
    groups: str
    scheduler: str
    """Which scheduler class the row is about."""
    channel: Channel
    recompute: str
    """Under `kv_load_failure_policy="recompute"`."""
    fail: str
    """Under "fail"."""


_DENSE: Final = "one, of full attention"
_OTHER: Final = "windows, states, or several"
_ANY: Final = "any"
_VLLMS: Final = "vLLM's"
_OURS: Final = "`KVPluginScheduler`"
_ERROR: Final = 'the request ends, `finish_reason="error"`'
_ENDS: Final = "tried again three times, then the engine ends with an error"

MATRIX: Final = (
    FailedLoads(
        "0.19.1",
        _DENSE,
        _ANY,
        Channel.BLOCKS,
        "computed from the first block that failed",
        _ERROR,
    ),
    FailedLoads("0.19.1", _OTHER, _VLLMS, Channel.NONE, _ENDS, _ENDS),
    FailedLoads(
        "0.19.1",
        _OTHER,
        _OURS,
        Channel.BLOCKS,
        "looked up again and computed",
        _ERROR,
    ),
    FailedLoads(
        "0.32",
        _DENSE,
        _ANY,
        Channel.BLOCKS,
        "computed from the first block that failed",
        _ERROR,
    ),
    FailedLoads(
        "0.32",
        _OTHER,
        _ANY,
        Channel.REQUESTS,
        "looked up again and computed",
        _ERROR,
    ),
)


def failed_loads(is_dense: bool, own_scheduler: bool, by_request: bool) -> FailedLoads:
    """The row of an engine.

    Args:
        is_dense: the model has one KV cache group, of full attention or MLA.
        own_scheduler: `KVPluginScheduler` is its scheduler, with
            `protect_from_failed_loads`.
        by_request: its vLLM takes request ids.
    """
    groups = _DENSE if is_dense else _OTHER
    schedulers = {_ANY, _OURS if own_scheduler else _VLLMS}
    (row,) = (
        row
        for row in MATRIX
        if row.groups == groups
        and row.scheduler in schedulers
        and (row.vllm == "0.32") == by_request
    )
    return row


def failed_loads_of(vllm_config: Any, kinds: Sequence[GroupKind]) -> FailedLoads:
    """The row of this engine, as vLLM's configuration has it.

    Args:
        vllm_config: vLLM's.
        kinds: of the model's KV cache groups.
    """
    is_dense = len(kinds) == 1 and kinds[0] in (GroupKind.FULL, GroupKind.MLA)
    return failed_loads(is_dense, _protects(vllm_config), has_standard_views())


def _protects(vllm_config: Any) -> bool:
    """Whether the scheduler is `KVPluginScheduler` and undoes failed loads."""
    chosen = vllm_config.scheduler_config.scheduler_cls
    if isinstance(chosen, type):
        chosen = f"{chosen.__module__}.{chosen.__qualname__}"
    if chosen != SCHEDULER_CLASS or is_disabled():
        return False
    return read_policy_config(vllm_config.additional_config).protect_from_failed_loads
