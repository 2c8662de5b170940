"""The event that tells which blocks of a row can now be hit."""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from kvplugin.block_pool import BlockPool
from kvplugin.events import BlockStored, external_hash
from kvplugin.hashing.vllm import untagged_keys
from kvplugin.request import RequestLike


class _Group(Protocol):
    """What the event says of the group."""

    kind: ClassVar[str]
    block_pool: BlockPool
    block_size: int
    kv_cache_group_id: int
    kv_cache_spec: Any


def stored_event(
    group: _Group,
    request: RequestLike,
    start: int,
    stop: int,
    given: Sequence[int],
    hashes: Sequence[bytes],
    parent: bytes | None,
) -> BlockStored:
    """One event for blocks [start, stop) of a row.

    Args:
        group: the manager.
        request: whose blocks they are.
        start: first block of the call.
        stop: behind its last block.
        given: positions, from `start`, of the blocks that were given a key.
        hashes: a hash a block of the call.
        parent: hash of the block before `start`.
    """
    size = group.block_size
    adapter = request.lora_request
    return BlockStored(
        block_hashes=[external_hash(hashes[i]) for i in given],
        parent_block_hash=None if parent is None else external_hash(parent),
        token_ids=list(request.all_token_ids[start * size : stop * size]),
        block_size=size,
        lora_id=getattr(adapter, "adapter_id", None),
        medium=group.block_pool.medium,
        lora_name=None if adapter is None else adapter.lora_name,
        extra_keys=[
            tuple(untagged_keys(request, request.mm_features, at, at + size)) or None
            for at in ((start + i) * size for i in given)
        ],
        group_idx=group.kv_cache_group_id,
        kv_cache_spec_kind=group.kind,
        kv_cache_spec_sliding_window=getattr(
            group.kv_cache_spec, "sliding_window", None
        ),
    )
