"""What can't be converted is refused, and the message shows both sides."""

import numpy as np
import pytest

from kvplugin.errors import LayoutMismatchError
from kvplugin.layout import (
    HeadSlice,
    KVLayout,
    Part,
    TensorLayout,
    head_slices,
    plan_conversion,
)
from tests.core.kv_caches import Cache, Sizes


def tensor(
    shape: tuple[int, ...], strides: tuple[int, ...] | None = None
) -> TensorLayout:
    array = np.zeros(shape, np.uint16)
    return TensorLayout(shape, strides or array.strides, 2, "bf16", 0)


@pytest.mark.parametrize(
    ("source", "target", "why"),
    [
        (Sizes(2, 4, 4), Sizes(2, 4, 4, "uint16"), "their rows differ"),
        (Sizes(2, 4, 4, "int32"), Sizes(2, 4, 4), "their rows differ"),
        (Sizes(2, 4, 4), Sizes(2, 5, 5), "their rows differ"),
        (Sizes(2, 4, 4), Sizes(4, 4, 4), "they have different numbers of heads"),
    ],
)
def test_refusals_show_both_sides(source: Sizes, target: Sizes, why: str) -> None:
    sides = Cache("CPU", source, 2, 4).layout, Cache("DiffKV HND", target, 2, 4).layout
    with pytest.raises(LayoutMismatchError, match=why) as refused:
        plan_conversion(*sides)
    assert f"Source: {sides[0]}. Target: {sides[1]}." in str(refused.value)


def test_keys_and_values_do_not_become_a_latent() -> None:
    latent = Cache("MLA", Sizes(1, 4, 4), 2, 4).layout
    pair = Cache("CPU", Sizes(1, 4, 4), 2, 4).layout
    with pytest.raises(LayoutMismatchError, match="their rows differ"):
        plan_conversion(pair, latent)


@pytest.mark.parametrize(
    "heads", [(0, 0, 3), (1, 0, 2), (0, 1, 2), (-1, 0, 1), (0,) * 3]
)
def test_heads_that_are_not_there(heads: tuple[int, int, int]) -> None:
    layout = Cache("CPU", Sizes(2, 4, 4), 2, 4).layout
    with pytest.raises(
        LayoutMismatchError, match=r"HeadSlice.* is not among"
    ) as refused:
        plan_conversion(layout, layout, HeadSlice(*heads))
    assert str(refused.value).count(str(layout)) == 2


@pytest.mark.parametrize(
    ("num_heads", "source_ranks", "target_ranks", "target_rank", "message"),
    [
        (6, 4, 1, 0, "6 KV heads can't be split evenly over 4 ranks"),
        (6, 1, 4, 0, "6 KV heads can't be split evenly over 4 ranks"),
        (2, 3, 1, 0, "2 KV heads can't be split evenly over 3 ranks"),
        (2, 2, 2, 2, "rank 2 of 2 with 2 heads"),
        (2, 2, 2, -1, "rank -1 of 2 with 2 heads"),
        (0, 1, 1, 0, "rank 0 of 1 with 0 heads"),
        (2, 0, 1, 0, "rank 0 of 0 with 2 heads"),
    ],
)
def test_heads_that_can_not_be_split(
    num_heads: int, source_ranks: int, target_ranks: int, target_rank: int, message: str
) -> None:
    with pytest.raises(LayoutMismatchError, match=message):
        head_slices(num_heads, source_ranks, target_ranks, target_rank)


@pytest.mark.parametrize(
    ("view", "axes", "key_size", "message"),
    [
        (tensor((2, 3, 4)), "block token", None, "do not describe a KV tensor"),
        (tensor((2, 3, 4)), "block head dim", None, "do not describe a KV tensor"),
        (tensor((2, 3, 4)), "block token token", None, "do not describe"),
        (tensor((2, 3, 4, 5)), "block token layer dim", None, "do not describe"),
        (tensor((2, 3, 4), (24, 2, 6)), "block token dim", None, "not contiguous"),
        (tensor((3, 2, 4, 5)), "kv block token dim", None, "axis kv has 3 entries"),
        (tensor((2, 2, 4, 5)), "kv block token dim", 3, "key_size is 3"),
        (tensor((2, 4, 5)), "block token dim", 0, "key_size 0 does not split"),
        (tensor((2, 4, 5)), "block token dim", 5, "key_size 5 does not split"),
        (tensor((2, 3, 4), (20, 6, 2)), "block token dim", None, "rows .* overlap"),
        (tensor((2, 3, 4), (0, 8, 2)), "block token dim", None, "rows .* overlap"),
        (tensor((2, 3, 4), (-24, 8, 2)), "block token dim", None, "rows .* overlap"),
    ],
)
def test_tensors_that_hold_no_rows(
    view: TensorLayout, axes: str, key_size: int | None, message: str
) -> None:
    with pytest.raises(LayoutMismatchError, match=message):
        KVLayout.of_tensor(view, axes.split(), key_size=key_size)


@pytest.mark.parametrize(
    ("part", "counts", "message"),
    [
        (Part("k", 0, 32, 8, 8, 8), (0, 4, 1), "empty axis"),
        (Part("k", 0, 32, 8, 8, 8), (2, 4, 0), "empty axis"),
        (Part("k", -8, 32, 8, 8, 8), (2, 4, 1), "part 'k'"),
        (Part("v", 0, 32, 8, 8, 0), (2, 4, 1), "part 'v'"),
        (Part("k", 0, 32, 8, 8, 8), (2, 4, 2), "rows of part 'k' overlap"),
    ],
)
def test_layouts_that_describe_no_memory(
    part: Part, counts: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(LayoutMismatchError, match=message):
        KVLayout((part,), *counts)


def test_a_negative_number_of_tokens_is_refused() -> None:
    layout = KVLayout((Part("kv", 0, 64, 16, 16, 16),), 2, 4, 1)
    with pytest.raises(ValueError, match="num_tokens -16 is negative"):
        plan_conversion(layout, layout).pair_chunks([0, 1], [0, 1], -16)
