"""The shared secret: where it comes from, and what it refuses."""

import os
from pathlib import Path

import pytest

from kvplugin.connectors.nixl.auth import (
    Guard,
    Header,
    Signer,
    StaleError,
    load_secret,
    new_client,
)
from kvplugin.connectors.nixl.config import MAX_SECRET_BYTES, NixlConfig
from kvplugin.errors import ConfigError, IntegrityError

SECRET = b"0123456789abcdef0123456789abcdef"


def _file(path: Path, content: bytes, mode: int = 0o600) -> str:
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def test_no_secret_is_an_empty_one() -> None:
    assert load_secret(NixlConfig()) == b""


def test_a_secret_from_the_configuration() -> None:
    assert load_secret(NixlConfig(secret=SECRET.decode())) == SECRET


@pytest.mark.parametrize("around", [b"%s", b"%s\n", b" %s\r\n"])
def test_a_secret_from_a_file_without_the_space_around_it(
    tmp_path: Path, around: bytes
) -> None:
    name = _file(tmp_path / "secret", around % SECRET)
    assert load_secret(NixlConfig(secret_file=name)) == SECRET


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o610, 0o601])
def test_a_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    name = _file(tmp_path / "secret", SECRET, mode)
    with pytest.raises(ConfigError, match=rf"secret_file=.*mode {mode:04o}.*chmod 600"):
        load_secret(NixlConfig(secret_file=name))


def test_permissions_are_those_of_the_file_behind_a_link(tmp_path: Path) -> None:
    _file(tmp_path / "real", SECRET, 0o644)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError) as refusal:
        load_secret(NixlConfig(secret_file=str(tmp_path / "link")))
    assert "chmod 600" in str(refusal.value)
    assert str(refusal.value).count("secret_file") == 1
    (tmp_path / "real").chmod(0o400)
    assert load_secret(NixlConfig(secret_file=str(tmp_path / "link"))) == SECRET


def test_both_keys_are_one_too_many(tmp_path: Path) -> None:
    name = _file(tmp_path / "secret", SECRET)
    with pytest.raises(ConfigError, match="secret and secret_file are both set"):
        NixlConfig(secret=SECRET.decode(), secret_file=name)


@pytest.mark.parametrize("secret", ["short", "x" * (MAX_SECRET_BYTES + 1)])
def test_a_secret_of_a_wrong_length_is_refused(tmp_path: Path, secret: str) -> None:
    with pytest.raises(ConfigError, match=r"secret holds .* openssl rand"):
        NixlConfig(secret=secret)
    name = _file(tmp_path / "secret", secret.encode())
    with pytest.raises(ConfigError, match=r"secret_file holds .* openssl rand"):
        load_secret(NixlConfig(secret_file=name))


def test_the_secret_is_not_in_any_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        NixlConfig(secret=SECRET[:9].decode())
    assert SECRET[:9].decode() not in str(caught.value)


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "nul"])
def test_what_is_no_file_is_refused_and_not_waited_for(
    tmp_path: Path, kind: str
) -> None:
    path = str(tmp_path / "secret")
    if kind == "folder":
        os.mkdir(path, 0o700)
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "nul":
        path += "\0"
    with pytest.raises(ConfigError, match="secret_file="):
        load_secret(NixlConfig(secret_file=path))


# -- signatures ------------------------------------------------------------------------


def _question(guard: Guard, client: bytes, sequence: int, body: bytes = b"q") -> bytes:
    return guard.signer.question_tag(Header(guard.nonce, client, sequence), body)


def _admit(guard: Guard, client: bytes, sequence: int) -> None:
    header = Header(guard.nonce, client, sequence)
    guard.admit(header, guard.signer.question_tag(header, b"q"), b"q")


def test_each_part_of_a_question_is_signed() -> None:
    guard = Guard(SECRET)
    client = new_client()
    header = Header(guard.nonce, client, 7)
    tag = guard.signer.question_tag(header, b"body")
    for changed, body in [
        (header._replace(client=new_client()), b"body"),
        (header._replace(sequence=8), b"body"),
        (header, b"bodz"),
        (header, b"bod"),
    ]:
        with pytest.raises(IntegrityError, match="signature"):
            guard.admit(changed, tag, body)
    with pytest.raises(StaleError):
        guard.admit(header._replace(nonce=bytes(16)), tag, b"body")
    guard.admit(header, tag, b"body")


def test_another_secret_signs_differently() -> None:
    guard = Guard(SECRET)
    header = Header(guard.nonce, new_client(), 1)
    for other in (b"", SECRET + b"0", SECRET[:-1]):
        with pytest.raises(IntegrityError, match="signature"):
            guard.admit(header, Signer(other).question_tag(header, b"q"), b"q")


def test_a_question_is_no_answer_and_an_answer_is_no_question() -> None:
    signer = Signer(SECRET)
    header = Header(b"n" * 16, b"c" * 16, 1)
    question = signer.question_tag(header, b"body")
    assert signer.answer_tag(question, b"body") != question
    # even where the signed bytes behind the domain would be the same
    head = header.nonce + header.client + header.sequence.to_bytes(8, "big")
    assert signer.answer_tag(head[:32], head[32:] + b"body") != question


def test_an_answer_belongs_to_its_question() -> None:
    signer = Signer(SECRET)
    one = signer.question_tag(Header(b"n" * 16, b"c" * 16, 1), b"q")
    two = signer.question_tag(Header(b"n" * 16, b"c" * 16, 2), b"q")
    assert signer.answer_tag(one, b"a") != signer.answer_tag(two, b"a")


@pytest.mark.parametrize("again", [5, 4, 1, 0])
def test_what_came_before_is_refused(again: int) -> None:
    guard, client = Guard(SECRET), new_client()
    for sequence in (1, 2, 5):
        _admit(guard, client, sequence)
    with pytest.raises(IntegrityError, match=f"question {again} came before"):
        _admit(guard, client, again)


def test_what_was_not_signed_does_not_count() -> None:
    guard, client = Guard(SECRET), new_client()
    with pytest.raises(IntegrityError):
        guard.admit(Header(guard.nonce, client, 2**64 - 1), bytes(32), b"q")
    _admit(guard, client, 1)


def test_memory_is_bounded_and_nothing_forgotten_can_be_replayed() -> None:
    guard = Guard(SECRET, max_clients=3)
    first = new_client()
    nonce = guard.nonce
    tag = _question(guard, first, 1)
    guard.admit(Header(nonce, first, 1), tag, b"q")
    for _ in range(2):
        client = new_client()
        _admit(guard, client, 1)
    fourth = new_client()
    with pytest.raises(StaleError):
        _admit(guard, fourth, 1)
    assert guard.nonce != nonce
    with pytest.raises(StaleError):  # forgotten, and worth nothing
        guard.admit(Header(nonce, first, 1), tag, b"q")
    _admit(guard, fourth, 2)


def test_connections_that_are_known_do_not_fill_the_memory() -> None:
    guard, client = Guard(SECRET, max_clients=1), new_client()
    for sequence in range(1, 10):
        _admit(guard, client, sequence)


def test_two_starts_have_different_nonces() -> None:
    assert Guard(SECRET).nonce != Guard(SECRET).nonce
