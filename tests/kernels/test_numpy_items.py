"""Long runs are rows of items: numpy leaves the GIL for many, and has no huge one."""

import numpy as np
import pytest

from kvplugin.kernels import _numpy_memory
from kvplugin.kernels.host import BlockCopier
from kvplugin.kernels.host_convert import BlockConverter
from kvplugin.kernels.host_zero import BlockZeroer
from kvplugin.kernels.region import Region
from kvplugin.layout import KVLayout, Part, plan_conversion

GIB = 1 << 30


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 3 * GIB, 7 * GIB + 5])
def test_pieces_are_the_run(nbytes: int) -> None:
    made = _numpy_memory.pieces(nbytes)
    ends = [start + size for start, size in made]
    assert [0, *ends] == [*(start for start, _ in made), nbytes]
    for _, size in made:
        runs = _numpy_memory.array_of_runs(4096, size, (2,), (16 * GIB,))
        assert runs[0].nbytes == size
        assert runs.itemsize == min(size, 4096)


def test_engines_take_regions_beyond_two_gib() -> None:
    """Nothing is copied: such memory is not at hand, but numpy makes the items."""
    near, far = (Region(at, 4 * GIB, 3 * GIB, 2) for at in (4096, 1 << 40))
    assert BlockCopier([near], [far], engine="numpy").block_bytes == 3 * GIB
    assert BlockZeroer([near], engine="numpy").block_bytes == 3 * GIB
    parts = (Part("kv", 0, 4 * GIB, 3 * GIB // 2, 1 << 20, 3 * GIB // 2),)
    layout = KVLayout(parts, 2, 2, 1)
    other = KVLayout((Part("kv", 0, 3 * GIB, 1 << 31, 1, 3 * GIB // 2),), 1, 1, 1)
    plan = plan_conversion(layout, other)
    assert BlockConverter(plan, 4096, 1 << 40, engine="numpy").chunk_bytes == (
        3 * GIB // 2
    )


@pytest.mark.parametrize("limit", [1, 3, 7, 64])
def test_pieces_move_every_byte_once(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_numpy_memory, "ITEM_BYTES", limit)
    source = np.random.default_rng(0).integers(1, 256, (4, 24), dtype=np.uint8)
    target = np.zeros((4, 24), np.uint8)

    def region(array: np.ndarray) -> Region:
        return Region(array.ctypes.data + 2, 24, 17, 4)

    copier = BlockCopier([region(source)], [region(target)], engine="numpy")
    assert copier.copy([3, 1], [0, 2]) == 34
    wanted = np.zeros((4, 24), np.uint8)
    wanted[[0, 2], 2:19] = source[[3, 1], 2:19]
    np.testing.assert_array_equal(target, wanted)
    assert BlockZeroer([region(target)], engine="numpy").zero([2]) == 17
    wanted[2] = 0
    np.testing.assert_array_equal(target, wanted)
    # Two tokens of 12 bytes, to one token a block.
    two = KVLayout((Part("kv", 0, 24, 12, 12, 12),), 4, 2, 1)
    one = KVLayout((Part("kv", 0, 12, 12, 12, 12),), 8, 1, 1)
    converter = BlockConverter(
        plan_conversion(two, one),
        source.ctypes.data,
        target.ctypes.data,
        engine="numpy",
    )
    assert converter.convert([5, 0], [1, 6]) == 24
    rows = wanted.reshape(8, 12)
    rows[[1, 6]] = source.reshape(8, 12)[[5, 0]]
    np.testing.assert_array_equal(target, wanted)
