"""Blocks several times as long as what a hash covers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplugin.errors import ConfigError
from kvplugin.hashing import CoarseRule, coarse_hashes

RULES = pytest.mark.parametrize("rule", ["last", "concat"])
HASHES = st.lists(st.binary(min_size=2, max_size=2), max_size=20)
ENDS = st.none() | st.integers(-25, 25)
STEPS = st.none() | st.integers(-3, 3).filter(bool)


def expected(fine: list[bytes], pieces: int, rule: CoarseRule) -> list[bytes]:
    parts = [fine[i : i + pieces] for i in range(0, len(fine), pieces)]
    full = [part for part in parts if len(part) == pieces]
    return [part[-1] if rule == "last" else b"".join(part) for part in full]


@RULES
@given(HASHES, st.integers(1, 5), st.builds(slice, ENDS, ENDS, STEPS))
def test_view_reads_as_the_list_would(
    rule: CoarseRule, fine: list[bytes], pieces: int, part: slice
) -> None:
    view = coarse_hashes(fine, 8, 8 * pieces, rule)
    model = expected(fine, pieces, rule)
    assert (len(view), list(view)) == (len(model), model)
    assert view[part] == model[part]
    assert [view[i] for i in range(-len(model), len(model))] == model * 2


@RULES
def test_view_grows_with_the_hashes(rule: CoarseRule) -> None:
    fine = [b"a"]
    view = coarse_hashes(fine, 16, 32, rule)
    assert not len(view)
    fine += [b"b", b"c"]
    assert list(view) == expected(fine, 2, rule)


@RULES
@pytest.mark.parametrize("index", [2, -3])
def test_index_beyond_the_full_blocks_is_an_error(rule: CoarseRule, index: int) -> None:
    with pytest.raises(IndexError):
        coarse_hashes([b"a"] * 5, 16, 32, rule)[index]


def test_equal_sizes_need_no_view() -> None:
    fine = [b"a"]
    assert coarse_hashes(fine, 16, 16) is fine


@pytest.mark.parametrize("sizes", [(16, 24), (16, 8), (16, 0), (0, 16), (-16, 16)])
def test_size_that_is_no_multiple_is_an_error(sizes: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="no multiple of the hash block size"):
        coarse_hashes([], *sizes)
