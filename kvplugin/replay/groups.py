"""Which KV cache groups a replay serves, and in which blocks requests are hashed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, lcm
from pathlib import Path
from typing import Final

from kvplugin.groups import GroupingConfig, align_mamba_specs
from kvplugin.hashing import coarse_hashes, make_key
from kvplugin.hooks import Hooks
from kvplugin.plan import CacheOptions, ModelShape, layers_of, load_model
from kvplugin.replay.model_file import read_model
from kvplugin.replay.settings import ReplaySettings
from kvplugin.replay.trace import Trace
from kvplugin.request import RequestLike
from kvplugin.spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    SlidingWindowSpec,
    cdiv,
    layer_spec,
)

STEP_TOKENS: Final = 8192
"""Tokens of a prefill step where groups give blocks back on the way; vLLM's default
`max_num_batched_tokens`."""

_KEYED_SPECS: Final = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)

_SPARE: Final = 2
"""Blocks that a group may hold beside those of a request's tokens: states have some."""

_STATE_MODE: Final = "align"
"""The mode of recurrent layers that vLLM caches prefixes with by default."""

_CHUNK: Final = 256
"""Tokens of the recurrent kernel's chunk, as `plan_model` has it."""


@dataclass(frozen=True)
class ServedGroups:
    """The groups of a replay."""

    groups: tuple[KVCacheGroupSpec, ...]
    hash_block_size: int
    """Tokens of a block hash, which a reported block is."""
    max_model_len: int
    """Tokens of the longest request, and one more."""

    @cached_property
    def is_dense(self) -> bool:
        """Whether there is one group, and it keeps every block."""
        group = self.groups[0]
        return len(self.groups) == 1 and all(
            isinstance(layer_spec(group.kv_cache_spec, name), FullAttentionSpec)
            for name in group.layer_names
        )

    @cached_property
    def is_attention(self) -> bool:
        """Whether every block of every group gets a key when it is computed: no
        recurrent states."""
        return all(
            isinstance(layer_spec(group.kv_cache_spec, name), _KEYED_SPECS)
            for group in self.groups
            for name in group.layer_names
        )

    @cached_property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens of a block of each group."""
        return tuple(group.kv_cache_spec.block_size for group in self.groups)

    def most_blocks(self, hashes: int) -> int:
        """Blocks that a request of so many hashes takes if no group gives one back."""
        tokens = hashes * self.hash_block_size
        blocks = sum(cdiv(tokens, size) for size in self.block_sizes)
        return blocks if self.is_dense else blocks + _SPARE * len(self.groups)

    def pool_keys(self, hashes: Sequence[bytes]) -> list[bytes]:
        """The keys of a request's blocks in all groups."""
        size = self.hash_block_size
        keys = []
        for number, own in enumerate(self.block_sizes):
            names = hashes if own == size else coarse_hashes(hashes, size, own, "last")
            keys += [make_key(name, number) for name in names]
        return keys

    def wanted_keys(self, request: RequestLike) -> list[bytes]:
        """Those of them that its lookup can hit."""
        blocks = (request.num_prompt_tokens - 1) // self.hash_block_size
        return self.pool_keys(request.block_hashes[:blocks])

    def step_ends(self, start: int, total: int) -> Sequence[int]:
        """Where the steps of a prefill of tokens [start, total) end.

        Dense groups keep what they get, so one step is as good as many; others take
        steps, the last but one of which ends at the last common block boundary.
        """
        if self.is_dense or start >= total:
            return (total,)
        unit = lcm(*self.block_sizes)
        stride = max(STEP_TOKENS // unit, 1) * unit
        ends = set(range(stride, total, stride)) | {total // unit * unit, total}
        return sorted(end for end in ends if end > start)


def _model(name: str) -> ModelShape:
    is_file = name.endswith(".json")
    return read_model(Path(name)) if is_file else load_model(name)


def served_groups(trace: Trace, settings: ReplaySettings, hooks: Hooks) -> ServedGroups:
    """One group of full attention, or those of the model that is named.

    Raises:
        ConfigError: there is no such model, or its layers are not known or cannot be
            grouped.
        PluginError: a plugin fails.
    """
    block_size = settings.block_size or trace.block_size
    covered = max(len(entry.ids) for entry in trace.entries) * trace.block_size
    max_model_len = covered + 1
    if settings.model is None:
        spec = FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=1, dtype="bfloat16"
        )
        groups = [KVCacheGroupSpec(("layer",), spec)]
        return ServedGroups(tuple(groups), block_size, max_model_len)
    options = CacheOptions(block_size=block_size, mamba_cache_mode=_STATE_MODE)
    specs = align_mamba_specs(
        layers_of(_model(settings.model), options),
        max_model_len=max_model_len,
        mamba_chunk_size=_CHUNK,
    )
    config = GroupingConfig(max_model_len=max_model_len, pad_page_sizes=True)
    groups = hooks.group_layers(specs, config)
    sizes = [group.kv_cache_spec.block_size for group in groups]
    return ServedGroups(tuple(groups), gcd(trace.block_size, *sizes), max_model_len)
