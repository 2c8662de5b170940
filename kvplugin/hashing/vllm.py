"""Hashes equal, byte for byte, to those of vLLM's `sha256_cbor`.

For stores and routers that vLLM writes to or reads from as well. Versions differ in
how they name what identifies a block besides its tokens, so there is one format a
version; mirrored are `kv_cache_utils.py` of 0.19.1 and of 0.32.0.

vLLM's default, `sha256`, is not offered: it digests a pickle, and a pickle depends on
the identity of objects. Two equal strings pickle shorter if they are one object than
if they are two, so equal prefixes may hash apart within one process, and no one else
can compute the same bytes reliably.

What these formats take over from vLLM, with its weaknesses: in 0.19 an adapter and a
salt of one name share a hash, and of the media items that overlap a block which was
completed by generated tokens only the last of the request counts; weight and adapter
epochs do not exist in either. Use `kv_sha256` where nobody else needs the hashes.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, Final, Literal, Protocol

from kvplugin.errors import ConfigError
from kvplugin.hashing.identity import (
    BASE_MODEL,
    HashedRequest,
    MediaLike,
    RequestIdentity,
    embeds_digest,
    identity_of,
    media_between,
)

V032_DEFAULT_SEED: Final = "vllm-none-hash"
"""What 0.32 derives the first parent from while `PYTHONHASHSEED` is not set."""


class _ExtraKeys(Protocol):
    """How a version names what identifies block [start, end) besides its tokens."""

    def __call__(
        self, request: HashedRequest, media: Sequence[MediaLike], start: int, end: int
    ) -> list[Any]: ...


class CborFormat:
    """SHA-256 over the canonical CBOR of (parent, tokens, extra keys or null)."""

    digest_size: Final = sha256().digest_size
    needs_token_check: Final = False

    def __init__(
        self,
        name: str,
        seed: str,
        extra_keys: _ExtraKeys,
        coarse_rule: Literal["last", "concat"],
        continues_with_last_item: bool,
    ) -> None:
        self.name: Final = name
        self.coarse_rule: Final = coarse_rule
        self._dumps = _cbor_dumps(name)
        self._root = self._digest(seed)
        self._extra_keys = extra_keys
        self._continues_with_last_item = continues_with_last_item

    def root(
        self, identity: RequestIdentity = BASE_MODEL, block_size: int = 16
    ) -> bytes:
        """Parent of every first block: the seed alone decides."""
        del identity, block_size
        return self._root

    def extend(
        self, hashes: list[bytes], request: HashedRequest, block_size: int
    ) -> None:
        """Append the hashes of the full blocks of `request` that `hashes` lacks.

        Raises:
            ConfigError: the request or its adapter is of another epoch than 0, which
                these hashes cannot tell apart.
        """
        self._refuse_epochs(request)
        first, last = len(hashes), request.num_tokens // block_size
        media = request.mm_features
        if hashes and self._continues_with_last_item:
            media = media[-1:]
        parent = hashes[-1] if hashes else self._root
        for start in range(first * block_size, last * block_size, block_size):
            end = start + block_size
            keys = self._extra_keys(request, media, start, end)
            tokens = tuple(request.all_token_ids[start:end])
            parent = self._digest((parent, tokens, tuple(keys) or None))
            hashes.append(parent)

    def _refuse_epochs(self, request: HashedRequest) -> None:
        identity = identity_of(request)
        if identity.weight_epoch or (identity.adapter and identity.adapter[2]):
            raise ConfigError(
                f"the hash format {self.name!r} knows no epochs of weights or "
                f"adapters: old bytes would be served for new ones. Use 'kv_sha256', "
                f"or drop what is cached everywhere"
            )

    def _digest(self, value: object) -> bytes:
        return sha256(self._dumps(value, canonical=True)).digest()


def vllm019_sha256_cbor(seed: str | None) -> CborFormat:
    """`sha256_cbor` of 0.19 under `PYTHONHASHSEED=seed`.

    Raises:
        ConfigError: no seed (0.19 then starts from random bytes, which nobody can
            share), or the package cbor2 is not installed.
    """
    name = "vllm019_sha256_cbor"
    if seed is None:
        raise ConfigError(
            f"{name} needs a seed: the value of PYTHONHASHSEED that the vLLM 0.19 "
            "processes run with (without one, their hashes are random)"
        )
    return CborFormat(name, seed, untagged_keys, "concat", True)


def vllm032_sha256_cbor(seed: str | None) -> CborFormat:
    """`sha256_cbor` of 0.32 under `PYTHONHASHSEED=seed`; without one, its default.

    Raises:
        ConfigError: the package cbor2 is not installed.
    """
    seed = V032_DEFAULT_SEED if seed is None else seed
    return CborFormat("vllm032_sha256_cbor", seed, _tagged_keys, "last", False)


def untagged_keys(
    request: HashedRequest, media: Sequence[MediaLike], start: int, end: int
) -> list[Any]:
    """What identifies block [start, end) besides its tokens, as 0.19 hashes it and as
    both versions publish it in events."""
    keys: list[Any] = []
    if request.lora_request is not None:
        keys.append(request.lora_request.lora_name)
    keys += media_between(media, start, end)
    if not start and request.cache_salt:
        keys.append(request.cache_salt)
    if request.prompt_embeds is not None:
        keys.append(embeds_digest(request, start, end))
    return keys


def _tagged_keys(
    request: HashedRequest, media: Sequence[MediaLike], start: int, end: int
) -> list[Any]:
    keys: list[Any] = []
    lora = request.lora_request
    if lora is not None:
        keys.append(("lora", lora.lora_name, lora.lora_path))
    keys += [("mm", *item) for item in media_between(media, start, end)]
    if not start and request.cache_salt:
        keys.append(("cache_salt", request.cache_salt))
    if request.prompt_embeds is not None:
        keys.append(("prompt_embeds", embeds_digest(request, start, end)))
    return keys


def _cbor_dumps(name: str) -> Callable[..., bytes]:
    try:
        from cbor2 import dumps
    except ImportError as error:
        raise ConfigError(
            f"the hash format {name!r} needs the package cbor2: "
            "pip install 'kvplugin[hash]'"
        ) from error
    return dumps
