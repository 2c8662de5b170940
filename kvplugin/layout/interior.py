"""A page whose interior is known: where each row of each token and head lies.

A *row* is what one token keeps for one head, contiguous bytes: a key, a value, both in
one, or a latent. Backends differ in the order of everything outside a row.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvplugin.errors import LayoutMismatchError
from kvplugin.layout.runs import TensorLayout, overlaps

AXES: Final = ("kv", "block", "token", "head", "dim")
"""What an axis of a KV tensor may count: key and value, blocks, tokens of a block,
heads, elements of a row."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one kind. All numbers are bytes."""

    name: str
    """``k``, ``v``, or ``kv`` for rows that are not told apart (a latent)."""
    offset: int
    """Of block 0's first row."""
    block_stride: int
    token_stride: int
    head_stride: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One layer's blocks, down to the row.

    Raises:
        LayoutMismatchError: a size is not positive, an offset is negative, rows
            overlap, or `split` does not divide the blocks.
    """

    parts: tuple[Part, ...]
    num_blocks: int
    """As the kernels count: `split` of them are one block of the pool."""
    tokens: int
    """Of one of these."""
    heads: int
    dtype: str = ""
    """Of an element; rows of different dtypes are not converted into each other."""
    name: str = ""
    """For messages, e.g. ``FlashAttention HND``."""
    split: int = 1
    """Blocks that one id of the pool stands for: id b is blocks b*split to
    b*split + split-1."""

    def __post_init__(self) -> None:
        """Refuse what describes no memory."""
        sizes = (self.num_blocks, self.tokens, self.heads, len(self.parts), self.split)
        if min(sizes) < 1:
            raise LayoutMismatchError(f"a KV layout with an empty axis: {self}")
        if self.num_blocks % self.split:
            raise LayoutMismatchError(
                f"split {self.split} does not divide the blocks of {self}"
            )
        for part in self.parts:
            axes = self._axes(part)
            if part.offset < 0 or part.row_bytes < 1 or overlaps(axes, part.row_bytes):
                raise LayoutMismatchError(f"rows of part {part.name!r} overlap: {self}")
        for one, other in itertools.combinations(self.parts, 2):
            if not self._are_apart(*sorted((one, other), key=lambda p: p.offset)):
                raise LayoutMismatchError(
                    f"rows of parts {one.name!r} and {other.name!r} overlap: {self}"
                )

    def _axes(self, part: Part) -> tuple[tuple[int, int], ...]:
        return (
            (self.num_blocks, part.block_stride),
            (self.tokens, part.token_stride),
            (self.heads, part.head_stride),
        )

    def _are_apart(self, first: Part, second: Part) -> bool:
        """Whether rows of two parts, the first at the smaller offset, never meet: they
        lie one after the other; or what steps by less than their distance fits into
        it, and what steps by more is alike in both and steps over both."""
        distance = second.offset - first.offset
        if self._span(first) <= distance:
            return True
        outside, other = (
            [(n, step) for n, step in self._axes(part) if n > 1 and step >= distance]
            for part in (first, second)
        )
        return (
            self._span(first, distance) <= distance
            and outside == other
            and not overlaps(outside, distance + self._span(second, distance))
        )

    def _span(self, part: Part, below: float = math.inf) -> int:
        """Bytes of all rows that are reached by steps below this."""
        steps = [(n, step) for n, step in self._axes(part) if step < below]
        return part.row_bytes + sum((n - 1) * step for n, step in steps)

    def row(self, part: int, block: int, token: int, head: int) -> int:
        """Offset in bytes of one row; `block` as the kernels count."""
        p = self.parts[part]
        return (
            p.offset
            + block * p.block_stride
            + token * p.token_stride
            + head * p.head_stride
        )

    @classmethod
    def of_tensor(
        cls,
        tensor: TensorLayout,
        axes: Sequence[str],
        *,
        key_size: int | None = None,
        name: str = "",
        split: int = 1,
    ) -> "KVLayout":
        """The rows of a strided view.

        Args:
            tensor: the view; its last dimension of `dim` is contiguous.
            axes: what each axis counts, from `AXES`; `block`, `token` and `dim` must
                be there, without `head` there is one.
            key_size: elements of a key where a row holds key and value side by side;
                None where it holds one of them, or a latent.
            name: for messages.
            split: blocks of the view to a block of the pool.

        Raises:
            LayoutMismatchError: the axes are not these, a row is not contiguous, or
                `key_size` does not split it.
        """
        if (
            len(axes) != len(tensor.shape)
            or len(set(axes)) != len(axes)
            or not {"block", "token", "dim"} <= set(axes) <= set(AXES)
        ):
            raise LayoutMismatchError(
                f"axes {tuple(axes)} do not describe a KV tensor {tensor}: name each "
                f"axis once, from {AXES}"
            )
        sizes = dict(zip(axes, tensor.shape, strict=True))
        steps = dict(zip(axes, tensor.strides, strict=True))
        if steps["dim"] != tensor.itemsize and sizes["dim"] > 1:
            raise LayoutMismatchError(f"rows are not contiguous: {tensor}")
        row_bytes = sizes["dim"] * tensor.itemsize
        if "kv" in sizes and (sizes["kv"] != 2 or key_size is not None):
            raise LayoutMismatchError(
                f"axis kv has {sizes['kv']} entries, and key_size is {key_size}: a "
                f"tensor either has an axis of 2 or rows to split, {tensor}"
            )
        if "kv" in sizes:
            rows = [("k", 0, row_bytes), ("v", steps["kv"], row_bytes)]
        elif key_size is None:
            rows = [("kv", 0, row_bytes)]
        elif 0 < key_size < sizes["dim"]:
            key_bytes = key_size * tensor.itemsize
            rows = [("k", 0, key_bytes), ("v", key_bytes, row_bytes - key_bytes)]
        else:
            raise LayoutMismatchError(
                f"key_size {key_size} does not split rows of {sizes['dim']} elements"
            )
        return cls(
            tuple(
                Part(
                    part,
                    offset,
                    steps["block"],
                    steps["token"],
                    steps.get("head", row_bytes),
                    nbytes,
                )
                for part, offset, nbytes in rows
            ),
            sizes["block"],
            sizes["token"],
            sizes.get("head", 1),
            tensor.dtype,
            name,
            split,
        )
