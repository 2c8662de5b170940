"""KV events: what a pool tells the outside about the keys it holds.

Field names, order, tags and defaults are those of vLLM 0.32's
`vllm/distributed/kv_events.py`, so that a batch encoded here decodes there and in
the routers that read it. Block hashes go out as the low 64 bits of the hash, vLLM's
default.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

MEDIUM_GPU: Final = "GPU"
MEDIUM_CPU: Final = "CPU"

_MASK_64: Final = (1 << 64) - 1


class KVCacheEvent(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Base of all events."""


class BlockStored(KVCacheEvent, frozen=True):
    """Blocks can now be hit.

    `token_ids` covers the whole span of the call; a group that keeps only part of it
    (windows, states) names fewer `block_hashes` than the span has blocks, and says
    what it is in `kv_cache_spec_kind`.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent, frozen=True):
    """Blocks can no longer be hit."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent, frozen=True):
    """Every key is gone."""


def external_hash(block_hash: bytes) -> int:
    """The low 64 bits of a block hash, as events carry it."""
    return int.from_bytes(block_hash, "big") & _MASK_64


def stored_event(
    hashes: Sequence[bytes],
    parent: bytes | None,
    token_ids: Sequence[int],
    block_size: int,
    medium: str,
    group: int,
) -> BlockStored:
    """Of blocks behind `parent` (None at the start), without anything of a request."""
    return BlockStored(
        block_hashes=[external_hash(block_hash) for block_hash in hashes],
        parent_block_hash=None if parent is None else external_hash(parent),
        token_ids=list(token_ids),
        block_size=block_size,
        lora_id=None,
        medium=medium,
        lora_name=None,
        group_idx=group,
    )


def removed_events(
    lost: Iterable[tuple[int, bytes]], medium: str
) -> list[BlockRemoved]:
    """One for each (group, block hash)."""
    return [
        BlockRemoved([external_hash(block_hash)], medium, group)
        for group, block_hash in lost
    ]
