"""Hashes of blocks that are several times as long as what a hash covers.

A request has one list of hashes; groups with longer blocks read it through a view.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Final, Literal, overload

from kvplugin.errors import ConfigError

CoarseRule = Literal["last", "concat"]
"""last: a chained hash covers all before it, so that of the last piece stands for the
block (vLLM 0.32 and our own formats). concat: the hashes of all pieces in a row (vLLM
0.19), as many times as long."""


def coarse_hashes(
    hashes: Sequence[bytes],
    hash_block_size: int,
    block_size: int,
    rule: CoarseRule = "last",
) -> Sequence[bytes]:
    """`hashes`, one per `hash_block_size` tokens, seen as one per `block_size`.

    The view copies nothing and grows with `hashes`; equal sizes give `hashes` itself.

    Raises:
        ConfigError: `block_size` is no multiple of `hash_block_size`.
    """
    if block_size < 1 or hash_block_size < 1 or block_size % hash_block_size:
        raise ConfigError(
            f"block size {block_size} is no multiple of the hash block size "
            f"{hash_block_size}: choose block sizes of which one divides the others"
        )
    pieces = block_size // hash_block_size
    if pieces == 1:
        return hashes
    return (
        LastHashes(hashes, pieces) if rule == "last" else JoinedHashes(hashes, pieces)
    )


class _View(Sequence[bytes]):
    """`pieces` hashes of `fine` make one; an incomplete last one does not count."""

    __slots__ = ("_fine", "_pieces")

    def __init__(self, fine: Sequence[bytes], pieces: int) -> None:
        self._fine: Final = fine
        self._pieces: Final = pieces

    def __len__(self) -> int:
        return len(self._fine) // self._pieces

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        numbers = range(len(self))[index]
        if isinstance(numbers, int):
            return self._at(numbers)
        return [self._at(number) for number in numbers]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self[:])

    @abstractmethod
    def _at(self, number: int) -> bytes:
        """One hash."""


class LastHashes(_View):
    """The hash of a block is that of its last piece."""

    __slots__ = ()

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice) and index.step in (None, 1):
            # One slice of the list below, instead of a call a block.
            start, stop, _ = index.indices(len(self))
            pieces = self._pieces
            return list(self._fine[(start + 1) * pieces - 1 : stop * pieces : pieces])
        return super().__getitem__(index)

    def _at(self, number: int) -> bytes:
        return self._fine[(number + 1) * self._pieces - 1]


class JoinedHashes(_View):
    """The hash of a block is those of its pieces in a row."""

    __slots__ = ()

    def _at(self, number: int) -> bytes:
        start = number * self._pieces
        return b"".join(self._fine[start : start + self._pieces])
