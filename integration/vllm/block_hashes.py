"""Hashes of a vLLM request in the blocks of a group."""

from collections.abc import Sequence
from typing import Any

from vllm.v1.core import kv_cache_utils


def hashes_of(request: Any, hash_block_size: int, block_size: int) -> Sequence[bytes]:
    """Without group; a view, made as it is read.

    Args:
        request: vLLM's.
        hash_block_size: tokens that one of its hashes covers.
        block_size: tokens of a block of the group, a multiple.
    """
    hashes: Sequence[bytes] = request.block_hashes
    view = kv_cache_utils.BlockHashListWithBlockSize
    if block_size == hash_block_size or isinstance(hashes, view):
        return hashes
    coarse: Sequence[bytes] = view(hashes, hash_block_size, block_size)
    return coarse
