"""The blocks of an order, paired chunk by chunk."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvplugin.connectors.negotiate import Pairing
from kvplugin.connectors.nixl.messages import GroupRead
from kvplugin.errors import IntegrityError

Numbers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Units:
    """Pairs of chunks of an order, by the peer's memory; blocks count as kernels do."""

    remote_block: Numbers
    remote_place: Numbers
    """Of the chunk in its block."""
    local_block: Numbers
    local_place: Numbers
    remote_chunks: int
    """Of a block."""
    local_chunks: int

    def __len__(self) -> int:
        return len(self.remote_block)

    @cached_property
    def remote(self) -> Numbers:
        """Ids of the peer's chunks."""
        return self.remote_block * self.remote_chunks + self.remote_place

    @cached_property
    def local(self) -> Numbers:
        """Ids of ours."""
        return self.local_block * self.local_chunks + self.local_place

    @cached_property
    def runs(self) -> tuple[Numbers, Numbers]:
        """Chunks that follow each other on both sides: where a run begins, and how
        many."""
        begins = np.ones(len(self), np.bool_)
        begins[1:] = (np.diff(self.remote) != 1) | (np.diff(self.local) != 1)
        starts = np.flatnonzero(begins)
        return starts, np.diff(starts, append=len(self))

    @cached_property
    def blocks(self) -> Numbers:
        """The peer's blocks, each once, ascending."""
        return self.remote_block[self._firsts]

    @cached_property
    def owner(self) -> Numbers:
        """Of each pair: its entry in `blocks`."""
        return np.cumsum(self._firsts) - 1

    @cached_property
    def block_runs(self) -> int:
        """Runs of blocks that follow each other there."""
        return 1 + int(np.count_nonzero(np.diff(self.blocks) != 1))

    @cached_property
    def _firsts(self) -> npt.NDArray[np.bool_]:
        firsts = np.ones(len(self), np.bool_)
        firsts[1:] = self.remote_block[1:] != self.remote_block[:-1]
        return firsts


class Cut(NamedTuple):
    """Into which chunks blocks are cut: pairings of equal cuts share `Units`."""

    tokens: int
    """Of a chunk; 0 for whole blocks, whatever they hold."""
    remote_tokens: int
    """Of a block as kernels count them."""
    local_tokens: int
    remote_split: int
    local_split: int
    remote_blocks: int
    """Of the pool."""
    local_blocks: int

    @classmethod
    def of(cls, pairing: Pairing) -> "Cut":
        counts = pairing.source_blocks, pairing.target_blocks
        plan = pairing.conversion
        if plan is None:
            return cls(0, 1, 1, 1, 1, *counts)
        return cls(
            plan.chunk_tokens,
            plan.source.tokens,
            plan.target.tokens,
            plan.source.split,
            plan.target.split,
            *counts,
        )

    def units(self, read: GroupRead) -> Units:
        """What of an order's part there is to read, in order of the peer's blocks.

        Blocks of ours that are null need nothing.

        Raises:
            IntegrityError: the rows are no rows of these tokens, or name blocks that
                are not there.
        """
        remote = np.asarray(read.remote_ids, np.int64)
        local = np.asarray(read.local_ids, np.int64)
        _check_distinct(read.group, local)
        if self.tokens:
            remote, remote_chunk, local, local_chunk = self._chunks(read, remote, local)
        elif len(remote) == len(local):
            remote_chunk = local_chunk = np.zeros(len(remote), np.int64)
        else:
            raise IntegrityError(
                f"group {read.group}: {len(remote)} blocks of the peer for {len(local)}"
            )
        wanted = local != 0
        if not wanted.all():
            remote, remote_chunk = remote[wanted], remote_chunk[wanted]
            local, local_chunk = local[wanted], local_chunk[wanted]
        _check_ids(read.group, "the peer's", remote, self.remote_blocks)
        _check_ids(read.group, "our", local, self.local_blocks)
        order = np.lexsort((remote_chunk, remote))
        chunks = self._chunks_of_blocks()
        remote, remote_place = _kernel_blocks(
            remote[order], remote_chunk[order], self.remote_split, chunks[0]
        )
        local, local_place = _kernel_blocks(
            local[order], local_chunk[order], self.local_split, chunks[1]
        )
        return Units(remote, remote_place, local, local_place, *chunks)

    def _chunks_of_blocks(self) -> tuple[int, int]:
        if not self.tokens:
            return 1, 1
        return self.remote_tokens // self.tokens, self.local_tokens // self.tokens

    def _chunks(
        self, read: GroupRead, remote: Numbers, local: Numbers
    ) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Block of the pool and chunk in it, of both sides, for every chunk that holds
        one of the tokens."""
        if not 0 <= read.first_token <= read.end_token:
            raise IntegrityError(
                f"group {read.group}: tokens {read.first_token} to {read.end_token}"
            )
        end = -(-read.end_token // self.tokens)
        if read.first_token == read.end_token:
            end = 0
        chunks = np.arange(read.first_token // self.tokens, end, dtype=np.int64)
        sides = []
        for ids, tokens in (
            (remote, self.remote_tokens * self.remote_split),
            (local, self.local_tokens * self.local_split),
        ):
            block, place = np.divmod(chunks, tokens // self.tokens)
            block -= read.first_token // tokens
            if len(block) and block[-1] >= len(ids):
                raise IntegrityError(
                    f"group {read.group}: {len(ids)} blocks of {tokens} tokens do not "
                    f"hold tokens {read.first_token} to {read.end_token}"
                )
            sides += [ids[block], place]
        return sides[0], sides[1], sides[2], sides[3]


def _check_ids(group: int, whose: str, ids: Numbers, count: int) -> None:
    if len(ids) and not (ids.min() >= 1 and ids.max() < count):
        wrong = ids[(ids < 1) | (ids >= count)][0]
        raise IntegrityError(
            f"group {group}: {wrong} is not one of {whose} blocks, 1 to {count - 1}"
        )


def _check_distinct(group: int, local: Numbers) -> None:
    ordered = np.sort(local[local != 0])
    if (same := ordered[1:] == ordered[:-1]).any():
        raise IntegrityError(
            f"group {group}: our block {ordered[1:][same][0]} is named twice"
        )


def _kernel_blocks(
    ids: Numbers, chunks: Numbers, split: int, per_block: int
) -> tuple[Numbers, Numbers]:
    if split == per_block == 1:
        return ids, chunks
    inner, place = np.divmod(chunks, per_block)
    return ids * split + inner, place
