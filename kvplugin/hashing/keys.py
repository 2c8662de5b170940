"""The keys under which a pool indexes blocks.

A key is a block's hash and the number of the group whose block it names, because the
same tokens are different bytes in different groups. The format (hash, then the group
as four big-endian bytes) is vLLM's `BlockHashWithGroupId`, so an engine's own hashes
serve as they are.
"""

from typing import Final

_GROUP_BYTES: Final = 4


def make_key(block_hash: bytes, group: int) -> bytes:
    """The pool key of a block: `block_hash` and the group's number."""
    return block_hash + group.to_bytes(_GROUP_BYTES, "big")


def split_key(key: bytes) -> tuple[bytes, int]:
    """`make_key` undone: (block hash, group)."""
    return key[:-_GROUP_BYTES], int.from_bytes(key[-_GROUP_BYTES:], "big")
