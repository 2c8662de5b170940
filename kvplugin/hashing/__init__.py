"""Chained block hashes, what identifies a request, and the keys of a pool's index."""

from kvplugin.hashing.coarse import CoarseRule, coarse_hashes
from kvplugin.hashing.formats import (
    DEFAULT_FORMAT,
    HASH_FORMATS,
    HashFormat,
    get_hash_format,
)
from kvplugin.hashing.identity import (
    BASE_MODEL,
    AdapterLike,
    HashedRequest,
    MediaLike,
    RequestIdentity,
    TokenRange,
    identity_of,
)
from kvplugin.hashing.keys import make_key, split_key
from kvplugin.hashing.own import ChainedFormat
from kvplugin.hashing.witness import PrefixWitness

__all__ = [
    "BASE_MODEL",
    "DEFAULT_FORMAT",
    "HASH_FORMATS",
    "AdapterLike",
    "ChainedFormat",
    "CoarseRule",
    "HashFormat",
    "HashedRequest",
    "MediaLike",
    "PrefixWitness",
    "RequestIdentity",
    "TokenRange",
    "coarse_hashes",
    "get_hash_format",
    "identity_of",
    "make_key",
    "split_key",
]
