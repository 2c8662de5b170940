"""Chunk arithmetic: tokens, engine blocks, chunks and host blocks of each group."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvplugin.connectors.coverage import Coverage, coverage_of, unserved
from kvplugin.contract import EngineInfo, GroupInfo, RequestView
from kvplugin.errors import ConfigError
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
    coverage: Coverage = field(init=False)
    """What boundaries need of the group."""
    tokens: int = field(init=False)
    """Of a chunk."""
    hashes: int = field(init=False)
    """Of the request's, that cover a chunk."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "coverage", coverage_of(self.group))
        object.__setattr__(self, "tokens", self.blocks * self.group.block_size)
        object.__setattr__(self, "hashes", self.tokens // self.hash_block_size)

    @property
    def index(self) -> int:
        """Of the group."""
        return self.group.index

    @property
    def slot_bytes(self) -> int:
        """Bytes of a chunk on this rank."""
        return self.group.block_bytes * self.blocks

    def key(self, request: RequestView, number: int) -> bytes | None:
        """Of a chunk; None while the request does not know all of its tokens."""
        last = (number + 1) * self.hashes - 1
        hashes = request.block_hashes
        return make_key(hashes[last], self.group.index) if last < len(hashes) else None

    def of(
        self, request: RequestView, first: int = 0, end: int | None = None
    ) -> Iterator[Chunk]:
        """Chunks `first` to `end` (excluded), as far as the request has hashes."""
        parent = self.key(request, first - 1) if first else None
        number = first
        while end is None or number < end:
            key = self.key(request, number)
            if key is None:
                return
            yield Chunk(number, key, parent)
            parent, number = key, number + 1

    def engine_blocks(self, chunk: Chunk) -> range:
        """The chunk's block numbers in its request."""
        return range(chunk.number * self.blocks, (chunk.number + 1) * self.blocks)

    def host_block(self, slot: int, block: int) -> int:
        """Host block of the request's block number `block`, kept in `slot`."""
        return (slot - 1) * self.blocks + block % self.blocks


def chunkings(engine: EngineInfo, blocks_per_chunk: int) -> tuple[Chunking, ...]:
    """Of all groups that are offloaded. Windows and states are kept block by block,
    since a boundary needs few of them, wherever it is.

    Raises:
        ConfigError: the model has a kind of group that is not served, or none at all,
            or hashes that do not end where blocks end.
    """
    if reason := unserved(engine):
        raise ConfigError(f"offload cannot serve this model: {reason}")
    cuts = []
    for group in engine.groups:
        if group.reusable:
            if group.block_size % engine.hash_block_size:
                raise ConfigError(
                    f"group {group.index} has blocks of {group.block_size} tokens, the "
                    f"engine hashes {engine.hash_block_size} at a time: choose a block "
                    "size that is a multiple of that, or a smaller hash block size"
                )
            blocks = blocks_per_chunk if coverage_of(group).dense else 1
            cuts.append(Chunking(group, blocks, engine.hash_block_size))
    return tuple(cuts)


def alignment(cuts: Sequence[Chunking]) -> int:
    """Tokens that every boundary is a multiple of."""
    return math.lcm(*(cut.group.block_size for cut in cuts))


def hashed_tokens(request: RequestView, hash_block_size: int) -> int:
    """Tokens whose hash is known; drafts have none."""
    return len(request.block_hashes) * hash_block_size
