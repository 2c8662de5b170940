"""The keys of the offload connector's configuration."""

from typing import Any, Final, Literal

import msgspec

from kvplugin.errors import check_ranges
from kvplugin.events import MEDIUM_CPU
from kvplugin.hooks import EvictionPolicyContext, OffloadPolicyContext, get_hooks
from kvplugin.policies.eviction import EvictionPolicy
from kvplugin.policies.offload import OffloadPolicy


class OffloadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `KVPluginOffloadConnector`; names are vLLM's where vLLM has them."""

    cpu_bytes_to_use: int | float
    """Host memory for KV in bytes, per engine: all its ranks together. Required."""
    eviction_policy: str = "lru"
    """Which blocks leave host memory first. Not one that needs the keys that waiting
    requests want (`queue`): those are followed for the engine's own blocks only."""
    eviction_policy_options: dict[str, Any] = {}
    """What the eviction policy may be told; the default one takes nothing."""
    offload_policy: str = "all"
    """Which blocks are stored in host memory at all."""
    offload_policy_options: dict[str, Any] = {}
    """What the offload policy may be told; the default one takes nothing."""
    blocks_per_chunk: int = 1
    """Engine blocks of a prefix that are stored, kept and evicted as one; those of
    windows and states are kept one by one."""
    offload_prompt_only: bool = True
    """Store blocks of prompts only, not those that generation fills."""
    min_load_tokens: int | None = None
    """Fewer tokens than this are recomputed, not loaded. Default: one block, where
    groups differ in block size the least common multiple."""
    copy_wait_ms: float = 2.0
    """How long a step waits for its copies before they go on beside it."""
    lookup_wait_ms: float = 1000.0
    """How long a request waits for a store or load that would give it a hit."""
    transfer_timeout_s: float = 30.0
    """After so long a load's request is told that it failed, and nobody waits for a
    store any more. What they use stays theirs until they end."""
    max_overdue_fraction: float = 0.1
    """With a larger share of the engine's blocks in overdue transfers, nothing is
    offered or stored."""
    weight_epoch: int = 0
    """Of the weights under this model's name and revision, part of the identity of
    what is stored: ranks that were started with different ones refuse to copy."""
    on_start_error: Literal["fail", "disable"] = "fail"
    """If the connector cannot start: end the engine, or run it without offload."""

    def __post_init__(self) -> None:
        check_ranges(self, _LIMITS)
        # These refuse unknown names and options.
        self.make_eviction_policy(_ANY_SIZE)
        self.make_offload_policy(_ANY_SIZE)

    def make_eviction_policy(self, num_blocks: int) -> EvictionPolicy:
        """A fresh eviction policy for a host tier of this many slots.

        Raises:
            ConfigError: no policy has this name, or it refuses the options.
            PluginError: the plugin that makes it fails.
        """
        return get_hooks().make_eviction_policy(
            EvictionPolicyContext(
                name=self.eviction_policy,
                options=self.eviction_policy_options,
                num_blocks=num_blocks,
                medium=MEDIUM_CPU,
            )
        )

    def make_offload_policy(self, num_blocks: int) -> OffloadPolicy:
        """A fresh offload policy for a host tier of this many slots.

        Raises:
            ConfigError: no policy has this name, or it refuses the options.
            PluginError: the plugin that makes it fails.
        """
        return get_hooks().make_offload_policy(
            OffloadPolicyContext(
                name=self.offload_policy,
                options=self.offload_policy_options,
                num_blocks=num_blocks,
                medium=MEDIUM_CPU,
            )
        )


_ANY_SIZE: Final = 2
"""Of a policy that is made to see whether it can be made."""
_HOUR_MS = 3_600_000
_LIMITS = {
    "cpu_bytes_to_use": (1, 2**60),
    "blocks_per_chunk": (1, 2**20),
    "min_load_tokens": (1, 2**40),
    "copy_wait_ms": (0, _HOUR_MS),
    "lookup_wait_ms": (0, _HOUR_MS),
    "transfer_timeout_s": (0.001, _HOUR_MS),
    "max_overdue_fraction": (0, 1),
    "weight_epoch": (0, 2**60),
}
