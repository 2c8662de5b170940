"""The keys of the NIXL connector's configuration."""

from enum import StrEnum
from typing import Final, Literal

import msgspec

from kvplugin.errors import ConfigError, check_ranges

MIN_SECRET_BYTES: Final = 16
MAX_SECRET_BYTES: Final = 4096


class Role(StrEnum):
    """What an engine is to others; vLLM's ``kv_role`` without its prefix."""

    PRODUCER = "producer"
    CONSUMER = "consumer"
    BOTH = "both"


class NixlConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `KVPluginNixlConnector`; names are vLLM's where vLLM has them."""

    side_channel_host: str = "127.0.0.1"
    """Address that the side channel listens on. Beyond the machine itself it needs a
    `secret`, or `insecure`: its messages carry memory addresses."""
    side_channel_port: int = 5600
    """Port of the side channel; engines of one data-parallel group add their index."""
    advertise_host: str = ""
    """Host name or address under which other engines reach the side channel. Default:
    `side_channel_host`, which must then be one that they can reach."""
    secret: str = ""
    """Shared by all engines that exchange KV: every message is signed with it."""
    secret_file: str = ""
    """File that holds the secret, instead of `secret`."""
    insecure: bool = False
    """Listen beyond the machine, and ask engines beyond it, without a secret: whoever
    reaches the port can ask where KV lies, and whoever a client names is believed."""
    backends: list[str] = msgspec.field(default_factory=lambda: ["UCX"])
    """Of NIXL, for bytes that go over the network."""
    same_host: Literal["auto", "off"] = "auto"
    """Read from an engine on the same machine without NIXL, where the kernel allows it
    (host memory, one user)."""
    huge_pages_s: float = 10.0
    """How long a start may take to move KV in host memory into huge pages, from which
    engines of one machine read it about twice as fast; 0 leaves it where it is."""
    kv_lease_duration: float = 30.0
    """Seconds for which a producer keeps the blocks of an ended request; consumers
    renew it while they want them."""
    bidirectional_kv_xfer: bool = False
    """A consumer keeps its blocks too, for the prefill of the next turn."""
    decoder_kv_blocks_ttl: float = 480.0
    """Seconds for which it does."""
    kv_recompute_threshold: int = 64
    """Fewer tokens than this are not read back from a consumer, but computed."""
    min_load_tokens: int = 1
    """Fewer tokens than this are computed, not read from a producer."""
    handshake_timeout_s: float = 5.0
    """How long a request waits until a peer answers on the side channel."""
    dead_peer_ttl_s: float = 30.0
    """For so long nobody asks a peer again that has not answered."""
    transfer_timeout_s: float = 30.0
    """After so long a read's request is told that it failed. Its blocks stay in use
    until the read ends."""
    max_overdue_fraction: float = 0.1
    """With a larger share of the engine's blocks in overdue reads, nothing is read."""
    grant_wait_ms: float = 2.0
    """How long a step waits, all in all, for peers' leave to read."""
    read_wait_ms: float = 20.0
    """How long a step that computes nothing waits for reads under way."""
    staging_bytes: int = 1 << 26
    """Memory of a rank through which blocks go whose layout has to be converted."""
    model_name: str = ""
    """What engines must agree on, in place of the path the model was loaded from."""
    weight_epoch: int = 0
    """Of the weights under this model's name: engines with different ones refuse each
    other."""
    on_start_error: Literal["fail", "disable"] = "fail"
    """If the connector cannot start: end the engine, or run it without P/D."""

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        check_ranges(self, _LIMITS)
        if self.secret and self.secret_file:
            raise ConfigError("secret and secret_file are both set: keep one of them")
        if self.secret:
            check_secret("secret", _encoded(self.secret))

    def __repr__(self) -> str:
        """Without the secret, which must not get into logs."""
        shown = {field: getattr(self, field) for field in self.__struct_fields__}
        shown["secret"] = "..." if self.secret else ""
        values = ", ".join(f"{field}={value!r}" for field, value in shown.items())
        return f"NixlConfig({values})"


def _encoded(secret: str) -> bytes:
    try:
        return secret.encode()
    except UnicodeEncodeError:
        raise ConfigError("secret is no text: it has half a character") from None


def check_secret(key: str, secret: bytes) -> None:
    """Refuse what is too short to be one, or endless.

    Raises:
        ConfigError: names the key, and not the secret.
    """
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ConfigError(
            f"{key} holds {len(secret)} bytes and must hold {MIN_SECRET_BYTES} to "
            f"{MAX_SECRET_BYTES}: openssl rand -hex 32 makes one"
        )


_DAY_S: Final = 86_400
_LIMITS: Final = {
    "side_channel_port": (1, 65_535),
    "huge_pages_s": (0, _DAY_S),
    "kv_lease_duration": (0.01, _DAY_S),
    "decoder_kv_blocks_ttl": (0.01, _DAY_S),
    "kv_recompute_threshold": (0, 2**40),
    "min_load_tokens": (1, 2**40),
    "handshake_timeout_s": (0.001, _DAY_S),
    "dead_peer_ttl_s": (0, _DAY_S),
    "transfer_timeout_s": (0.001, _DAY_S),
    "max_overdue_fraction": (0, 1),
    "grant_wait_ms": (0, 3_600_000),
    "read_wait_ms": (0, 3_600_000),
    "staging_bytes": (1 << 16, 2**50),
    "weight_epoch": (0, 2**60),
}
