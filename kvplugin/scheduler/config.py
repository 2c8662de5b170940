"""Settings of the scheduler."""

from typing import Final, Literal

import msgspec

from kvplugin.errors import check_ranges


class SchedulerConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Names and meaning are vLLM's where it has the setting."""

    max_num_batched_tokens: int = 8192
    """Tokens that one step computes at most."""
    max_num_seqs: int = 256
    """Requests that run at most."""
    policy: Literal["fcfs", "priority"] = "fcfs"
    """Who is admitted first, and who loses its blocks last."""
    long_prefill_token_threshold: int = 0
    """Tokens of one request that a step computes at most; 0 for no limit."""
    num_lookahead_tokens: int = 0
    """Slots that a draft model writes beyond a step's tokens."""
    scheduler_reserve_full_isl: bool = True
    """Admit a request only if its whole prompt fits, not just the first chunk."""
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    """What becomes of a request whose external tokens did not arrive."""
    load_timeout_s: float = 60.0
    """Seconds after which a load is overdue: its request goes on without it."""
    max_overdue_fraction: float = 0.1
    """Share of the pool that overdue loads may hold; above it, no new loads."""
    pipeline_depth: int = 1
    """Steps that are scheduled before the first one's output is known, 1 or 2."""

    def __post_init__(self) -> None:
        """Refuse what cannot work, naming the key.

        Raises:
            ConfigError: a value is out of its range.
        """
        check_ranges(self, _RANGES)


_RANGES: Final = {
    "max_num_batched_tokens": (1, 2**31),
    "max_num_seqs": (1, 2**31),
    "long_prefill_token_threshold": (0, 2**31),
    "num_lookahead_tokens": (0, 2**16),
    "load_timeout_s": (0.001, 86_400),
    "max_overdue_fraction": (0, 1),
    "pipeline_depth": (1, 2),
}
