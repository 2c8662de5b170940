"""Comparing prefixes where hashes alone prove nothing.

A format with `needs_token_check` can be made to collide, so a lookup compares what the
hashes stand for. A block's own tokens do not suffice: its bytes depend on all tokens
before it, and with a forged parent two prefixes may end in the same block under the
same hash. A `PrefixWitness` therefore holds the whole prefix, once a request; blocks
refer to it.

How a pool or manager uses it, if `format.needs_token_check`:

1. caching blocks: keep one `PrefixWitness(request, hash_block_size)` a request, let it
   `extend` at each call, and keep a reference to it and the block's place for each
   block that gets a key;
2. looking up: take one of the asking request, once, and accept block i found under
   its hash only if its place was i and `kept.covers(mine, (i + 1) * block_size)` (two
   blocks of one prefix may collide as well). Consecutive blocks that
   refer to the same witness need one comparison, at the last of them, which covers
   the others; if it fails, go back block by block.
3. a block that is refused is a miss; the index keeps it. Whether another block under
   the same hash agrees may be asked too.

Costs 4 bytes a token for each request of which a block is cached, and a comparison of
memory a run of blocks.
"""

from typing import Final

from kvplugin.hashing.identity import HashedRequest, block_extras, identity_of
from kvplugin.hashing.own import token_words

_TOKEN_BYTES: Final = 4


class PrefixWitness:
    """All that the hashes of a request's full blocks stand for."""

    __slots__ = ("_block_size", "_extras", "_identity", "_tokens")

    def __init__(self, request: HashedRequest, block_size: int) -> None:
        """Of the full blocks of `block_size` tokens (those that hashes cover)."""
        self._tokens: Final = bytearray()
        self._identity: Final = identity_of(request)
        self._extras: Final[dict[int, bytes]] = {}
        self._block_size: Final = block_size
        self.extend(request)

    def extend(self, request: HashedRequest) -> None:
        """The same request has more full blocks by now."""
        size = self._block_size
        first = len(self._tokens) // _TOKEN_BYTES // size
        last = request.num_tokens // size
        words = token_words(request.all_token_ids, first * size, last * size)
        self._tokens.extend(words.tobytes())
        self._extras.update(block_extras(request, size, first, last))

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
            and self._tokens.startswith(memoryview(other._tokens)[:size])
            and self._extras_until(num_tokens) == other._extras_until(num_tokens)
        )

    def _extras_until(self, num_tokens: int) -> dict[int, bytes]:
        if not self._extras:
            return self._extras
        end = num_tokens // self._block_size
        return {block: packed for block, packed in self._extras.items() if block < end}
