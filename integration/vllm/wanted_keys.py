"""Keys of the blocks that a waiting request of vLLM's can hit."""

from itertools import islice
from typing import Any

from kvplugin.demand import MOST_BLOCKS
from kvplugin.hashing import make_key
from kvplugin.integration.vllm.block_hashes import hashes_of


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
            hashes = hashes_of(request, self._hash_block_size, block_size)
            keys += [make_key(block_hash, group) for block_hash in islice(hashes, most)]
        return keys
