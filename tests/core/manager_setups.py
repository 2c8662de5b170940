"""Groups for tests of the manager: what they are to the model and to the manager."""

from dataclasses import dataclass
from typing import Any

from kvplugin.hashing.own import kv_sha256
from kvplugin.hooks import EvictionPolicyContext, Hooks, hookimpl
from kvplugin.manager import KVCacheManager
from kvplugin.policies.eviction import EvictionPolicy
from kvplugin.request import Request
from kvplugin.spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EngineLimits,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from tests.core.naive_manager import Group

FORMAT = kv_sha256()
HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": "bfloat16"}


def full(block_size: int = 4) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, **HEADS)


def mla(block_size: int = 4) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=block_size, **HEADS)


def sink(sink_len: int, block_size: int = 4) -> SinkFullAttentionSpec:
    return SinkFullAttentionSpec(block_size=block_size, sink_len=sink_len, **HEADS)


def window(reach: int, block_size: int = 4) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block_size, sliding_window=reach, **HEADS)


def chunk(reach: int, block_size: int = 4) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        block_size=block_size, attention_chunk_size=reach, **HEADS
    )


def cross(block_size: int = 4) -> CrossAttentionSpec:
    return CrossAttentionSpec(block_size=block_size, **HEADS)


def mamba(mode: str, block_size: int = 4, drafts: int = 0) -> MambaSpec:
    return MambaSpec(
        block_size=block_size,
        shapes=((4,),),
        dtypes=("float32",),
        mamba_cache_mode=mode,
        num_speculative_blocks=drafts,
    )


def model_of(spec: KVCacheSpec) -> Group:
    """The group as the model knows it."""
    size = spec.block_size
    match spec:
        case SlidingWindowSpec():
            return Group("window", size, spec.sliding_window)
        case ChunkedLocalAttentionSpec():
            return Group("chunk", size, spec.attention_chunk_size)
        case MambaSpec(mamba_cache_mode="align"):
            return Group("last_state", size, drafts=spec.num_speculative_blocks)
        case MambaSpec():
            return Group("state", size, drafts=spec.num_speculative_blocks)
    return Group("full", size)


class PolicyPlugin:
    """Makes one pool's policy."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy

    @hookimpl
    def kvp_make_eviction_policy(self, ctx: EvictionPolicyContext) -> EvictionPolicy:
        return self._policy


@dataclass(frozen=True)
class Setup:
    """A manager to be made."""

    specs: tuple[KVCacheSpec, ...]
    num_blocks: int = 40
    hash_block_size: int = 4
    max_model_len: int = 64
    budget: int | None = None
    drafts: bool = False

    def manager(
        self, policy: EvictionPolicy | None = None, **options: Any
    ) -> KVCacheManager:
        """One whose blocks are ranked by this policy; LRU if None."""
        groups = tuple(
            KVCacheGroupSpec((f"layer{i}",), spec) for i, spec in enumerate(self.specs)
        )
        return KVCacheManager(
            KVCacheConfig(self.num_blocks, (), groups),
            self.max_model_len,
            self.hash_block_size,
            use_eagle=self.drafts,
            limits=self.budget
            and EngineLimits(
                max_model_len=self.max_model_len, max_num_batched_tokens=self.budget
            ),
            hooks=Hooks.of() if policy is None else Hooks.of(PolicyPlugin(policy)),
            **options,
        )

    def request(self, name: str, tokens: Any, **identity: Any) -> Request:
        return Request(
            name,
            list(tokens),
            hash_format=FORMAT,
            hash_block_size=self.hash_block_size,
            **identity,
        )
