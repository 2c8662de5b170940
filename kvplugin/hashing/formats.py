"""Names of hash formats, and what a format is."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Protocol

from kvplugin.errors import ConfigError, unknown_name
from kvplugin.hashing.coarse import CoarseRule
from kvplugin.hashing.identity import BASE_MODEL, HashedRequest, RequestIdentity
from kvplugin.hashing.own import kv_sha256, xxh3_128
from kvplugin.hashing.vllm import vllm019_sha256_cbor, vllm032_sha256_cbor

DEFAULT_FORMAT: Final = "kv_sha256"


class HashFormat(Protocol):
    """How blocks get their hashes; an engine may pass an object of its own.

    A hash covers one full block and, through its parent, everything before it. Blocks
    with equal hashes are exchanged for each other, so whatever the bytes of a block
    depend on must be in its hash.
    """

    @property
    def name(self) -> str:
        """Names the format in stores that outlive the process."""

    @property
    def digest_size(self) -> int:
        """Bytes of a hash."""

    @property
    def needs_token_check(self) -> bool:
        """Whether a lookup must compare prefixes: see `kvplugin.hashing.witness`."""

    @property
    def coarse_rule(self) -> CoarseRule:
        """How longer blocks get their hash, for `coarse_hashes`."""

    def root(
        self, identity: RequestIdentity = BASE_MODEL, block_size: int = 16
    ) -> bytes:
        """Parent of the first block of the requests with this identity."""

    def extend(
        self, hashes: list[bytes], request: HashedRequest, block_size: int
    ) -> None:
        """Append the hashes of the full blocks of `request` that `hashes` lacks.

        Must be cheap when there are none, and give the same hashes however the
        tokens were split over calls.
        """


def get_hash_format(
    name: str = DEFAULT_FORMAT, *, seed: str | None = None
) -> HashFormat:
    """The format of that name.

    Args:
        name: `kv_sha256`, `xxh3_128`, `vllm019_sha256_cbor` or `vllm032_sha256_cbor`.
        seed: for vLLM's formats, `PYTHONHASHSEED` of the vLLM processes. 0.19 needs
            one; 0.32 has a default.

    Raises:
        ConfigError: no format has that name, it lacks a package or its seed, or it
            takes none.
    """
    try:
        make = _FORMATS[name]
    except KeyError:
        raise unknown_name("hash format", name, _FORMATS, "hash_format") from None
    return make(seed)


def _seedless(make: Callable[[], HashFormat]) -> Callable[[str | None], HashFormat]:
    def checked(seed: str | None) -> HashFormat:
        if seed is not None:
            raise ConfigError(
                f"the hash format {make.__name__!r} takes no seed: its hashes are the "
                "same in every process. Use a cache salt to keep requests apart."
            )
        return make()

    return checked


_FORMATS: Final[Mapping[str, Callable[[str | None], HashFormat]]] = MappingProxyType(
    {
        "kv_sha256": _seedless(kv_sha256),
        "xxh3_128": _seedless(xxh3_128),
        "vllm019_sha256_cbor": vllm019_sha256_cbor,
        "vllm032_sha256_cbor": vllm032_sha256_cbor,
    }
)

HASH_FORMATS: Final = tuple(_FORMATS)
"""The names that `get_hash_format` knows."""
