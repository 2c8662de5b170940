"""Comparing prefixes where hashes alone prove nothing.

A format with `needs_token_check` can be made to collide, so a lookup compares what the
hashes stand for. A block's own tokens do not suffice: its bytes depend on all tokens
before it, and with a forged parent two prefixes may end in the same block under the
same hash. A `PrefixWitness` therefore holds the whole prefix, once a request; blocks
refer to it.

How a pool or manager uses it, if `format.needs_token_check`:

1. caching blocks: take `PrefixWitness(request, hash_block_size)` once a call, and keep
   a reference to it for each block that gets a key;
2. looking up: take one of the asking request, once, and accept block i found under
   its hash only if `kept.covers(mine, (i + 1) * block_size)`. Consecutive blocks that
   refer to the same witness need one comparison, at the last of them, which covers
   the others; if it fails, go back block by block.
3. a block that is refused is a miss; the index keeps it. Whether another block under
   the same hash agrees may be asked too.

Costs 4 bytes a token for each request of which a block is cached, and a comparison of
memory a run of blocks (20 microseconds for 100,000 tokens).
"""

from typing import Final

from kvplugin.hashing.identity import HashedRequest, block_extras, identity_of
from kvplugin.hashing.own import token_words

_TOKEN_BYTES: Final = 4


class PrefixWitness:
    """All that the hashes of a request's full blocks stand for, frozen when made."""

    __slots__ = ("_block_size", "_extras", "_identity", "_tokens")

    def __init__(self, request: HashedRequest, block_size: int) -> None:
        """Of the full blocks of `block_size` tokens (those that hashes cover)."""
        blocks = request.num_tokens // block_size
        words = token_words(request.all_token_ids, 0, blocks * block_size)
        self._tokens: Final = words.tobytes()
        self._identity: Final = identity_of(request)
        self._extras: Final = block_extras(request, block_size, 0, blocks)
        self._block_size: Final = block_size

    def covers(self, other: "PrefixWitness", num_tokens: int) -> bool:
        """Whether the first `num_tokens` tokens and all that identifies them agree.

        Args:
            other: made with the same block size.
            num_tokens: a multiple of the block size.

        Returns:
            False too if one of the two is shorter.
        """
        size = num_tokens * _TOKEN_BYTES
        if len(other._tokens) < size or len(self._tokens) < size:
            return False
        return (
            self._identity == other._identity
            and self._block_size == other._block_size
            and self._tokens.startswith(other._tokens[:size])
            and self._extras_until(num_tokens) == other._extras_until(num_tokens)
        )

    def _extras_until(self, num_tokens: int) -> dict[int, bytes]:
        if not self._extras:
            return self._extras
        end = num_tokens // self._block_size
        return {block: packed for block, packed in self._extras.items() if block < end}
