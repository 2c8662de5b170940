"""The converting kernel compiles for every GPU: 16-byte accesses and no spills."""

import pytest

pytest.importorskip("triton")

from kvplugin.kernels import permute, words
from tests.kernels.offline import TARGETS, MachineCode, compile_for

POINTERS = ("table", "source_ids", "target_ids")
NUMBERS = ("items", "rows", "source_chunks", "target_chunks")
FOUR_A_THREAD = {"cuda": 4, "hip": 2}
"""16-byte accesses of 8 KiB by four warps, of 32 threads or of 64."""


def compile_convert(target: str, unit: int) -> MachineCode:
    tile = words.tile(unit)
    signature = {
        **dict.fromkeys(POINTERS, "*i64"),
        **dict.fromkeys(NUMBERS, "i32"),
        **dict.fromkeys(tile, "constexpr"),
    }
    return compile_for(target, permute._convert_chunks, signature, tile)


@pytest.mark.parametrize("target", TARGETS)
def test_rows_move_16_bytes_at_a_time(target: str) -> None:
    code = compile_convert(target, 16)
    count = FOUR_A_THREAD[TARGETS[target].backend]
    assert code.stores == (16,) * count
    assert code.loads.count(16) >= count  # AMD loads the table so, too
    assert set(code.loads) == {8, 16}
    assert code.loads.count(8) <= 16  # fourteen of the table and two ids
    assert code.spilled_bytes == 0


@pytest.mark.parametrize("unit", [1, 2, 4, 8])
@pytest.mark.parametrize("target", TARGETS)
def test_rows_that_are_not_aligned(target: str, unit: int) -> None:
    code = compile_convert(target, unit)
    assert set(code.stores) == {unit}
    assert code.spilled_bytes == 0


def test_numbers_of_a_job_do_not_compile_anew() -> None:
    """A first pair, or the sixteenth, must not wait for a compiler."""
    params = {param.name: param for param in permute._convert_chunks.params}
    assert all(params[name].do_not_specialize for name in NUMBERS)
    assert all(params[name].do_not_specialize_on_alignment for name in POINTERS)
