"""KV events of the host tier: in the terms of the engine's own."""

from typing import Final

from kvplugin.connectors.offload.chunks import Chunk, Chunking
from kvplugin.contract import GroupKind
from kvplugin.events import MEDIUM_CPU, BlockStored, external_hash
from kvplugin.hashing import split_key

_KINDS: Final = {
    GroupKind.FULL: "full_attention",
    GroupKind.MLA: "mla_attention",
    GroupKind.SLIDING_WINDOW: "sliding_window",
    GroupKind.CHUNKED_LOCAL: "chunked_local_attention",
    GroupKind.MAMBA: "mamba",
}
"""As the managers of the engine's own blocks call themselves in events."""


def stored_event(cut: Chunking, chunk: Chunk) -> BlockStored:
    """The chunk can be hit in host memory. Without its tokens: this side knows the
    hashes only."""
    group = cut.group
    return BlockStored(
        block_hashes=[_external(chunk.key)],
        parent_block_hash=None if chunk.parent is None else _external(chunk.parent),
        token_ids=[],
        block_size=cut.tokens,
        lora_id=None,
        medium=MEDIUM_CPU,
        lora_name=None,
        group_idx=group.index,
        kv_cache_spec_kind=_KINDS[group.kind],
        kv_cache_spec_sliding_window=(
            group.window if group.kind is GroupKind.SLIDING_WINDOW else None
        ),
    )


def _external(key: bytes) -> int:
    return external_hash(split_key(key)[0])
