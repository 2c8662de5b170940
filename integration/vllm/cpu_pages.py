"""What is inside a page of CPU attention, found out by writing into one.

vLLM's CPU attention packs keys and values for the machine's instruction set and
documents no order. So one block is written with vLLM's own operation, once for each
digit of its elements' numbers: where the digits come out is where the element lies.
"""

import hashlib
import inspect
import math
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvplugin.errors import LayoutMismatchError
from kvplugin.layout import KVLayout, Part, TensorLayout

Positions = NDArray[np.int64]
"""[tokens of a block, elements of a head]: places in a page, counted in elements."""

_BLOCKS: Final = 2
_HEADS: Final = 2
"""Of the cache that is written: only the last page of it may change."""
_BASE: Final = 8
"""Of the digits. One to eight are exact in every dtype, e5m2 included."""
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Bit patterns of elements, by their bytes: in the order of what they stand for."""


@dataclass(frozen=True, slots=True)
class PageKind:
    """What decides the inside of a page."""

    dtype: torch.dtype
    """Of keys and values as they are computed."""
    cache_dtype: torch.dtype
    """Of the cache's elements."""
    kv_cache_dtype: str
    """vLLM's name for how they are stored."""
    block_size: int
    head_size: int

    @property
    def isa(self) -> str:
        """vLLM's name for the packing; `ValueError` and the like if it has none."""
        from vllm.v1.attention.backends import cpu_attn

        choose = cpu_attn._get_attn_isa
        arguments = (self.dtype, self.block_size, self.head_size, self.kv_cache_dtype)
        return str(choose(*arguments[: len(inspect.signature(choose).parameters)]))


class Pieces(NamedTuple):
    """Where the keys (or values) of a page lie: those of the first `tokens` tokens are
    `columns` runs of `size` elements, `stride` apart; those of as many more begin
    `step` elements behind, in the same order, and so on."""

    tokens: int
    step: int
    columns: int
    stride: int
    size: int
    order: str
    """Names which element of which token stands where in these pieces; empty where
    they are in order."""


@dataclass(frozen=True, slots=True)
class PageOrder:
    """A page of one block and head, keys in its first half and values in the other."""

    isa: str
    key: Pieces
    value: Pieces
    """Pieces of as many tokens as `key`'s."""

    @property
    def packing(self) -> str:
        """`kvplugin.layout.KVLayout.packing`."""
        orders = (self.key.order, self.value.order)
        return "/".join(orders) if any(orders) else ""


def probe(kind: PageKind) -> PageOrder:
    """Find the order of a page [block, head].

    Raises:
        LayoutMismatchError: nothing regular comes out.
    """
    return probe_as(kind, kind.isa)


def probe_as(kind: PageKind, isa: str) -> PageOrder:
    """`probe` with the packing of another instruction set."""
    half = kind.block_size * kind.head_size
    numbers = np.arange(half)
    found = np.zeros(2 * half, dtype=np.int64)
    digits: Positions | None = None
    for power in (_BASE**n for n in range(_digits_of(half - 1))):
        rows = numbers // power % _BASE + 1
        codes = _written(kind, isa, rows, rows)
        if digits is None:
            digits = np.unique(codes)  # the lowest digit has all values
        found += np.searchsorted(digits, codes) * power
    is_key = _written(kind, isa, np.ones_like(numbers), np.zeros_like(numbers)) != 0
    if is_key[half:].any() or not is_key[:half].all():
        raise LayoutMismatchError(f"keys and values share a half of a page: {kind}")
    places = [_places(kind, part) for part in np.split(found, 2)]
    tokens = math.lcm(*(find_pieces(part).tokens for part in places))
    return PageOrder(isa, *(find_pieces(part, tokens) for part in places))


def find_pieces(places: Positions, unit: int = 1) -> Pieces:
    """The regularity in the places of half a page.

    Args:
        places: where each element of each token lies.
        unit: what `Pieces.tokens` has to be a multiple of.

    Raises:
        LayoutMismatchError: there is none.
    """
    tokens, first = len(places), int(places.min())
    for count in (n for n in range(unit, tokens + 1, unit) if tokens % n == 0):
        rows = places.reshape(tokens // count, count, -1)
        steps = np.unique(np.diff(rows, axis=0))
        if len(steps) > 1 or rows[0].min() != first:
            continue
        step = int(steps[0]) if len(steps) else places.size
        if (found := _pieces_of(rows[0], step)) is not None:
            return found
    raise LayoutMismatchError("the elements of a page lie in no regular order")


def _pieces_of(places: Positions, step: int) -> Pieces | None:
    """Pieces of the first tokens; None if they are not all alike."""
    order = np.argsort(places, axis=None)
    in_memory = places.reshape(-1)[order]
    starts = np.flatnonzero(np.diff(in_memory, prepend=-2) != 1)
    sizes = np.diff(np.append(starts, places.size))
    strides = np.unique(np.diff(in_memory[starts]))
    if len(np.unique(sizes)) != 1 or len(strides) > 1:
        return None
    in_order = np.array_equal(order, np.arange(places.size))
    return Pieces(
        tokens=len(places),
        step=step,
        columns=len(starts),
        stride=int(strides[0]) if len(strides) else int(sizes[0]),
        size=int(sizes[0]),
        order="" if in_order else _digest(order),
    )


def _digest(order: Positions) -> str:
    return hashlib.sha256(order.astype("<i8").tobytes()).hexdigest()[:16]


def page_rows(order: PageOrder, tensor: TensorLayout, split: int) -> KVLayout:
    """Where the rows of a layer's cache lie.

    Args:
        order: of one of its pages.
        tensor: the cache, [blocks, heads, tokens, key and value], or of vLLM 0.19
            [key or value, blocks, heads, tokens, elements].
        split: blocks of the cache that are one of the pool.

    Raises:
        LayoutMismatchError: it is not such a cache.
    """
    apart = tensor.block_axis == 1
    *outer, blocks, heads, tokens, _ = range(len(tensor.shape))
    shape, strides, size = tensor.shape, tensor.strides, tensor.itemsize
    half = math.prod(shape[tokens:]) * size // (1 if apart else 2)
    page = half if apart else 2 * half
    inner = (shape[-1] * size, size)
    if len(outer) != apart or strides[tokens:] != inner or strides[heads] < page:
        raise LayoutMismatchError(f"not a cache of CPU attention: {tensor}")
    return KVLayout(
        parts=tuple(
            Part(
                name=name,
                offset=offset,
                block_stride=strides[blocks],
                token_stride=pieces.step * size,
                head_stride=strides[heads],
                row_bytes=pieces.columns * pieces.size * size,
                columns=pieces.columns,
                column_stride=pieces.stride * size,
            )
            for name, offset, pieces in (
                ("k", 0, order.key),
                ("v", strides[0] if apart else half, order.value),
            )
        ),
        num_blocks=shape[blocks],
        tokens=shape[tokens],
        heads=shape[heads],
        dtype=tensor.dtype,
        name=f"CPU attention, {order.isa}",
        split=split,
        tokens_per_row=order.key.tokens,
        packing=order.packing,
    )


def _digits_of(number: int) -> int:
    digits = 1
    while number >= _BASE**digits:
        digits += 1
    return digits


def _places(kind: PageKind, found: Positions) -> Positions:
    """Where each element of half a page lies.

    Args:
        kind: the page.
        found: the number of the element at each place.
    """
    places = np.empty_like(found)
    places[np.clip(found, 0, len(found) - 1)] = np.arange(len(found))
    if not np.array_equal(found[places], np.arange(len(found))):
        raise LayoutMismatchError(f"a page does not keep each element once: {kind}")
    return places.reshape(kind.block_size, kind.head_size)


def _written(kind: PageKind, isa: str, keys: Positions, values: Positions) -> Positions:
    """The last page of a cache after one block of numbers has been written.

    Returns:
        The elements as integers; zero is zero.
    """
    from vllm import _custom_ops as ops

    size, head_size = kind.block_size, kind.head_size
    cache = torch.zeros(_BLOCKS, _HEADS, 2 * size, head_size, dtype=kind.cache_dtype)
    rows = torch.zeros(2, size, _HEADS, head_size, dtype=kind.dtype)
    for target, numbers in zip(rows, (keys, values), strict=True):
        numbers = torch.from_numpy(numbers).reshape(size, head_size)
        target[:, -1] = numbers.to(kind.dtype)
    options: dict[str, Any] = {}
    if kind.kv_cache_dtype != "auto":
        options["kv_cache_dtype"] = kind.kv_cache_dtype
    ops.cpu_attn_reshape_and_cache(
        *rows,
        *cache.chunk(2, dim=2),
        torch.arange(size) + (_BLOCKS - 1) * size,
        isa,
        **options,
    )
    pages = cache.view(_WORDS[cache.element_size()]).flatten(0, 1).flatten(1)
    if pages[:-1].any():
        raise LayoutMismatchError(f"a page is not where its block and head are: {kind}")
    return pages[-1].numpy().astype(np.int64)
