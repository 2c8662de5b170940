"""Runs of bytes are exactly a block's bytes, or the layout is refused."""

import itertools
import math
import re
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvplugin.errors import LayoutMismatchError
from kvplugin.layout import MAX_RUNS, PageLayout, Run, TensorLayout, block_runs

# -- the reference: every byte of every element ------------------------------------


def bytes_of_tensor(tensor: TensorLayout) -> np.ndarray:
    """Addresses in the shape of the tensor, with a last axis for an element's bytes."""
    steps = [
        np.arange(size) * stride
        for size, stride in zip(
            (*tensor.shape, tensor.itemsize), (*tensor.strides, 1), strict=True
        )
    ]
    return sum(np.ix_(*steps))


def bytes_of_block(tensor: TensorLayout, page: PageLayout, block: int) -> np.ndarray:
    parts = tensor.shape[tensor.block_axis] // page.num_blocks
    entries = np.arange(block * parts, (block + 1) * parts)
    return bytes_of_tensor(tensor).take(entries, axis=tensor.block_axis).ravel()


def bytes_of_runs(runs: tuple[Run, ...], block: int) -> np.ndarray:
    starts = [run.offset + block * run.stride for run in runs]
    return np.concatenate(
        [start + np.arange(run.nbytes) for start, run in zip(starts, runs, strict=True)]
    )


def check_runs(tensor: TensorLayout, page: PageLayout) -> tuple[Run, ...]:
    runs = block_runs(tensor, page)
    for block in range(page.num_blocks):
        expected = np.sort(bytes_of_block(tensor, page, block))
        assert np.array_equal(np.sort(bytes_of_runs(runs, block)), expected)
    return runs


# -- layouts that exist ------------------------------------------------------------


class Nested(NamedTuple):
    """A tensor without overlap: each axis steps over all that is inside it."""

    tensor: TensorLayout
    page: PageLayout


@st.composite
def nested_layouts(draw: st.DrawFn) -> Nested:
    """Any order of axes in memory, any gaps between their entries (so that nothing is
    aligned), any number of kernel blocks in a block."""
    num_blocks, parts = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    shape = draw(st.lists(st.integers(1, 4), max_size=3))
    block_axis = draw(st.integers(0, len(shape)))
    shape.insert(block_axis, num_blocks * parts)
    itemsize = draw(st.sampled_from([1, 2, 4]))
    strides, span = [0] * len(shape), itemsize
    for axis in draw(st.permutations(range(len(shape)))):
        strides[axis] = span + draw(st.sampled_from([0, 0, 0, 1, 5, 8]))
        span = strides[axis] * shape[axis]
    tensor = TensorLayout(tuple(shape), tuple(strides), itemsize, "any", block_axis)
    nbytes = math.prod(shape) // num_blocks * itemsize
    padding = draw(st.sampled_from([0, 3]))
    return Nested(tensor, PageLayout(nbytes + padding, num_blocks, padded=padding > 0))


@settings(deadline=None)
@given(nested_layouts())
def test_runs_of_any_order_gaps_and_kernel_blocks_are_the_bytes_of_the_block(
    layout: Nested,
) -> None:
    runs = check_runs(*layout)
    event(f"{min(len(runs), 5)} runs")


def test_runs_of_dense_tensor_are_its_block_in_every_order_of_axes() -> None:
    # Blocks, K and V, tokens, heads, head size.
    shape, itemsize = (4, 2, 3, 2, 4), 2
    for order in itertools.permutations(range(len(shape))):
        strides, span = [0] * len(shape), itemsize
        for axis in reversed(order):
            strides[axis], span = span, span * shape[axis]
        tensor = TensorLayout(shape, tuple(strides), itemsize, "bfloat16", 0)
        runs = check_runs(tensor, PageLayout(96, 4))
        # Axes outside the blocks cut them in pieces, axes inside do not.
        outside = order[: order.index(0)]
        assert len(runs) == math.prod(shape[axis] for axis in outside)


def test_dense_pages_are_one_run() -> None:
    tensor = TensorLayout((10, 2, 16, 3, 64), (12288, 6144, 384, 128, 2), 2, "half", 0)
    assert block_runs(tensor, PageLayout(12288, 10)) == (Run(0, 12288, 12288),)


def test_keys_before_all_values_are_two_runs() -> None:
    tensor = TensorLayout((2, 10, 16, 64), (20480, 2048, 128, 2), 2, "half", 1)
    page = PageLayout(4096, 10)
    assert block_runs(tensor, page) == (Run(0, 2048, 2048), Run(20480, 2048, 2048))


def test_runs_are_in_the_order_of_the_axes_not_of_memory() -> None:
    # Two places that agree on the axes agree on which run is which, however each
    # of them lies in memory.
    shape = (2, 3, 4, 1)
    tokens_outside = TensorLayout(shape, (3, 24, 6, 1), 1, "int8", 1)
    heads_outside = TensorLayout(shape, (12, 24, 3, 1), 1, "int8", 1)
    page = PageLayout(8, 3)
    by_head = [run.offset for run in check_runs(heads_outside, page)]
    by_token = [run.offset for run in check_runs(tokens_outside, page)]
    assert by_head == [0, 3, 6, 9, 12, 15, 18, 21]
    assert by_token == [0, 6, 12, 18, 3, 9, 15, 21]


def test_kernel_blocks_that_lie_together_are_one_run() -> None:
    tensor = TensorLayout((12, 8), (8, 1), 1, "int8", 0)
    assert block_runs(tensor, PageLayout(24, 4)) == (Run(0, 24, 24),)


def test_kernel_blocks_with_gaps_are_a_run_each() -> None:
    tensor = TensorLayout((4, 8), (10, 1), 1, "int8", 0)
    assert block_runs(tensor, PageLayout(16, 2)) == (Run(0, 20, 8), Run(10, 20, 8))


def test_padding_between_pages_is_not_moved() -> None:
    tensor = TensorLayout((3, 8), (32, 2), 2, "half", 0)
    assert block_runs(tensor, PageLayout(32, 3, padded=True)) == (Run(0, 32, 16),)


def test_stride_of_an_axis_of_one_says_nothing() -> None:
    tensor = TensorLayout((3, 1, 8), (8, 0, 1), 1, "int8", 0)
    assert block_runs(tensor, PageLayout(8, 3)) == (Run(0, 8, 8),)


# -- layouts that are refused ------------------------------------------------------


def refusal(tensor: TensorLayout, page: PageLayout) -> str:
    with pytest.raises(LayoutMismatchError) as raised:
        block_runs(tensor, page)
    message = str(raised.value)
    assert repr(tensor) in message
    assert repr(page) in message
    return message


PAGE = PageLayout(24, 4, interior="backend/half")


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (TensorLayout((4, 12), (24, 2, 2), 2, "half", 0), "do not agree"),
        (TensorLayout((4, 12), (24, 2), 2, "half", 2), "do not agree"),
        (TensorLayout((4, 12), (24, 2), 2, "half", -1), "do not agree"),
        (TensorLayout((), (), 2, "half", 0), "do not agree"),
        (TensorLayout((4, 12), (24, -2), 2, "half", 0), "negative"),
        (TensorLayout((4, 0), (24, 2), 2, "half", 0), "empty"),
        (TensorLayout((0, 12), (24, 2), 2, "half", 0), "empty"),
        (TensorLayout((6, 12), (24, 2), 2, "half", 0), "does not count 4 blocks"),
        (TensorLayout((2, 12), (24, 2), 2, "half", 0), "does not count 4 blocks"),
        (TensorLayout((4, 12), (12, 1), 1, "int8", 0), "12 bytes .* and 24 in"),
        (TensorLayout((4, 13), (26, 2), 2, "half", 0), "26 bytes .* and 24 in"),
        (TensorLayout((4, 12), (22, 2), 2, "half", 0), "overlap"),
        (TensorLayout((4, 12), (0, 2), 2, "half", 0), "overlap"),
        (TensorLayout((4, 3, 4), (24, 6, 2), 2, "half", 0), "overlap"),
        (TensorLayout((4, 12), (24, 1), 2, "half", 0), "overlap"),
    ],
    ids=str,
)
def test_refusal_says_why_and_shows_both_sides(tensor: TensorLayout, why: str) -> None:
    assert re.search(why, refusal(tensor, PAGE))


def test_unknown_layout_of_the_same_size_is_refused() -> None:
    # An engine that moves K and V outside of the blocks leaves every size as it was.
    known = TensorLayout((10, 2, 16, 64), (4096, 2048, 128, 2), 2, "half", 0)
    unknown = TensorLayout((2, 10, 16, 64), (20480, 2048, 128, 2), 2, "half", 0)
    page = PageLayout(4096, 10)
    assert math.prod(known.shape) == math.prod(unknown.shape)
    check_runs(known, page)
    assert "axis 0 does not count 10 blocks" in refusal(unknown, page)


def test_page_smaller_than_promised_is_refused_unless_padded() -> None:
    tensor = TensorLayout((3, 8), (32, 2), 2, "half", 0)
    assert "16 bytes in the tensor and 32" in refusal(tensor, PageLayout(32, 3))
    check_runs(tensor, PageLayout(32, 3, padded=True))


def test_page_larger_than_promised_is_refused_even_if_padded() -> None:
    tensor = TensorLayout((3, 8), (32, 2), 2, "half", 0)
    assert "16 bytes" in refusal(tensor, PageLayout(15, 3, padded=True))


def test_blocks_that_overlap_later_blocks_are_refused() -> None:
    # The values of block 0 are the keys of block 3.
    tensor = TensorLayout((2, 4, 8), (24, 8, 1), 1, "int8", 1)
    assert "overlap" in refusal(tensor, PageLayout(16, 4))


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 40)), min_size=1, max_size=3),
    st.integers(1, 4),
    st.data(),
)
def test_no_byte_has_two_places_in_an_accepted_layout(
    axes: list[tuple[int, int]], itemsize: int, data: st.DataObject
) -> None:
    shape, strides = zip(*axes, strict=True)
    block_axis = data.draw(st.integers(0, len(axes) - 1))
    num_blocks = shape[block_axis]
    tensor = TensorLayout(shape, strides, itemsize, "any", block_axis)
    page = PageLayout(math.prod(shape) // num_blocks * itemsize, num_blocks)
    try:
        check_runs(tensor, page)
    except LayoutMismatchError:
        return
    addresses = bytes_of_tensor(tensor).ravel()
    assert len(set(addresses)) == len(addresses)


def test_page_in_too_many_pieces_is_refused() -> None:
    def scattered(pieces: int) -> TensorLayout:
        return TensorLayout((2, pieces, 1), (2 * pieces, 2, 1), 1, "int8", 0)

    assert len(block_runs(scattered(MAX_RUNS), PageLayout(MAX_RUNS, 2))) == MAX_RUNS
    more = MAX_RUNS + 1
    assert f"{more} runs" in refusal(scattered(more), PageLayout(more, 2))
