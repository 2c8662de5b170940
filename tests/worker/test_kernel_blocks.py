"""The block size of kernels is one that all backends read."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.errors import ConfigError
from kvplugin.worker.kernel_blocks import MultipleOf, select_kernel_block_size

SIXTEENS = (MultipleOf(16),)


@pytest.mark.parametrize(
    ("block_size", "supported", "chosen"),
    [
        (48, {"A": SIXTEENS}, 48),
        (48, {"A": SIXTEENS, "B": (16, 32, 64)}, 16),
        (256, {"A": SIXTEENS, "B": (16, 32, 64)}, 64),
        (64, {"A": (16, 32, 64), "B": (32, MultipleOf(48))}, 32),
        (128, {"A": (MultipleOf(64), 32), "B": (32,)}, 32),
        (17, {}, 17),
    ],
)
def test_kernel_block_size(
    block_size: int, supported: dict[str, Any], chosen: int
) -> None:
    assert select_kernel_block_size(block_size, supported) == chosen


def test_a_refusal_names_the_backends_and_what_they_read() -> None:
    with pytest.raises(ConfigError) as caught:
        select_kernel_block_size(16, {"CPU": (MultipleOf(32),), "FLASH": (16, 64)})
    for words in ("16", "CPU reads a multiple of 32", "FLASH reads 16 or 64"):
        assert words in str(caught.value)


sizes = st.lists(
    st.integers(1, 64) | st.integers(1, 64).map(MultipleOf), min_size=1, max_size=3
)


@settings(deadline=None)
@given(
    st.integers(1, 256),
    st.dictionaries(st.sampled_from("ABC"), sizes, min_size=1),
)
def test_the_chosen_size_is_the_largest_that_all_read(
    block_size: int, supported: dict[str, list[int | MultipleOf]]
) -> None:
    common = [
        size
        for size in range(1, block_size + 1)
        if block_size % size == 0
        and all(
            any(
                size % s.base == 0 if isinstance(s, MultipleOf) else size == s
                for s in given
            )
            for given in supported.values()
        )
    ]
    if common:
        assert select_kernel_block_size(block_size, supported) == max(common)
    else:
        with pytest.raises(ConfigError, match="no kernel block size"):
            select_kernel_block_size(block_size, supported)
