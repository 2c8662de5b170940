"""Sliding window: a token reads the last W positions, its own included."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from kvplugin.block import NULL_BLOCK
from kvplugin.managers.base import SingleTypeKVCacheManager
from kvplugin.spec import SlidingWindowSpec, cdiv


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
        behind = 1 if use_eagle and not self._drops_blindly else 0
        need = cdiv(self.kv_cache_spec.sliding_window - 1, self.block_size)
        search = _Search(
            hashes=block_hashes,
            limit=min(max_length // self.block_size + behind, len(block_hashes)),
            need=need + (1 if use_eagle else 0),
            may_end=lambda stop: (stop - behind) % unit == 0,
            indexes=[
                self.block_pool.cached_blocks(group) for group in kv_cache_group_ids
            ],
        )
        start, tails = search.last_run()
        length = len(tails[0])
        if use_eagle and length:
            length -= 1  # the block behind the hit
        length -= (start + length) % unit
        if length < 0:
            start, length = max(start + length, 0), 0
        return tuple([NULL_BLOCK] * start + tail[:length] for tail in tails)

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(num_computed_tokens - self.kv_cache_spec.sliding_window + 1, 0)

    def _keeps_all_until(self, total_computed_tokens: int) -> int:
        skipped = self.get_num_skipped_tokens(total_computed_tokens)
        next_skip = (skipped // self.block_size + 1) * self.block_size
        return next_skip + self.kv_cache_spec.sliding_window - 2


@dataclass(frozen=True, slots=True)
class _Search:
    """For the last run of cached blocks that a window can start from: it is `need`
    long, or begins the prompt."""

    hashes: Sequence[bytes]
    limit: int
    """Blocks that may be in it."""
    need: int
    may_end: Callable[[int], bool]
    """Whether a run may end before this block."""
    indexes: Sequence[dict[bytes, int]]
    """Block hash -> block, of each group."""

    def last_run(self) -> tuple[int, list[list[int]]]:
        """Its first block's number, and the blocks, a list a group."""
        # Dense groups have mostly cut the prompt to where all of it is cached.
        if self.need and self.may_end(self.limit):
            start = max(self.limit - self.need, 0)
            tails = self._blocks(start, self.limit)
            if not any(None in tail for tail in tails):
                return start, tails
        start, stop = self._scan()
        return start, self._blocks(start, stop)

    def _blocks(self, start: int, stop: int) -> list[list[int]]:
        hashes = self.hashes[start:stop]
        return [cast("list[int]", [*map(index.get, hashes)]) for index in self.indexes]

    def _scan(self) -> tuple[int, int]:
        stop = 0
        for i in range(self.limit - 1, -1, -1):
            block_hash = self.hashes[i]
            if any(block_hash not in index for index in self.indexes):
                stop = 0
            elif stop or self.may_end(i + 1):
                stop = stop or i + 1
                if stop - i >= self.need:
                    return i, stop
        return 0, stop
