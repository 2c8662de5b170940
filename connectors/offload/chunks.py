"""Chunk arithmetic: tokens, engine blocks, chunks and host blocks of one group."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvplugin.contract import GroupInfo, RequestView
from kvplugin.hashing import make_key


class Chunk(NamedTuple):
    """A chunk of a request by its place in it."""

    number: int
    key: bytes
    parent: bytes | None
    """Key of the chunk before it."""


@dataclass(frozen=True, slots=True)
class Chunking:
    """How a group's blocks are cut into chunks.

    Chunk c of a request is its engine blocks c*k to c*k+k-1; its key is the hash of
    the last of them. Slot s of host memory (`HostTier` numbers them from 1) is host
    blocks (s-1)*k to s*k-1.
    """

    group: GroupInfo
    blocks: int
    """Engine blocks of a chunk, k."""
    hash_block_size: int
    """Tokens that one of the request's hashes covers; divides the block size."""

    @property
    def tokens(self) -> int:
        """Tokens of a chunk."""
        return self.blocks * self.group.block_size

    def of(
        self, request: RequestView, first: int = 0, end: int | None = None
    ) -> Iterator[Chunk]:
        """Chunks `first` to `end` (excluded), as far as the request has hashes."""
        hashes = request.block_hashes
        stride = self.tokens // self.hash_block_size
        stop = len(hashes) // stride
        group = self.group.index
        parent = make_key(hashes[first * stride - 1], group) if first else None
        for number in range(first, stop if end is None else min(end, stop)):
            key = make_key(hashes[(number + 1) * stride - 1], group)
            yield Chunk(number, key, parent)
            parent = key

    def hashed_tokens(self, request: RequestView) -> int:
        """Tokens whose hash is known; drafts have none."""
        return len(request.block_hashes) * self.hash_block_size

    def whole_blocks(self, tokens: int) -> int:
        """`tokens`, rounded down to whole engine blocks."""
        return tokens // self.group.block_size * self.group.block_size

    def engine_blocks(self, chunk: Chunk) -> range:
        """The chunk's block numbers in its request."""
        return range(chunk.number * self.blocks, (chunk.number + 1) * self.blocks)

    def host_block(self, slot: int, block: int) -> int:
        """Host block of the request's block number `block`, kept in `slot`."""
        return (slot - 1) * self.blocks + block % self.blocks
