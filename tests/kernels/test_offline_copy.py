"""The copy kernels compile for every GPU, with 16-byte accesses and no spills."""

import pytest

pytest.importorskip("triton")

from kvplugin.kernels import copy, words
from tests.kernels.offline import TARGETS, MachineCode, compile_for

POINTERS = ("table", "source_ids", "target_ids")
FOUR_A_THREAD = {"cuda": 4, "hip": 2}
"""16-byte accesses of 8 KiB by four warps, of 32 threads or of 64."""


def compile_copy(target: str, unit: int) -> MachineCode:
    tile = words.tile(unit)
    signature = {
        **dict.fromkeys(POINTERS, "*i64"),
        "items": "i64",
        "rows": "i32",
        **dict.fromkeys(tile, "constexpr"),
    }
    return compile_for(target, copy._copy_blocks, signature, tile)


@pytest.mark.parametrize("target", TARGETS)
def test_blocks_move_16_bytes_at_a_time(target: str) -> None:
    code = compile_copy(target, 16)
    count = FOUR_A_THREAD[TARGETS[target].backend]
    assert code.stores == (16,) * count
    assert code.loads.count(16) >= count  # AMD loads the table so, too
    assert set(code.loads) == {8, 16}
    assert code.loads.count(8) <= 7  # five of the table and two ids
    assert code.spilled_bytes == 0


@pytest.mark.parametrize("unit", [1, 2, 4, 8])
@pytest.mark.parametrize("target", TARGETS)
def test_blocks_that_are_not_aligned(target: str, unit: int) -> None:
    code = compile_copy(target, unit)
    assert set(code.stores) == {unit}
    assert code.spilled_bytes == 0


@pytest.mark.parametrize("target", TARGETS)
def test_batches(target: str) -> None:
    """Bulks of 16 and 4 bytes and of single ones, and edges."""
    signature = {
        **dict.fromkeys(("sources", "targets", "sizes"), "*i64"),
        "entries": "i32",
        "share": "i32",
        "units": "constexpr",
    }
    tile = {"units": words.TILE_UNITS}
    code = compile_for(target, copy._copy_entries, signature, tile)
    count = FOUR_A_THREAD[TARGETS[target].backend]
    assert code.stores.count(16) == count
    assert code.loads.count(16) >= count
    assert set(code.stores) == {1, 4, 16}
    assert code.spilled_bytes == 0


def test_numbers_of_a_job_do_not_compile_anew() -> None:
    """A first pair, or the sixteenth, must not wait for a compiler."""
    for kernel, numbers, pointers in (
        (copy._copy_blocks, ("items", "rows"), POINTERS),
        (copy._copy_entries, ("entries", "share"), ("sources", "targets", "sizes")),
    ):
        params = {param.name: param for param in kernel.params}
        assert all(params[name].do_not_specialize for name in numbers)
        assert all(params[name].do_not_specialize_on_alignment for name in pointers)
