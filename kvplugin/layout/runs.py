"""The bytes of a whole block, whatever they mean.

Two descriptions meet here. A `PageLayout` is what a layer's spec promises about one
block; a `TensorLayout` is what the attention backend made of it. `block_runs` turns
the pair into runs of bytes that a copy engine can move, or refuses, showing both.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvplugin.errors import LayoutMismatchError

MAX_RUNS: Final = 4096
"""Runs a block may fall into; a page in more pieces is not worth moving this way."""


@dataclass(frozen=True, slots=True)
class PageLayout:
    """One layer's page: a block's bytes for this layer."""

    page_bytes: int
    """What the layer's spec bills for one block."""
    num_blocks: int
    """Blocks of the engine's pool."""
    padded: bool = False
    """Whether the tensor may use less than `page_bytes` of each page."""
    interior: str = ""
    """Names what is inside a page (backend, dtype, instruction set); opaque."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A strided view of a layer's KV memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes between neighbours along each axis."""
    itemsize: int
    dtype: str
    block_axis: int
    """The axis that counts blocks (or equal parts of blocks, k a block)."""


class Run(NamedTuple):
    """Contiguous bytes that every block has: block b's start at offset + b*stride."""

    offset: int
    stride: int
    nbytes: int


def block_runs(tensor: TensorLayout, page: PageLayout) -> tuple[Run, ...]:
    """The runs that make up a block, in order of the view's axes.

    The block axis may count kernel blocks, k to a block of the engine: then block b
    is its entries b*k to b*k+k-1.

    Raises:
        LayoutMismatchError: the view is not one this arithmetic understands, or its
            blocks do not have the bytes that the page promises.
    """
    axes = len(tensor.shape)
    if axes != len(tensor.strides) or not 0 <= tensor.block_axis < axes:
        raise _refusal("axes, strides and block axis do not agree", tensor, page)
    if min(tensor.strides) < 0 or min(tensor.shape) <= 0:
        raise _refusal("a stride is negative or an axis empty", tensor, page)
    parts, rest = divmod(tensor.shape[tensor.block_axis], page.num_blocks)
    if rest:
        raise _refusal(
            f"axis {tensor.block_axis} does not count {page.num_blocks} blocks",
            tensor,
            page,
        )
    nbytes = math.prod(tensor.shape) // page.num_blocks * tensor.itemsize
    if nbytes > page.page_bytes or (nbytes < page.page_bytes and not page.padded):
        raise _refusal(
            f"a block has {nbytes} bytes in the tensor and {page.page_bytes} in the "
            "page",
            tensor,
            page,
        )
    return _runs_of(tensor, parts, page)


def _runs_of(tensor: TensorLayout, parts: int, page: PageLayout) -> tuple[Run, ...]:
    """Split the block axis, merge what is contiguous, list what is left."""
    part_stride = tensor.strides[tensor.block_axis]
    axes = list(zip(tensor.shape, tensor.strides, strict=True))
    if overlaps(axes, tensor.itemsize):
        raise _refusal("elements overlap or interleave", tensor, page)
    axes[tensor.block_axis] = (parts, part_stride)
    by_stride = sorted((a for a in axes if a[0] > 1), key=lambda a: -a[1])
    nbytes = tensor.itemsize
    while by_stride and by_stride[-1][1] == nbytes:
        nbytes *= by_stride.pop()[0]
    outer = [a for a in axes if a in by_stride]
    count = math.prod(size for size, _ in outer)
    if count > MAX_RUNS:
        raise _refusal(f"a block falls into {count} runs of bytes", tensor, page)
    offsets = [
        sum(steps)
        for steps in itertools.product(
            *([i * stride for i in range(size)] for size, stride in outer)
        )
    ]
    # A single block may have any stride, as nothing follows it.
    least = nbytes if page.num_blocks == 1 else 0
    stride = max(part_stride * parts, least)
    return tuple(Run(offset, stride, nbytes) for offset in offsets)


def overlaps(axes: Iterable[tuple[int, int]], itemsize: int) -> bool:
    """Whether some axis (extent, stride) steps by less than all inside it span."""
    span = itemsize
    for size, stride in sorted(axes, key=lambda axis: axis[1]):
        if size > 1:
            if stride < span:
                return True
            span += (size - 1) * stride
    return False


def _refusal(why: str, tensor: TensorLayout, page: PageLayout) -> LayoutMismatchError:
    return LayoutMismatchError(
        f"KV layout refused: {why}. Tensor: {tensor}. Expected page: {page}."
    )
