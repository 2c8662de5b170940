"""Lines of a trace, plain or gzipped, of bounded length."""

import gzip
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, TypeVar, cast

import msgspec

from kvplugin.replay.trace import TraceError

MAX_LINE_BYTES: Final = 1 << 26
"""A request of a million 16-token blocks fits."""

_CHUNK: Final = 1 << 16

_GZIP_MAGIC: Final = b"\x1f\x8b"

T = TypeVar("T")


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The file's bytes, decompressed where they are gzipped, without byte order mark.

    Raises:
        TraceError: the file cannot be read, now or while it is.
    """
    try:
        with path.open("rb") as plain:
            magic = plain.read(len(_GZIP_MAGIC))
            plain.seek(0)
            if magic != _GZIP_MAGIC:
                yield _behind_mark(plain)
                return
            with gzip.open(plain) as unpacked:
                yield _behind_mark(cast("IO[bytes]", unpacked))
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error


def _behind_mark(file: IO[bytes]) -> IO[bytes]:
    """The file behind the byte order mark that some editors put in front."""
    if file.read(len(BOM_UTF8)) != BOM_UTF8:
        file.seek(0)
    return file


def first_byte(path: Path) -> bytes:
    """The first byte that is no white space; none if there is none.

    Raises:
        TraceError: the file cannot be read.
    """
    with opened(path) as file:
        while chunk := file.read(_CHUNK):
            if found := chunk.lstrip():
                return found[:1]
    return b""


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1.

    Raises:
        TraceError: the file cannot be read, or a line is too long.
    """
    with opened(path) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise TraceError(
                    f"{path}, line {number}: longer than {MAX_LINE_BYTES} bytes; is "
                    f"this a trace of one JSON object a line?"
                )
            if line.strip():
                yield number, line


def decoded(
    path: Path, lines: Iterator[tuple[int, bytes]], kind: type[T]
) -> Iterator[tuple[int, T]]:
    """Each line as an object of type `kind`, with its number.

    Raises:
        TraceError: a line is no such object; says where it differs.
    """
    decode: Callable[[bytes], T] = msgspec.json.Decoder(kind).decode
    for number, line in lines:
        try:
            yield number, decode(line)
        except (msgspec.MsgspecError, ValueError) as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
