"""LookupHistory: what an explanation needs to know that a pool forgets.

A pool knows its keys, not those it had, and hashes do not tell that two blocks hold
the same tokens under different salts. Whoever wants explanations to say so attaches a
history, which is told of every key given and lost; without one, nothing is recorded
and nothing costs.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvplugin.errors import ConfigError
from kvplugin.hashing import RequestIdentity, identity_of
from kvplugin.hashing.own import kv_sha256
from kvplugin.request import RequestLike

_Key = tuple[int, bytes]
"""Group, and block hash or fingerprint of tokens."""

_TOKENS: Final = kv_sha256()


@dataclass(frozen=True, slots=True)
class BlockIdentity:
    """What a block depends on besides the tokens up to its end."""

    request: RequestIdentity
    media: tuple[tuple[str, int, int], ...] = ()
    """Identifier, offset and length of the items that begin before its end."""

    def differences(self, other: "BlockIdentity") -> tuple[str, ...]:
        """Names of the fields that differ."""
        pairs: Mapping[str, tuple[object, object]] = {
            "weight epoch": (self.request.weight_epoch, other.request.weight_epoch),
            "adapter": (self.request.adapter, other.request.adapter),
            "salt": (self.request.salt, other.request.salt),
            "media": (self.media, other.media),
        }
        return tuple(name for name, (mine, its) in pairs.items() if mine != its)


@dataclass(frozen=True, slots=True)
class _Cached:
    fingerprint: bytes
    identity: BlockIdentity


class LookupHistory:
    """Remembers keys that a pool lost, and what its cached blocks stand for.

    It is a `KeyListener` of one pool. Costs 6 microseconds and a few hundred bytes a
    block that gets a key.

    Args:
        capacity: cached blocks, and as many lost ones, to remember; the oldest are
            forgotten. With less than the pool has, identities of old blocks are
            missed.

    Raises:
        ConfigError: the capacity is not positive.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ConfigError(f"a history's capacity must be positive, got {capacity}")
        self.capacity: Final = capacity
        self._cached: OrderedDict[_Key, _Cached] = OrderedDict()
        self._lost: OrderedDict[_Key, str] = OrderedDict()
        self._by_tokens: dict[_Key, list[bytes]] = {}

    def __len__(self) -> int:
        """Blocks remembered, cached and lost; at most twice the capacity."""
        return len(self._cached) + len(self._lost)

    # -- told (`KeyListener`) ------------------------------------------------------

    def keys_given(
        self,
        request: RequestLike,
        group: int,
        block_size: int,
        start: int,
        hashes: Sequence[bytes],
        given: Sequence[int],
        parent: bytes | None,
    ) -> None:
        """Remember what these blocks stand for."""
        before = None if parent is None else self._cached.get((group, parent))
        known = [b""] * (start - 1) + [before.fingerprint] if before else []
        prints = fingerprints(request, block_size, start + len(hashes), known)
        for i in given:
            end = (start + i + 1) * block_size
            self._remember(
                (group, hashes[i]),
                _Cached(prints[start + i], block_identity(request, end)),
            )

    def keys_lost(self, keys: Sequence[tuple[int, bytes]]) -> None:
        """Remember that these were cached."""
        for key in keys:
            self._lose(key, "")

    def all_keys_lost(self) -> None:
        """Remember that all were cached until the reset."""
        for key in list(self._cached):
            self._lose(key, "the cache was reset")

    # -- asked ---------------------------------------------------------------------

    def how_lost(self, group: int, block_hash: bytes) -> str | None:
        """None if the block is not known to have been cached and lost; else how, empty
        for an ordinary eviction."""
        return self._lost.get((group, block_hash))

    def other_identity(
        self, group: int, fingerprint: bytes, identity: BlockIdentity
    ) -> tuple[str, ...]:
        """Under which identity the same tokens are cached: the names of the fields in
        which it differs from `identity`, of several the nearest. Empty if none is."""
        found = [
            self._cached[group, block_hash].identity.differences(identity)
            for block_hash in self._by_tokens.get((group, fingerprint), ())
        ]
        return min(filter(None, found), key=len, default=())

    # -- inside --------------------------------------------------------------------

    def _remember(self, key: _Key, entry: _Cached) -> None:
        self._lost.pop(key, None)
        self._forget(key)
        self._cached[key] = entry
        self._by_tokens.setdefault((key[0], entry.fingerprint), []).append(key[1])
        if len(self._cached) > self.capacity:
            self._forget(next(iter(self._cached)))

    def _forget(self, key: _Key) -> None:
        entry = self._cached.pop(key, None)
        if entry is None:
            return
        group, block_hash = key
        same_tokens = self._by_tokens[group, entry.fingerprint]
        same_tokens.remove(block_hash)
        if not same_tokens:
            del self._by_tokens[group, entry.fingerprint]

    def _lose(self, key: _Key, how: str) -> None:
        self._forget(key)
        self._lost[key] = how
        self._lost.move_to_end(key)
        if len(self._lost) > self.capacity:
            self._lost.popitem(last=False)


class _TokensOnly:
    """A request as hashing sees it, without identity; prompt embeddings are content as
    tokens are, and stay."""

    lora_request = None
    cache_salt = None
    mm_features = ()

    def __init__(self, request: RequestLike, num_tokens: int) -> None:
        self.all_token_ids = request.all_token_ids
        self.num_tokens = num_tokens
        self.prompt_embeds: Any = request.prompt_embeds


def fingerprints(
    request: RequestLike,
    block_size: int,
    num_blocks: int,
    known: Sequence[bytes] = (),
) -> list[bytes]:
    """Chained digests of a request's blocks, equal for equal tokens whatever the
    identity.

    Args:
        request: whose blocks.
        block_size: tokens of a block.
        num_blocks: how many, from the first.
        known: those of leading blocks; all but the last may be anything.
    """
    prints = list(known)
    tokens = _TokensOnly(request, num_blocks * block_size)
    _TOKENS.extend(prints, tokens, block_size)
    return prints


def block_identity(request: RequestLike, end: int) -> BlockIdentity:
    """Identity of the block that ends at token `end`."""
    media = tuple(
        (item.identifier, item.mm_position.offset, item.mm_position.length)
        for item in request.mm_features
        if item.mm_position.offset < end
    )
    return BlockIdentity(identity_of(request), media)
