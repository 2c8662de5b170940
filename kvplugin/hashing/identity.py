"""What a block depends on besides its tokens, as typed fields.

Two kinds. What holds for a whole request (weight epoch, adapter, salt) is a
`RequestIdentity` and goes into the root of the hash chain, so every block inherits it
and blocks of plain text need nothing else. What holds for a stretch of tokens (media
items, prompt embeddings) is mixed into each block that it overlaps.

Everything is packed as MessagePack of a nested list whose entries begin with the name
of their kind: strings, bytes, numbers and None stay distinct and lengths are explicit,
so values that differ never pack alike, however their strings concatenate. An adapter
"x" and a salt "x" are one example (vLLM issue #44701 is the fault).
"""

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol, cast

import msgpack


class AdapterLike(Protocol):
    """The attributes of vLLM's `LoRARequest` that say which adapter it is.

    An attribute `epoch` (an integer, 0 where there is none) may tell apart what was
    loaded under one name and path at different times.
    """

    @property
    def lora_name(self) -> str: ...
    @property
    def lora_path(self) -> str: ...


class TokenRange(Protocol):
    """Where the placeholder tokens of a media item stand, as vLLM's `PlaceholderRange`.

    `offset` counts from the start of the request.
    """

    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...


class MediaLike(Protocol):
    """The attributes of vLLM's `MultiModalFeatureSpec` that say what an item is.

    Equal identifiers mean equal content.
    """

    @property
    def identifier(self) -> str: ...
    @property
    def mm_position(self) -> TokenRange: ...


class HashedRequest(Protocol):
    """What hashing reads of a request; vLLM's `Request` has it all.

    `mm_features` are sorted by offset and do not overlap. `prompt_embeds` is None or
    has one row a prompt token: anything that `len` and slices of rows work on, and
    whose slices have `tobytes()` (NumPy arrays) or are torch tensors. An attribute
    `weight_epoch` (an integer, 0 where there is none) counts changes of the model's
    weights.
    """

    @property
    def all_token_ids(self) -> Sequence[int]: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def lora_request(self) -> AdapterLike | None: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def mm_features(self) -> Sequence[MediaLike]: ...
    @property
    def prompt_embeds(self) -> Any: ...


@dataclass(frozen=True)
class RequestIdentity:
    """Who may share the blocks of a request: those whose identity is equal."""

    adapter: tuple[str, str, int] | None = None
    """Name, path and epoch; None is the base model."""
    salt: str | None = None
    """None and "" differ: only a request without a salt shares with the public."""
    weight_epoch: int = 0

    def packed(self, format_name: str, block_size: int) -> bytes:
        """Unambiguous bytes of the identity, of the hash format and its block size."""
        return _pack(
            [
                ("format", format_name, block_size),
                ("weights", self.weight_epoch),
                ("adapter", self.adapter),
                ("salt", self.salt),
            ]
        )


BASE_MODEL = RequestIdentity()
"""The base model at its first weights, without a salt."""


def identity_of(request: HashedRequest) -> RequestIdentity:
    """The fields that hold for all of a request."""
    lora = request.lora_request
    adapter = None
    if lora is not None:
        adapter = (lora.lora_name, lora.lora_path, getattr(lora, "epoch", 0))
    epoch = getattr(request, "weight_epoch", 0)
    if adapter is None and request.cache_salt is None and not epoch:
        return BASE_MODEL
    return RequestIdentity(adapter, request.cache_salt, epoch)


def block_extras(
    request: HashedRequest, block_size: int, first: int, last: int
) -> dict[int, bytes]:
    """What identifies blocks [first, last) besides tokens, packed, by block number.

    Blocks of text alone have no entry. A media item is named in every block that it
    overlaps, with its offset relative to the block (negative if it began earlier)
    and its length in tokens.
    """
    fields: dict[int, list[tuple[Any, ...]]] = {}
    for item in request.mm_features:
        begin, length = item.mm_position.offset, item.mm_position.length
        blocks = range(begin // block_size, -(-(begin + length) // block_size))
        for block in range(max(first, blocks.start), min(last, blocks.stop)):
            offset = begin - block * block_size
            fields.setdefault(block, []).append(
                ("media", item.identifier, offset, length)
            )
    if request.prompt_embeds is not None:
        rows = len(request.prompt_embeds)
        shape = _shape_of(request.prompt_embeds)
        for block in range(first, min(last, -(-rows // block_size))):
            digest = embeds_digest(
                request, block * block_size, (block + 1) * block_size
            )
            fields.setdefault(block, []).append(("embeds", digest, *shape))
    return {block: _pack(entries) for block, entries in fields.items()}


def _shape_of(embeds: Any) -> tuple[str, list[int]]:
    """Equal bytes of another type or width are other embeddings."""
    dtype = str(getattr(embeds, "dtype", "")).removeprefix("torch.")
    return dtype, list(getattr(embeds, "shape", ()))[1:]


def media_between(
    items: Sequence[MediaLike], start: int, end: int
) -> Iterator[tuple[str, int]]:
    """(identifier, offset - start) of the items that overlap tokens [start, end)."""
    for item in items:
        offset, length = item.mm_position.offset, item.mm_position.length
        if offset < end and start < offset + length:
            yield item.identifier, offset - start


def embeds_digest(request: HashedRequest, start: int, end: int) -> bytes:
    """SHA-256 of the raw bytes of rows [start, end) of the prompt embeddings.

    Kept on the request where it has the attribute that vLLM's keeps them in, so that
    hashing anew, or by a second format, does not read the rows again.
    """
    memo: MutableMapping[tuple[int, int], bytes] | None = getattr(
        request, "_prompt_embeds_per_block_hashes", None
    )
    known = None if memo is None else memo.get((start, end))
    if known is not None:
        return known
    digest = sha256(_raw_bytes(request.prompt_embeds[start:end])).digest()
    if memo is not None:
        memo[start, end] = digest
    return digest


def _raw_bytes(rows: Any) -> Any:
    """The bytes of an array's or tensor's elements, row by row."""
    if hasattr(rows, "tobytes"):
        return rows.tobytes()
    # A torch tensor. NumPy has no bfloat16, so it goes through a view as bytes, whose
    # dtype comes from the tensor because nothing here may import torch.
    as_bytes = rows[:0].byte().dtype
    return rows.detach().cpu().contiguous().flatten().view(as_bytes).numpy()


def _pack(fields: list[tuple[Any, ...]]) -> bytes:
    # Lone surrogates (bytes that were no UTF-8) are legal in a Python string.
    return cast(bytes, msgpack.packb(fields, unicode_errors="surrogatepass"))
