"""What a conversion of KV layouts must do, from `KVLayout.row` alone.

It knows only where one row of one token and head lies, and shares no stride arithmetic
with the plans that engines execute.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from kvplugin.layout import Conversion, HeadSlice, KVLayout, TensorLayout


@dataclass(frozen=True)
class Shape:
    """What a layer keeps, whatever the order."""

    blocks: int
    tokens: int
    heads: int
    dim: int
    dtype: torch.dtype = torch.bfloat16


def layout(order: str, shape: Shape, key_size: int | None = None) -> KVLayout:
    """A dense tensor whose axes lie in memory as `order` says, outermost first.

    Letters: c for key and value, b blocks, t tokens, h heads; rows are innermost.
    """
    sizes = {"c": 2, "b": shape.blocks, "t": shape.tokens, "h": shape.heads}
    names = {"c": "kv", "b": "block", "t": "token", "h": "head"}
    itemsize = shape.dtype.itemsize
    strides, step = [itemsize], shape.dim * itemsize
    for axis in reversed(order):
        strides.insert(0, step)
        step *= sizes[axis]
    tensor = TensorLayout(
        (*(sizes[axis] for axis in order), shape.dim),
        tuple(strides),
        itemsize,
        str(shape.dtype),
        order.index("b"),
    )
    axes = (*(names[axis] for axis in order), "dim")
    return KVLayout.of_tensor(tensor, axes, key_size=key_size, name=order)


def span(side: KVLayout) -> int:
    """Bytes from the first to the last one that a row has."""
    last = (side.num_blocks - 1, side.tokens - 1, side.heads - 1)
    return max(
        side.row(part, *last) + side.parts[part].row_bytes
        for part in range(len(side.parts))
    )


def rows_of(side: KVLayout) -> Iterator[tuple[int, int, int, int]]:
    """(part, block, token, head) of every row."""
    return itertools.product(
        range(len(side.parts)),
        range(side.num_blocks),
        range(side.tokens),
        range(side.heads),
    )


def fill(memory: torch.Tensor, side: KVLayout, itemsize: int) -> None:
    """Elements that encode where they are; no two rows are alike."""
    seen = set()
    for row in rows_of(side):
        offset, nbytes = side.row(*row), side.parts[row[0]].row_bytes
        place = np.ravel_multi_index(row, (2, 1024, 1024, 1024))
        codes = (np.uint64(place) << np.uint64(12)) + np.arange(
            -(-nbytes // itemsize), dtype=np.uint64
        )
        # A bijection whose upper bits depend on all of the code.
        mixed = codes * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(64 - 8 * itemsize)
        content = mixed.astype(f"<u{itemsize}").tobytes()[:nbytes]
        memory[offset : offset + nbytes] = torch.frombuffer(
            bytearray(content), dtype=torch.uint8
        )
        seen.add(content)
    if min(part.row_bytes for part in side.parts) >= 8:
        assert len(seen) == len(list(rows_of(side)))


def moves(
    plan: Conversion, heads: HeadSlice, source_chunk: int, target_chunk: int
) -> Iterator[tuple[tuple[int, int, int, int], tuple[int, int, int, int]]]:
    """Which row goes to which, token by token and head by head."""
    size = plan.chunk_tokens
    first = divmod(source_chunk * size, plan.source.tokens)
    last = divmod(target_chunk * size, plan.target.tokens)
    for part in range(len(plan.source.parts)):
        for token in range(size):
            for head in range(heads.num_heads):
                yield (
                    (part, first[0], first[1] + token, heads.source_first + head),
                    (part, last[0], last[1] + token, heads.target_first + head),
                )
