"""What a pool of blocks can serve, in figures that agree with each other."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvplugin.groups.memory import (
    blocks_per_request,
    bytes_per_block,
    reserved_blocks,
)
from kvplugin.spec import EngineLimits, KVCacheConfig, KVCacheGroupSpec


@dataclass(frozen=True)
class Capacity:
    """Capacity of one worker's pool."""

    num_blocks: int
    """Blocks of the pool, the null block included."""
    usable_blocks: int
    """Blocks that requests can have: neither the null block nor one of a sink."""
    bytes_per_block: int
    blocks_per_request: int
    """Most blocks that a request of `max_model_len` tokens holds at one time."""
    max_model_len: int
    max_concurrency: float
    """Requests of `max_model_len` tokens at once; infinite without KV cache."""
    num_tokens: int
    """Tokens of those requests. Of shorter ones it may be fewer or more."""
    min_blocks_per_request: int
    """Blocks of a request of one token: no request takes less."""
    padding_bytes_per_block: int
    """Bytes of a block that hold no data, at most: padded pages and groups with fewer
    layers than the largest."""

    @property
    def min_footprint(self) -> float:
        """Part of the usable pool that a request of one token takes; infinite where
        the pool has no usable block."""
        if not self.usable_blocks:
            return math.inf if self.min_blocks_per_request else 0.0
        return self.min_blocks_per_request / self.usable_blocks

    def lines(self) -> list[str]:
        """The report, to be logged at start."""
        size = self.min_blocks_per_request * self.bytes_per_block
        return [
            f"KV cache size: {self.num_tokens:,} tokens in {self.num_blocks:,} blocks "
            f"of {self.bytes_per_block:,} bytes",
            f"Maximum concurrency for {self.max_model_len:,} tokens per request: "
            f"{self.max_concurrency:.2f}x",
            f"Minimum footprint of a 1-token request: {self.min_blocks_per_request:,} "
            f"blocks, {size:,} bytes ({self.min_footprint:.2%} of the pool)",
        ]


def get_capacity(config: KVCacheConfig, limits: EngineLimits) -> Capacity:
    """Capacity of a worker with this configuration.

    Tokens are concurrency times length, as in vLLM 0.32; `vllm019_token_count` is what
    0.19 logs.
    """
    groups = config.kv_cache_groups
    per_request = blocks_per_request(groups, limits)
    usable = max(config.num_blocks - reserved_blocks(groups, limits), 0)
    concurrency = usable / per_request if per_request else math.inf
    return Capacity(
        num_blocks=config.num_blocks,
        usable_blocks=usable,
        bytes_per_block=bytes_per_block(groups),
        blocks_per_request=per_request,
        max_model_len=limits.max_model_len,
        max_concurrency=concurrency,
        num_tokens=usable * limits.max_model_len // per_request if per_request else 0,
        min_blocks_per_request=min_blocks_per_request(groups, limits),
        padding_bytes_per_block=_padding(groups),
    )


def min_blocks_per_request(
    groups: Sequence[KVCacheGroupSpec], limits: EngineLimits
) -> int:
    """Blocks that a request of one token takes."""
    return sum(group.kv_cache_spec.min_blocks_per_request(limits) for group in groups)


def vllm019_token_count(config: KVCacheConfig, limits: EngineLimits) -> int:
    """Tokens as vLLM 0.19.1 logs them: the pool split evenly between the groups.

    Wrong by far where groups keep only a window; for comparison with old logs.
    """
    groups = config.kv_cache_groups
    block_size = min(group.kv_cache_spec.block_size for group in groups)
    share = config.num_blocks // len(groups)
    return share * block_size * limits.context_parallel_size


def _padding(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Bytes without data in a block of the group that has least data."""
    block = bytes_per_block(groups)
    return max((block - group.data_bytes_per_block for group in groups), default=0)
