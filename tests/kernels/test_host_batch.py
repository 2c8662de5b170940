"""A batch copies exactly the runs that it names."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplugin.errors import ConfigError
from kvplugin.kernels.host_batch import copy_batch
from tests.kernels.host_helpers import check_leaves_the_gil, run_python


def noise(nbytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@st.composite
def runs(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """(source offset, target offset, size); targets apart, sources anywhere."""
    sizes = draw(st.lists(st.integers(0, 3000), max_size=12))
    drawn, target = [], 64
    for size in sizes:
        target += draw(st.integers(0, 70))
        drawn.append((draw(st.integers(0, 2000)), target, size))
        target += size
    return draw(st.permutations(drawn))


def check_batch(engine: str, batch: Sequence[tuple[int, int, int]]) -> None:
    """The runs are there, and every other byte is as it was."""
    source = noise(max((s + n for s, _, n in batch), default=0) + 64, 1)
    target = noise(max((t + n for _, t, n in batch), default=0) + 64, 2)
    expected, before = target.copy(), source.copy()
    for from_, to, size in batch:
        expected[to : to + size] = source[from_ : from_ + size]
    nbytes = copy_batch(
        [source.ctypes.data + run[0] for run in batch],
        [target.ctypes.data + run[1] for run in batch],
        [run[2] for run in batch],
        engine=engine,
    )
    np.testing.assert_array_equal(target, expected)
    np.testing.assert_array_equal(source, before)
    assert nbytes == sum(run[2] for run in batch)


@settings(max_examples=100, deadline=None)
@given(batch=runs())
def test_any_batch(engine: str, batch: list[tuple[int, int, int]]) -> None:
    check_batch(engine, batch)


@pytest.mark.parametrize("size", [0, 1, 63, 1023, 1024, 1025, 65536, 5_000_003])
@pytest.mark.parametrize("source_offset", [0, 1])
@pytest.mark.parametrize("target_offset", [64, 65, 127])
def test_sizes_and_alignments(
    engine: str, size: int, source_offset: int, target_offset: int
) -> None:
    far = target_offset + size + 5
    check_batch(engine, [(source_offset, target_offset, size), (source_offset, far, 7)])


def test_one_source_for_many_targets(engine: str) -> None:
    check_batch(engine, [(3, 64 + 100 * i, 100) for i in range(5)])


def test_arrays_of_addresses(engine: str) -> None:
    source, target = noise(256, 1), noise(256, 2)
    offsets = np.arange(0, 256, 64)
    copy_batch(
        np.uint64(source.ctypes.data) + offsets.astype(np.uint64),
        target.ctypes.data + offsets[::-1],
        np.full(4, 64, np.int32),
        engine=engine,
    )
    np.testing.assert_array_equal(target, source.reshape(4, 64)[::-1].ravel())


@pytest.mark.parametrize("empty", [[], (), np.empty(0, np.int64)])
def test_no_runs(engine: str, empty: Sequence[int]) -> None:
    assert copy_batch(empty, empty, empty, engine=engine) == 0


def test_an_empty_run_may_be_nowhere(engine: str) -> None:
    assert copy_batch([0], [0], [0], engine=engine) == 0


@pytest.mark.parametrize(
    ("sources", "targets", "sizes", "message"),
    [
        ([1], [1, 2], [1], "1 source addresses, 2 target addresses and 1 sizes do not"),
        ([1], [1], [], "1 source addresses, 1 target addresses and 0 sizes do not"),
        ([1], [1], [-8], "size -8 is negative"),
        ([0], [1], [8], "source address 0 is not positive"),
        ([1], [-4096], [8], "target address -4096 is not positive"),
        ([[1]], [[1]], [[1]], r"source addresses must be a flat list .* \(1, 1\)"),
        ([1], [1.5], [1], "target addresses must be a flat list of integers"),
        ([1], [1], [True], "sizes must be a flat list of integers, not bool"),
        ([2**70], [1], [1], "source addresses must be a flat list of integers"),
    ],
)
def test_bad_batches_copy_nothing(
    engine: str,
    sources: Sequence[int],
    targets: Sequence[int],
    sizes: Sequence[int],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        copy_batch(sources, targets, sizes, engine=engine)


def test_one_bad_run_spoils_the_batch(engine: str) -> None:
    source, target = noise(64, 1), noise(64, 2)
    before = target.copy()
    good = source.ctypes.data, target.ctypes.data
    with pytest.raises(ValueError, match="source address 0"):
        copy_batch([good[0], 0], [good[1]] * 2, [64, 1], engine=engine)
    np.testing.assert_array_equal(target, before)


def test_unknown_engine() -> None:
    with pytest.raises(ConfigError, match=r"unknown copy engine 'numbas'.*'numba'"):
        copy_batch([], [], [], engine="numbas")


def test_batches_leave_the_gil(engine: str, progress: Callable[[], int]) -> None:
    source, target = noise(128 << 20, 1), noise(128 << 20, 2)
    offsets = np.arange(8) * (16 << 20)
    addresses = source.ctypes.data + offsets, target.ctypes.data + offsets[::-1]
    sizes = [16 << 20] * 8
    check_leaves_the_gil(
        lambda: copy_batch(*addresses, sizes, engine=engine), source, progress
    )


def test_without_numba_ctypes_serves() -> None:
    code = """
import sys; sys.modules['numba'] = None
import numpy as np
from kvplugin.kernels.host_batch import copy_batch
a, b = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
assert copy_batch([a.ctypes.data], [b.ctypes.data], [100]) == 100
assert (a == b).all()
assert "torch" not in sys.modules
"""
    assert "numba can't be used" in run_python(code)
