"""Our own hash formats: `kv_sha256` and `xxh3_128`.

A block's hash is the digest of its parent's hash, its token ids as little-endian
uint32 and, if there are any, its packed extras (`identity.block_extras`). The parent
of the first block is the digest of the packed request identity with the format's name
and block size; therefore within one chain the length of the token ids is fixed, and
what follows them can't be taken for tokens. Nothing depends on `PYTHONHASHSEED`,
process, machine or byte order.
"""

import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from struct import iter_unpack
from typing import Final

from kvplugin.errors import ConfigError
from kvplugin.hashing.identity import (
    BASE_MODEL,
    HashedRequest,
    RequestIdentity,
    block_extras,
    identity_of,
)

_BIG_ENDIAN: Final = sys.byteorder == "big"
_TOKEN_BYTES: Final = 4
_VERSION: Final = 1

_Blocks = Iterator[tuple[bytes, ...]]
"""The bytes of one block after the other, each in a tuple of its own."""


class ChainedFormat:
    """A hash format over any digest of bytes."""

    coarse_rule: Final = "last"

    def __init__(
        self,
        name: str,
        digest: Callable[[bytes], bytes],
        *,
        needs_token_check: bool,
    ) -> None:
        self.name: Final = name
        self.digest_size: Final = len(digest(b""))
        self.needs_token_check: Final = needs_token_check
        self._digest = digest

    def root(
        self, identity: RequestIdentity = BASE_MODEL, block_size: int = 16
    ) -> bytes:
        """Parent of the first block of those who share `identity`."""
        return self._digest(identity.packed(f"{self.name}/{_VERSION}", block_size))

    def extend(
        self, hashes: list[bytes], request: HashedRequest, block_size: int
    ) -> None:
        """Append the hashes of the full blocks of `request` that `hashes` lacks.

        Costs one conversion a call and one digest a block; nothing if no block is
        full.

        Raises:
            OverflowError: a token id is negative or does not fit 32 bits; `hashes`
                is unchanged.
        """
        first, last = len(hashes), request.num_tokens // block_size
        if first >= last:
            return
        parent = hashes[-1] if hashes else self.root(identity_of(request), block_size)
        tokens = request.all_token_ids
        blocks = _blocks(tokens, block_size, first, last)
        if not request.mm_features and request.prompt_embeds is None:
            hashes += self._chain(parent, blocks)
            return
        extras = block_extras(request, block_size, first, last)
        hashes += self._chain_with(parent, blocks, first, extras)

    def extend_tokens(
        self, hashes: list[bytes], tokens: Sequence[int], block_size: int, root: bytes
    ) -> None:
        """As `extend`, for a sequence of text and a root computed before."""
        first, last = len(hashes), len(tokens) // block_size
        if first < last:
            parent = hashes[-1] if hashes else root
            hashes += self._chain(parent, _blocks(tokens, block_size, first, last))

    def _chain(self, parent: bytes, blocks: _Blocks) -> list[bytes]:
        digest = self._digest
        return [parent := digest(parent + block) for (block,) in blocks]

    def _chain_with(
        self, parent: bytes, blocks: _Blocks, first: int, extras: dict[int, bytes]
    ) -> list[bytes]:
        digest = self._digest
        return [
            parent := digest(parent + block + extras.get(number, b""))
            for number, (block,) in enumerate(blocks, first)
        ]


class _Sha256Format(ChainedFormat):
    """`ChainedFormat` with the digest call inlined: a third of a microsecond a block
    is all there is, and a Python call around it would add a fifth."""

    def _chain(self, parent: bytes, blocks: _Blocks) -> list[bytes]:
        digest = sha256
        return [parent := digest(parent + block).digest() for (block,) in blocks]


def kv_sha256() -> ChainedFormat:
    """SHA-256, 32 bytes: whoever finds two prefixes of one hash has broken SHA-256."""
    return _Sha256Format(
        "kv_sha256", lambda data: sha256(data).digest(), needs_token_check=False
    )


def xxh3_128() -> ChainedFormat:
    """XXH3, 16 bytes: twice as fast, but collisions can be made on purpose.

    Therefore a block found under a hash counts as a hit only if its prefix is that of
    the request: see `kvplugin.hashing.witness`.

    Raises:
        ConfigError: the package xxhash is not installed.
    """
    try:
        from xxhash import xxh3_128_digest
    except ImportError as error:
        raise ConfigError(
            "the hash format 'xxh3_128' needs the package xxhash: "
            "pip install 'kvplugin[hash]', or choose 'kv_sha256'"
        ) from error
    return ChainedFormat("xxh3_128", xxh3_128_digest, needs_token_check=True)


def token_words(tokens: Sequence[int], start: int, stop: int) -> "array[int]":
    """Token ids [start, stop), whose memory is little-endian uint32.

    Raises:
        OverflowError: an id is negative or does not fit 32 bits.
    """
    if start:
        words = array("I", tokens[start:stop])
    else:
        # A copy of a long list costs as much as its conversion.
        words = array("I", tokens)
        del words[stop:]
    if _BIG_ENDIAN:
        words.byteswap()
    return words


def _blocks(tokens: Sequence[int], block_size: int, first: int, last: int) -> _Blocks:
    words = token_words(tokens, first * block_size, last * block_size)
    return iter_unpack(f"{_TOKEN_BYTES * block_size}s", words)
