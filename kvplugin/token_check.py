"""Hits that are proven by tokens, for hash formats that alone prove nothing.

`xxh3_128` is fast and can be made to collide: with it, whoever knows the function
could have the blocks of another request. A hit then counts only as far as the tokens
(and all else that identifies a prefix) are those of the request that computed it.
"""

from collections.abc import Iterable, Sequence

from kvplugin.block_pool import BlockPool
from kvplugin.hashing import PrefixWitness
from kvplugin.request import RequestLike


class TokenCheck:
    """What the keyed blocks of a pool were computed for.

    Args:
        block_pool: the pool; its blocks are looked up by id.
        hash_block_size: tokens that one hash covers.
    """

    def __init__(self, block_pool: BlockPool, hash_block_size: int) -> None:
        self._pool = block_pool
        self._hash_block_size = hash_block_size
        # Of keyed blocks: the prefix, and how many of its tokens end with the block.
        self._kept: dict[int, tuple[PrefixWitness, int]] = {}
        self._growing: dict[str, PrefixWitness] = {}

    def record(self, request: RequestLike, blocks: Iterable[tuple[int, int]]) -> None:
        """Blocks of this request were just given a key.

        Args:
            request: whose blocks they are.
            blocks: (block, tokens of the request up to its end).
        """
        witness = self._growing.get(request.request_id)
        if witness is None:
            witness = PrefixWitness(request, self._hash_block_size)
            self._growing[request.request_id] = witness
        else:
            witness.extend(request)
        self._kept.update((block, (witness, end)) for block, end in blocks)
        if len(self._kept) > 2 * self._pool.num_keyed_blocks:
            self._drop_stale()

    def freed(self, request_id: str) -> None:
        """The request is gone; its blocks may stay."""
        self._growing.pop(request_id, None)

    def _drop_stale(self) -> None:
        key_of = self._pool.key_of
        self._kept = {
            block: kept
            for block, kept in self._kept.items()
            if key_of(block) is not None
        }

    def proven_tokens(
        self,
        request: RequestLike,
        rows: Sequence[Sequence[int]],
        block_sizes: Sequence[int],
    ) -> int:
        """How far the hit is the request's own prefix.

        Args:
            request: who asks.
            rows: the hit, a row a group.
            block_sizes: tokens of a block, by group.

        Returns:
            Tokens before the first block, of any group, that is another prefix's; the
            length of the hit if there is none.
        """
        mine = PrefixWitness(request, self._hash_block_size)
        pairs = zip(rows, block_sizes, strict=True)
        return min(self._proven_blocks(mine, row, size) * size for row, size in pairs)

    def _proven_blocks(self, mine: PrefixWitness, row: Sequence[int], size: int) -> int:
        proven, trusted = len(row), None
        for i in range(len(row) - 1, -1, -1):
            if not row[i]:
                continue
            # One comparison covers all blocks before it that share the witness.
            witness, end = self._kept.get(row[i], (None, 0))
            in_place = witness is not None and end == (i + 1) * size
            if in_place and witness is trusted:
                continue
            if witness is None or not in_place or not witness.covers(mine, end):
                proven, trusted = i, None
            else:
                trusted = witness
        return proven
