"""Keys of the blocks that a waiting request of vLLM's can hit."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

from vllm.v1.core import kv_cache_utils

from kvplugin.demand import MOST_BLOCKS
from kvplugin.hashing import make_key


class WantedKeys:
    """A `kvplugin.demand.KeysOf`: all tokens but the last, in all groups.

    Args:
        manager: vLLM's `KVCacheManager`.
    """

    def __init__(self, manager: Any) -> None:
        self._hash_block_size = manager.block_pool.hash_block_size
        self._block_sizes = [
            group.block_size for group in manager.coordinator.single_type_managers
        ]

    def __call__(self, request: Any) -> list[bytes]:
        keys: list[bytes] = []
        if request.skip_reading_prefix_cache:
            return keys
        for group, block_size in enumerate(self._block_sizes):
            most = min((request.num_tokens - 1) // block_size, MOST_BLOCKS)
            hashes = islice(self._hashes(request, block_size), most)
            keys += [make_key(block_hash, group) for block_hash in hashes]
        return keys

    def _hashes(self, request: Any, block_size: int) -> Iterable[bytes]:
        hashes: Iterable[bytes] = request.block_hashes
        if block_size == self._hash_block_size:
            return hashes
        view = kv_cache_utils.BlockHashListWithBlockSize
        coarse: Iterable[bytes] = view(hashes, self._hash_block_size, block_size)
        return coarse
