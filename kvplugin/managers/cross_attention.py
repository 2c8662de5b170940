"""Cross attention: blocks for the encoder's tokens, private to each request."""

from collections.abc import Sequence

from kvplugin.block_pool import BlockPool
from kvplugin.errors import ConfigError
from kvplugin.managers.base import NEVER, ManagerSettings, SingleTypeKVCacheManager
from kvplugin.policies.eviction import NO_CONTEXT, BlockContext
from kvplugin.spec import KVCacheSpec


class CrossAttentionManager(SingleTypeKVCacheManager):
    """One allocation a request, sized by its encoder tokens.

    Encoder states belong to one request's input, which block hashes of the decoder's
    tokens do not cover: nothing here is ever cached.
    """

    kind = "cross_attention"
    sized_by_encoder_tokens = True

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        block_pool: BlockPool,
        settings: ManagerSettings,
    ) -> None:
        if settings.enable_caching:
            raise ConfigError(
                "models with cross-attention cannot use the prefix cache (its hashes "
                "do not cover the encoder's input): set enable_caching=False"
            )
        super().__init__(kv_cache_spec, block_pool, settings)

    def find_longest_cache_hit(
        self,
        block_hashes: Sequence[bytes],
        max_length: int,
        kv_cache_group_ids: Sequence[int],
        alignment_tokens: int,
        use_eagle: bool = False,
    ) -> tuple[list[int], ...]:
        del block_hashes, max_length, alignment_tokens, use_eagle
        return tuple([] for _ in kv_cache_group_ids)

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[int],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        ctx: BlockContext | None = NO_CONTEXT,
    ) -> None:
        """Nothing to adopt, ever."""
        del num_local_computed_tokens, num_external_computed_tokens, ctx
        self._refuse_hits(request_id, new_computed_blocks)

    def allocate_external_computed_blocks(
        self, request_id: str, num_total_computed_tokens: int
    ) -> None:
        """External tokens are the decoder's."""
        del request_id, num_total_computed_tokens

    def quiet_until(self, request_id: str, total_computed_tokens: int) -> int:
        del request_id, total_computed_tokens
        return NEVER
