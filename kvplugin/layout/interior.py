"""A page whose interior is known: where each row of each token and head lies.

A *row* is what one token keeps for one head: a key, a value, both in one, or a latent.
Mostly it is contiguous, and backends differ in the order of everything outside a row.
Two more things are known from pages that are packed for an instruction set:

- a row may be equal *columns* apart from each other. A key that lies transposed over
  its block has a column an element: the same element of the next token follows it.

      K of a block of 4 tokens, 3 elements each:   0.0 1.0 2.0 3.0   token.element
      token_stride = itemsize                      0.1 1.1 2.1 3.1
      column_stride = 4 * itemsize                 0.2 1.2 2.2 3.2

- a row may hold several neighbouring tokens (`KVLayout.tokens_per_row`) in an order
  that `KVLayout.packing` names and nobody here knows. Such rows move as they are.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvplugin.errors import LayoutMismatchError
from kvplugin.layout.runs import TensorLayout, overlaps

MAX_PARTS: Final = 16
"""Kinds of rows of a layer: keys, values, their scales."""

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
    """From a row to the next one of its head: of the next token, or of the token
    `KVLayout.tokens_per_row` further."""
    head_stride: int
    row_bytes: int
    """Of all columns."""
    columns: int = 1
    """Equal pieces of a row."""
    column_stride: int = 0
    """From one to the next; means nothing where there is one."""

    @property
    def column_bytes(self) -> int:
        """Contiguous bytes of a row."""
        return self.row_bytes // self.columns


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One layer's blocks, down to the row.

    Raises:
        LayoutMismatchError: a size is not positive, an offset is negative, rows
            overlap, there are more than `MAX_PARTS` parts, or a number does not
            divide what it has to: `split` the blocks, `tokens_per_row` the tokens,
            columns a row.
    """

    parts: tuple[Part, ...]
    num_blocks: int
    """As the kernels count: `split` of them are one block of the pool."""
    tokens: int
    """Of one of these, `tokens_per_row` of them to a row."""
    heads: int
    dtype: str = ""
    """Of an element; rows of different dtypes are not converted into each other."""
    name: str = ""
    """For messages, e.g. ``FlashAttention HND``."""
    split: int = 1
    """Blocks that one id of the pool stands for: id b is blocks b*split to
    b*split + split-1."""
    tokens_per_row: int = 1
    """Neighbouring tokens that a row holds together."""
    packing: str = ""
    """Names the order of what is inside a row, where it is not one token's elements
    one after the other. Rows of different packings are not converted into each
    other."""

    def __post_init__(self) -> None:
        """Refuse what describes no memory."""
        if len(self.parts) > MAX_PARTS:
            raise LayoutMismatchError(
                f"a KV layout of {len(self.parts)} parts: there are {MAX_PARTS} at most"
            )
        self._check_sizes()
        for part in self.parts:
            axes = self._axes(part)
            if part.offset < 0 or overlaps(axes, part.column_bytes):
                raise LayoutMismatchError(f"rows of part {part.name!r} overlap: {self}")
        for one, other in itertools.combinations(self.parts, 2):
            if not self._are_apart(*sorted((one, other), key=lambda p: p.offset)):
                raise LayoutMismatchError(
                    f"rows of parts {one.name!r} and {other.name!r} overlap: {self}"
                )

    def _check_sizes(self) -> None:
        sizes = (self.num_blocks, self.tokens, self.heads, self.split)
        if min(*sizes, len(self.parts), self.tokens_per_row) < 1:
            raise LayoutMismatchError(f"a KV layout with an empty axis: {self}")
        if self.num_blocks % self.split:
            raise LayoutMismatchError(
                f"split {self.split} does not divide the blocks of {self}"
            )
        if self.tokens % self.tokens_per_row:
            raise LayoutMismatchError(
                f"tokens_per_row {self.tokens_per_row} does not divide the tokens of "
                f"{self}"
            )
        for part in self.parts:
            if min(part.columns, part.row_bytes) < 1 or part.row_bytes % part.columns:
                raise LayoutMismatchError(
                    f"rows of part {part.name!r} have {part.row_bytes} bytes, which "
                    f"are not {part.columns} equal columns: {self}"
                )

    @property
    def rows(self) -> int:
        """Rows of a block and head, as the kernels count blocks."""
        return self.tokens // self.tokens_per_row

    @property
    def pool_tokens(self) -> int:
        """Tokens of a block of the pool."""
        return self.tokens * self.split

    @property
    def pool_bytes(self) -> int:
        """Bytes of all rows of a block of the pool."""
        rows = self.rows * self.split * self.heads
        return rows * sum(part.row_bytes for part in self.parts)

    def _axes(self, part: Part) -> tuple[tuple[int, int], ...]:
        return (
            (self.num_blocks, part.block_stride),
            (self.rows, part.token_stride),
            (self.heads, part.head_stride),
            (part.columns, part.column_stride),
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
        return part.column_bytes + sum((n - 1) * step for n, step in steps)

    def row(self, part: int, block: int, token: int, head: int, column: int = 0) -> int:
        """Offset in bytes of the row that holds a token, or of one of its columns;
        `block` as the kernels count."""
        p = self.parts[part]
        return (
            p.offset
            + block * p.block_stride
            + token // self.tokens_per_row * p.token_stride
            + head * p.head_stride
            + column * p.column_stride
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
