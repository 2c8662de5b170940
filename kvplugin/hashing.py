"""Chained block hashes and the keys under which a pool indexes blocks.

A hash covers one full block and, through its parent, everything before it; a key is
that hash and the number of the group whose block it names, because the same tokens
are different bytes in different groups. The key format (hash, then the group as four
big-endian bytes) is vLLM's `BlockHashWithGroupId`, so an engine's own hashes serve
as they are.
"""

from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Final

import msgpack

_GROUP_BYTES: Final = 4


def make_key(block_hash: bytes, group: int) -> bytes:
    """The pool key of a block: `block_hash` and the group's number."""
    return block_hash + group.to_bytes(_GROUP_BYTES, "big")


def split_key(key: bytes) -> tuple[bytes, int]:
    """`make_key` undone: (block hash, group)."""
    return key[:-_GROUP_BYTES], int.from_bytes(key[-_GROUP_BYTES:], "big")


def root_hash(*, adapter: str | None = None, salt: str | None = None) -> bytes:
    """Parent of a request's first block: 32 bytes that cover who may share it.

    Fields are named in the encoding, so an adapter "x" and a salt "x" differ.
    """
    fields = {"format": "kv_sha256/1", "adapter": adapter, "salt": salt}
    return sha256(msgpack.packb(fields)).digest()


def extend_hashes(
    hashes: list[bytes], tokens: Sequence[int], block_size: int, root: bytes
) -> None:
    """Append to `hashes` those of the full blocks of `tokens` that it lacks.

    `kv_sha256`: SHA-256 over the parent's 32 bytes and the block's token ids as
    little-endian uint32. Independent of `PYTHONHASHSEED`, process and machine.

    Args:
        hashes: hashes of the leading blocks; extended in place.
        tokens: all token ids of the request so far.
        block_size: tokens of one block.
        root: parent of the first block, from `root_hash`.

    Raises:
        OverflowError: a token id is negative or does not fit 32 bits.
    """
    parent = hashes[-1] if hashes else root
    for end in range((len(hashes) + 1) * block_size, len(tokens) + 1, block_size):
        parent = sha256(parent + _words(tokens[end - block_size : end])).digest()
        hashes.append(parent)


def _words(tokens: Iterable[int]) -> bytes:
    words = array("I", tokens)
    if _BIG_ENDIAN:
        words.byteswap()
    return words.tobytes()


_BIG_ENDIAN: Final = array("I", [1]).tobytes()[0] == 0
