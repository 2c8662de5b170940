"""Full attention: every later token reads every block."""

from collections.abc import Iterable, Sequence
from itertools import islice

from kvplugin.block import NULL_BLOCK
from kvplugin.block_pool import BlockPool
from kvplugin.managers.base import NEVER, ManagerSettings, SingleTypeKVCacheManager
from kvplugin.spec import SinkFullAttentionSpec


class FullAttentionManager(SingleTypeKVCacheManager):
    """Dense attention, MLA included: a hit is a prefix without a gap."""

    kind = "full_attention"
    allows_context_parallel = True
    hits_are_downward_closed = True

    def find_longest_cache_hit(
        self,
        block_hashes: Sequence[bytes],
        max_length: int,
        kv_cache_group_ids: Sequence[int],
        alignment_tokens: int,
        use_eagle: bool = False,
    ) -> tuple[list[int], ...]:
        limit = max_length // self.block_size
        if use_eagle and not self._drops_blindly:
            limit += 1
        unit = alignment_tokens // self.block_size
        rows = tuple(
            [
                self._prefix(islice(block_hashes, limit), group)
                for group in kv_cache_group_ids
            ]
        )
        length = min(map(len, rows)) - (1 if use_eagle else 0)
        length = max(length - length % unit, 0)
        for row in rows:
            del row[length:]
        return rows

    def _prefix(self, hashes: Iterable[bytes], group: int) -> list[int]:
        find = self.block_pool.cached_blocks(group).get
        row = []
        for block_hash in hashes:
            block = find(block_hash)
            if block is None:
                break
            row.append(block)
        return row

    def _keeps_all_until(self, total_computed_tokens: int) -> int:
        del total_computed_tokens
        return NEVER

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """Leading blocks that as many requests hold as have blocks at all."""
        holders = len(self.req_to_blocks)
        common = 0
        for block in self.req_to_blocks.get(running_request_id, ()):
            if block == NULL_BLOCK or self.block_pool.ref_count(block) != holders:
                break
            common += 1
        return common


class MLAManager(FullAttentionManager):
    """Multi-head latent attention: blocks as in full attention, other bytes in them."""

    kind = "mla_attention"


class SinkFullAttentionManager(FullAttentionManager):
    """Full attention with sink tokens that all requests share.

    The sink's blocks are taken from the pool once and stay out of it: they are
    nobody's cache and nobody's use, so usage can be 0 and a reset succeed (in vLLM
    0.19.1 neither can).
    """

    kind = "sink_full_attention"
    kv_cache_spec: SinkFullAttentionSpec

    def __init__(
        self,
        kv_cache_spec: SinkFullAttentionSpec,
        block_pool: BlockPool,
        settings: ManagerSettings,
    ) -> None:
        super().__init__(kv_cache_spec, block_pool, settings)
        self.sink_blocks = block_pool.reserve(
            kv_cache_spec.sink_len // kv_cache_spec.block_size
        )
