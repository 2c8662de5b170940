"""The event that tells which blocks of a row can now be hit."""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from kvplugin.block_pool import BlockPool
from kvplugin.events import BlockStored, external_hash
from kvplugin.hashing.identity import embeds_digest, media_between
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
        extra_keys=[_extra_keys(request, (start + i) * size, size) for i in given],
        group_idx=group.kv_cache_group_id,
        kv_cache_spec_kind=group.kind,
        kv_cache_spec_sliding_window=getattr(
            group.kv_cache_spec, "sliding_window", None
        ),
    )


def _extra_keys(request: RequestLike, start: int, size: int) -> tuple[Any, ...] | None:
    """What the hash of the block at token `start` covers besides tokens, in the
    untagged shape that vLLM publishes."""
    keys: list[Any] = []
    if request.lora_request is not None:
        keys.append(request.lora_request.lora_name)
    keys += media_between(request.mm_features, start, start + size)
    if not start and request.cache_salt:
        keys.append(request.cache_salt)
    if request.prompt_embeds is not None:
        keys.append(embeds_digest(request, start, start + size))
    return tuple(keys) or None
