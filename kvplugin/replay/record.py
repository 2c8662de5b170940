"""The trace format of our own: a header line, then one JSON line a request.

    {"format": "kvplugin-trace", "version": 1, "block_size": 16, "groups": []}
    {"timestamp": 0.25, "input_length": 40, "output_length": 9, "block_hashes": [7, 8]}

Hashes cover full blocks, of the prompt and then of the answer, in the order of the
tokens; equal hashes mean equal prefixes. They are integers or strings. Keys that a
request has not are left out of its line.
"""

import gzip
from collections.abc import Iterable, Sequence
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self, cast

import msgspec

from kvplugin.errors import ConfigError, check_count
from kvplugin.replay import fields

FORMAT: Final = "kvplugin-trace"
VERSION: Final = 1


class Header(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=FORMAT,
    tag_field="format",
):  # fmt: skip
    """First line of a trace."""

    version: int
    block_size: int
    """Tokens that a hash covers."""
    groups: tuple[str, ...] = ()
    """Kinds of the KV cache groups of the engine that was recorded, for information."""

    def __post_init__(self) -> None:
        """Refuse what cannot be read.

        Raises:
            ConfigError: another version, or no positive block size.
        """
        if self.version != VERSION:
            raise ConfigError(f"version {self.version} of the format is not {VERSION}")
        check_count("block_size", self.block_size, 1)


class RequestLine(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """What a trace keeps of a request."""

    timestamp: float
    """Seconds on any clock, of its arrival."""
    input_length: int
    """Tokens of the prompt."""
    output_length: int
    """Tokens of the answer."""
    block_hashes: tuple[int | str, ...]
    """One a full block, of the prompt first."""
    session: str | None = None
    turn: int = 0
    """Number of the request in its session, 0 for the first."""
    priority: int = 0
    """Higher is kept longer, as in `BlockContext`."""
    ttl_s: float | None = None
    """Seconds from its arrival for which its blocks are worth keeping."""
    ends_session: bool = False
    """Nobody continues the session after it."""
    cached_tokens: int | None = None
    """Tokens of the prompt that were found in the cache when it was recorded."""

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be.

        Raises:
            ConfigError: a negative length, a time that is no number, or more cached
                tokens than the prompt has.
        """
        check_count("input_length", self.input_length, 0)
        check_count("output_length", self.output_length, 0)
        for name in ("timestamp", "ttl_s"):
            seconds = getattr(self, name)
            if seconds is not None and not isfinite(seconds):
                raise ConfigError(f"{name}={seconds} must be a finite number")
        if self.cached_tokens is not None:
            check_count("cached_tokens", self.cached_tokens, 0)
            if self.cached_tokens > self.input_length:
                raise ConfigError(
                    f"cached_tokens={self.cached_tokens} of an input_length of "
                    f"{self.input_length}"
                )

    def check_hashes(self, block_size: int) -> None:
        """Refuse more hashes than full blocks.

        Raises:
            ConfigError: prompt and answer have fewer tokens.
        """
        tokens = self.input_length + self.output_length
        if len(self.block_hashes) * block_size > tokens:
            raise ConfigError(
                f"{len(self.block_hashes)} block_hashes of {block_size} tokens for a "
                f"prompt and answer of {tokens}"
            )


class TraceWriter:
    """Writes a trace line by line; what is written is in the file at once, or, where
    its name ends in ``.gz`` and it is gzipped, when the writer is closed.

    Args:
        path: the file, which is replaced.
        block_size: tokens that a block hash covers.
        groups: kinds of the KV cache groups, for information.

    Raises:
        OSError: the file cannot be written.
        ConfigError: no positive block size.
    """

    def __init__(
        self, path: str | Path, *, block_size: int, groups: Iterable[str] = ()
    ) -> None:
        header = Header(version=VERSION, block_size=block_size, groups=tuple(groups))
        self._encoder = msgspec.json.Encoder()
        self._block_size = block_size
        self._raw = Path(path).open("wb", buffering=0)  # noqa: SIM115  # see close
        self._file: IO[bytes] = self._raw
        if Path(path).suffix == ".gz":
            # No name and no time in it: equal traces are equal bytes.
            packed = gzip.GzipFile(filename="", mode="wb", fileobj=self._raw, mtime=0)
            self._file = cast("IO[bytes]", packed)
        self._put(header)

    def write(
        self,
        *,
        timestamp: float,
        input_length: int,
        output_length: int,
        block_hashes: Sequence[bytes | int | str],
        session: str | None = None,
        turn: int = 0,
        priority: int = 0,
        ttl_s: float | None = None,
        ends_session: bool = False,
        cached_tokens: int | None = None,
    ) -> None:
        """Add a request; hashes in bytes are cut to their low 64 bits, as KV events
        cut them. For the rest see `RequestLine`.

        Raises:
            OSError: the line cannot be written.
            ConfigError: a value that cannot be, named; the line is not written.
        """
        line = RequestLine(
            timestamp=fields.number("timestamp", timestamp),
            input_length=fields.integer("input_length", input_length),
            output_length=fields.integer("output_length", output_length),
            block_hashes=fields.hashes("block_hashes", block_hashes),
            session=None if session is None else fields.text("session", session),
            turn=fields.integer("turn", turn),
            priority=fields.integer("priority", priority),
            ttl_s=None if ttl_s is None else fields.number("ttl_s", ttl_s),
            ends_session=fields.flag("ends_session", ends_session),
            cached_tokens=(
                None
                if cached_tokens is None
                else fields.integer("cached_tokens", cached_tokens)
            ),
        )
        line.check_hashes(self._block_size)
        self._put(line)

    def close(self) -> None:
        """No more requests."""
        try:
            self._file.close()
        finally:
            self._raw.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _put(self, line: msgspec.Struct) -> None:
        self._file.write(self._encoder.encode(line) + b"\n")
