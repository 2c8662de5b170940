"""Managers and requests for tests of explanations."""

from collections.abc import Sequence
from typing import Any

from kvplugin.explain import GroupExplanation, LookupExplanation, LookupHistory
from kvplugin.hashing import get_hash_format
from kvplugin.hooks import Hooks
from kvplugin.manager import KVCacheManager
from kvplugin.request import Request
from kvplugin.spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

BLOCK = 16
FORMAT = get_hash_format()
SHAPE: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": "bfloat16"}


def full(block_size: int = BLOCK) -> KVCacheSpec:
    return FullAttentionSpec(block_size=block_size, **SHAPE)


def window(tokens: int = 32, block_size: int = BLOCK) -> KVCacheSpec:
    return SlidingWindowSpec(block_size=block_size, sliding_window=tokens, **SHAPE)


def chunked(tokens: int = 32, block_size: int = BLOCK) -> KVCacheSpec:
    return ChunkedLocalAttentionSpec(
        block_size=block_size, attention_chunk_size=tokens, **SHAPE
    )


def mamba(mode: str = "all", block_size: int = BLOCK) -> KVCacheSpec:
    return MambaSpec(
        block_size=block_size,
        shapes=((4, 4),),
        dtypes=("float32",),
        mamba_cache_mode=mode,
    )


def make_manager(
    *specs: KVCacheSpec, num_blocks: int = 100, history: int = 0, **options: Any
) -> KVCacheManager:
    """A manager with a group a spec, and a history if it has a capacity."""
    groups = tuple(
        KVCacheGroupSpec((f"layer{i}",), spec) for i, spec in enumerate(specs)
    )
    return KVCacheManager(
        KVCacheConfig(num_blocks, (), groups),
        max_model_len=10_000,
        hash_block_size=BLOCK,
        log_stats=True,
        hooks=Hooks.of(),
        lookup_history=LookupHistory(history) if history else None,
        **options,
    )


def make_request(tokens: Sequence[int], name: str = "asks", **options: Any) -> Request:
    return Request(
        name, tokens, **{"hash_format": FORMAT, "hash_block_size": BLOCK, **options}
    )


def run(
    manager: KVCacheManager, request: Request, steps: Sequence[int] = ()
) -> list[list[int]]:
    """Admit a request, compute it, free it; the blocks that it had at the end.

    Args:
        manager: has room for it.
        request: not computed yet.
        steps: tokens of the first steps; the last one computes the rest.
    """
    manager.new_step_starts()
    blocks, hit = manager.get_computed_blocks(request)
    for n in [*steps, request.num_tokens - hit - sum(steps)]:
        assert manager.allocate_slots(request, n, hit, blocks if hit else None)
        request.num_computed_tokens += hit + n
        blocks, hit = None, 0
        manager.new_step_starts()
    rows = list(manager.get_block_ids(request.request_id))
    manager.free(request)
    return rows


def evict(manager: KVCacheManager, request: Request, group: int, block: int) -> None:
    """Take one block of a request out of one group's cache."""
    single = manager.coordinator.single_type_managers[group]
    block_hash = single.coarse_hashes(request.block_hashes)[block]
    manager.evict_blocks([manager.block_pool.cached_blocks(group)[block_hash]])


def lost(explained: LookupExplanation | GroupExplanation) -> dict[str, int]:
    """Tokens by name of the reason."""
    return {reason.name: n for reason, n in explained.lost_by_reason.items()}


def check_sums(explained: LookupExplanation) -> None:
    """Losses cover what was not hit, once, in the whole and in each group."""
    for part in (explained, *explained.groups):
        at = explained.hit_tokens
        for loss in part.losses:
            assert loss.start == at < loss.stop
            at = loss.stop
        assert at == explained.queried_tokens
        assert sum(lost(part).values()) == explained.lost_tokens
