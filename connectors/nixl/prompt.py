"""What the KV of a prompt depends on, as digests that two engines compare.

A digest stands for all tokens up to its place, and for what else their KV depends on:
the adapter, the salt, media with their places, prompt embeddings. There is one every
`DIGEST_TOKENS` tokens and one at the end. Both engines make them from their own
request, so one that was sent with another's lease agrees on nothing and reads nothing.

Each is SHA-256 of the one before, the number of tokens since, the tokens as
little-endian uint32, and what `kvplugin.hashing.identity` packs of media and
embeddings. Names of weights and tokenizers are no part of it: engines agree on their
models at the handshake.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from struct import Struct
from typing import Any, Final

from kvplugin.connectors.nixl.wire import Granted
from kvplugin.contract import PeerRequestView
from kvplugin.errors import IntegrityError
from kvplugin.hashing.identity import (
    AdapterLike,
    MediaLike,
    block_extras,
    identity_of,
)
from kvplugin.hashing.own import token_words
from kvplugin.spec import cdiv

DIGEST_TOKENS: Final = 64
"""Tokens from one digest to the next."""
_FORMAT: Final = "kvplugin-pd/1"
_COUNT: Final = Struct("<I")
_TOKEN_BYTES: Final = 4


def token_digests(request: PeerRequestView, num_tokens: int) -> list[bytes]:
    """Of the request's first tokens: one after every `DIGEST_TOKENS` of them, and one
    after the last.

    Raises:
        IntegrityError: it has not so many tokens.
        OverflowError: a token id is negative or does not fit 32 bits.
    """
    if num_tokens > request.num_tokens:
        raise IntegrityError(
            f"request {request.request_id} has {request.num_tokens} tokens, not "
            f"{num_tokens}"
        )
    return list(_chain(request, num_tokens))


def agreed_tokens(request: PeerRequestView, granted: Granted) -> int:
    """Tokens at the start of the request's prompt that are those of a lease, as far as
    digests tell: all of the lease's, or else a multiple of `DIGEST_TOKENS`.

    Raises:
        OverflowError: a token id is negative or does not fit 32 bits.
    """
    end = min(granted.num_tokens, request.num_prompt_tokens)
    if end < 1:
        return 0
    agreed = 0
    for mine, other in zip(_chain(request, end), granted.token_digests, strict=False):
        if mine != other:
            break
        agreed += DIGEST_TOKENS
    return min(agreed, end)


@dataclass(frozen=True, slots=True)
class _Start:
    """The start of a request, without the media and embeddings that lie behind it."""

    all_token_ids: Sequence[int]
    num_tokens: int
    lora_request: AdapterLike | None
    cache_salt: str | None
    mm_features: Sequence[MediaLike]
    prompt_embeds: Any


def _chain(request: PeerRequestView, num_tokens: int) -> Iterator[bytes]:
    words = memoryview(token_words(request.all_token_ids[:num_tokens], 0, num_tokens))
    tokens = words.cast("B")
    extras = _extras(request, num_tokens)
    identity = identity_of(request)
    digest = sha256(identity.packed(_FORMAT, DIGEST_TOKENS)).digest()
    whole = _COUNT.pack(DIGEST_TOKENS)
    size = DIGEST_TOKENS * _TOKEN_BYTES
    for number in range(cdiv(num_tokens, DIGEST_TOKENS)):
        some = tokens[number * size : (number + 1) * size]
        count = whole if len(some) == size else _COUNT.pack(len(some) // _TOKEN_BYTES)
        digest = sha256(
            b"".join((digest, count, some, extras.get(number, b"")))
        ).digest()
        yield digest


def _extras(request: PeerRequestView, num_tokens: int) -> dict[int, bytes]:
    if not request.mm_features and request.prompt_embeds is None:
        return {}
    embeds = request.prompt_embeds
    start = _Start(
        request.all_token_ids,
        num_tokens,
        request.lora_request,
        request.cache_salt,
        [x for x in request.mm_features if x.mm_position.offset < num_tokens],
        None if embeds is None else embeds[:num_tokens],
    )
    return block_extras(start, DIGEST_TOKENS, 0, cdiv(num_tokens, DIGEST_TOKENS))
