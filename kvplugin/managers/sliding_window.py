"""Sliding window: a token reads the last W positions, its own included."""

from collections.abc import Callable, Sequence

from kvplugin.block import NULL_BLOCK
from kvplugin.managers.base import SingleTypeKVCacheManager, cdiv
from kvplugin.spec import SlidingWindowSpec


class SlidingWindowManager(SingleTypeKVCacheManager):
    """After n computed tokens the next one reads positions >= n - W + 1: blocks before
    that are given back, and a hit needs only the blocks from there on."""

    kind = "sliding_window"
    kv_cache_spec: SlidingWindowSpec

    def find_longest_cache_hit(
        self,
        block_hashes: Sequence[bytes],
        max_length: int,
        kv_cache_group_ids: Sequence[int],
        alignment_tokens: int,
        use_eagle: bool = False,
    ) -> tuple[list[int], ...]:
        unit = alignment_tokens // self.block_size
        limit = max_length // self.block_size
        behind = 0  # blocks behind the hit that must be cached too
        if use_eagle and not self._drops_blindly:
            behind = 1
        start, stop = self._last_run(
            block_hashes,
            min(limit + behind, len(block_hashes)),
            kv_cache_group_ids,
            cdiv(self.kv_cache_spec.sliding_window - 1, self.block_size)
            + (1 if use_eagle else 0),
            lambda stop: (stop - behind) % unit == 0,
        )
        if use_eagle and stop:
            stop -= 1
        stop -= stop % unit
        return tuple(
            self._row(block_hashes, start, stop, group) for group in kv_cache_group_ids
        )

    def _last_run(
        self,
        hashes: Sequence[bytes],
        limit: int,
        groups: Sequence[int],
        need: int,
        may_end: Callable[[int], bool],
    ) -> tuple[int, int]:
        """The last run [start, stop) of cached blocks that is `need` long or begins
        the prompt."""
        indexes = [self.block_pool.cached_blocks(group) for group in groups]
        stop = 0
        for i in range(limit - 1, -1, -1):
            block_hash = hashes[i]
            for index in indexes:
                if block_hash not in index:
                    stop = 0
                    break
            else:
                if stop or may_end(i + 1):
                    stop = stop or i + 1
                    if stop - i >= need:
                        return i, stop
        return 0, stop

    def _row(
        self, hashes: Sequence[bytes], start: int, stop: int, group: int
    ) -> list[int]:
        index = self.block_pool.cached_blocks(group)
        start = min(start, stop)
        return [NULL_BLOCK] * start + [index[h] for h in hashes[start:stop]]

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(num_computed_tokens - self.kv_cache_spec.sliding_window + 1, 0)

    def _keeps_all_until(self, total_computed_tokens: int) -> int:
        skipped = self.get_num_skipped_tokens(total_computed_tokens)
        next_skip = (skipped // self.block_size + 1) * self.block_size
        return next_skip + self.kv_cache_spec.sliding_window - 2
