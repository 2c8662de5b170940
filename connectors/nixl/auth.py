"""Who may ask: messages of the side channel are signed with a secret that all engines
share.

A server draws a random number, the nonce, when it starts. A client draws one too, its
name, for each connection, and counts its questions there. A question is signed together
with these three, so that it is worth something to that server only, and once. Its
answer is signed together with the question's own signature, so that it answers that
question and no other. Both are HMAC-SHA256, in domains of their own: a message that is
sent back to where it came from is worth nothing.

Without a secret the same is done with an empty key. It keeps nobody out, but an engine
that has a secret and one that has none find out at once.
"""

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import Final, NamedTuple

from kvplugin.connectors.nixl.config import (
    MAX_SECRET_BYTES,
    NixlConfig,
    check_secret,
)
from kvplugin.errors import ConfigError, IntegrityError

NONCE_BYTES: Final = 16
CLIENT_BYTES: Final = 16
TAG_BYTES: Final = hashlib.sha256().digest_size
UNSIGNED: Final = bytes(TAG_BYTES)
"""In place of a signature: by somebody whom the question has not convinced."""
MAX_CLIENTS: Final = 4096
"""Connections whose questions a server counts at a time."""

_QUESTION: Final = b"kvplugin side channel 1: question"
_ANSWER: Final = b"kvplugin side channel 1: answer"


class Header(NamedTuple):
    """What a question is signed with, beside its text."""

    nonce: bytes
    """Of the server, as the client knows it."""
    client: bytes
    sequence: int
    """Counts up from 1 on a connection."""


def load_secret(config: NixlConfig) -> bytes:
    """The secret of a configuration; empty if there is none.

    Raises:
        ConfigError: the file is not there, can be read by others, or is no secret.
    """
    if not config.secret_file:
        return config.secret.encode()
    secret = _read(config.secret_file)
    check_secret("secret_file", secret)
    return secret


def _read(name: str) -> bytes:
    key = f"secret_file={name!r}"
    try:
        # opened without waiting: a pipe that nobody writes to is no secret
        descriptor = os.open(Path(name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # a ValueError: no name of a file
        raise ConfigError(f"{key} cannot be read: {error}") from error
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{key} is not a file")
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(
                f"{key} can be read by others (mode {stat.S_IMODE(mode):04o}): "
                f"chmod 600 {name}"
            )
        return _content(descriptor, key)
    finally:
        os.close(descriptor)


def _content(descriptor: int, key: str) -> bytes:
    try:
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(MAX_SECRET_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"{key} cannot be read: {error}") from error


class Signer:
    """Signs and compares; the same on both sides."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.has_secret = bool(secret)

    def question_tag(self, header: Header, body: bytes) -> bytes:
        """Signature of a question."""
        return self._tag(
            _QUESTION,
            header.nonce,
            header.client,
            header.sequence.to_bytes(8, "big"),
            body,
        )

    def answer_tag(self, question_tag: bytes, body: bytes) -> bytes:
        """Signature of the answer to the question with that signature."""
        return self._tag(_ANSWER, question_tag, body)

    def _tag(self, *parts: bytes) -> bytes:
        # all parts but the last are of fixed length: no two lists make the same bytes
        return hmac.digest(self._secret, b"".join(parts), "sha256")


def same(one: bytes, other: bytes) -> bool:
    """Whether two signatures are equal, in a time that says nothing."""
    return hmac.compare_digest(one, other)


class StaleError(IntegrityError):
    """A question for a server that has another nonce (by now)."""


class Guard:
    """A server's side: lets each question through once.

    It remembers one number a connection. When it has as many as it may, it forgets them
    all and draws a new nonce: whatever was signed with the old one is worth nothing any
    more, and clients sign again.
    """

    def __init__(self, secret: bytes, max_clients: int = MAX_CLIENTS) -> None:
        self.signer = Signer(secret)
        self._max_clients = max_clients
        self._last: dict[bytes, int] = {}
        self.nonce = _new_nonce()

    def admit(self, header: Header, tag: bytes, body: bytes) -> None:
        """Let a question through, or say why not.

        Raises:
            StaleError: it must be signed again with `nonce`.
            IntegrityError: the signature is not ours, or the question came before.
        """
        if not same(header.nonce, self.nonce):
            raise StaleError("signed for another start of this engine")
        if not same(tag, self.signer.question_tag(header, body)):
            raise IntegrityError("the signature is not of this engine's secret")
        last = self._last.get(header.client)
        if last is None and len(self._last) >= self._max_clients:
            self._last.clear()
            self.nonce = _new_nonce()
            raise StaleError("too many connections since the last nonce")
        if header.sequence <= (last or 0):
            raise IntegrityError(f"question {header.sequence} came before: a replay?")
        self._last[header.client] = header.sequence


def _new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def new_client() -> bytes:
    """A name for a connection."""
    return secrets.token_bytes(CLIENT_BYTES)
