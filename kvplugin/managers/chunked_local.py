"""Chunked local attention: a token reads the positions of its own chunk only."""

from collections.abc import Sequence

from kvplugin.block import NULL_BLOCK
from kvplugin.errors import ConfigError
from kvplugin.managers.base import SingleTypeKVCacheManager
from kvplugin.spec import ChunkedLocalAttentionSpec


class ChunkedLocalAttentionManager(SingleTypeKVCacheManager):
    """Of n tokens all chunks but the last are never read again: whole chunks are hit
    for free, then cached blocks count from the last chunk's start."""

    kind = "chunked_local_attention"
    kv_cache_spec: ChunkedLocalAttentionSpec

    def find_longest_cache_hit(
        self,
        block_hashes: Sequence[bytes],
        max_length: int,
        kv_cache_group_ids: Sequence[int],
        alignment_tokens: int,
        use_eagle: bool = False,
    ) -> tuple[list[int], ...]:
        """As in the base.

        Raises:
            ConfigError: a draft model, or another group's block size.
        """
        if use_eagle:
            raise ConfigError("chunked local attention does not work with draft models")
        if alignment_tokens != self.block_size:
            raise ConfigError(
                f"chunked local attention needs every group to have its block size "
                f"{self.block_size}; hits are aligned to {alignment_tokens}"
            )
        limit = min(max_length // self.block_size, len(block_hashes))
        start = min(self.get_num_skipped_tokens(max_length) // self.block_size, limit)
        rows = tuple([NULL_BLOCK] * start for _ in kv_cache_group_ids)
        for block_hash in block_hashes[start:limit]:
            blocks = self.block_pool.get_cached_block(block_hash, kv_cache_group_ids)
            if blocks is None:
                break
            for row, block in zip(rows, blocks, strict=True):
                row.append(block)
        hit = len(rows[0]) * self.block_size
        if self.get_num_skipped_tokens(hit) // self.block_size < start:
            # It ends in the chunk before, some of whose blocks are null here.
            return self.find_longest_cache_hit(
                block_hashes, hit, kv_cache_group_ids, alignment_tokens
            )
        return rows

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        chunk = self.kv_cache_spec.attention_chunk_size
        return num_computed_tokens // chunk * chunk

    def _keeps_all_until(self, total_computed_tokens: int) -> int:
        chunk = self.kv_cache_spec.attention_chunk_size
        return self.get_num_skipped_tokens(total_computed_tokens) + chunk - 1
