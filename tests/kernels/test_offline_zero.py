"""The zeroing kernel compiles for every GPU, with 16-byte stores and no spills."""

import pytest

pytest.importorskip("triton")

from kvplugin.kernels import words, zero
from tests.kernels.offline import TARGETS, MachineCode, compile_for

FOUR_A_THREAD = {"cuda": 4, "hip": 2}
"""16-byte accesses of 8 KiB by four warps, of 32 threads or of 64."""


def compile_zero(target: str, unit: int) -> MachineCode:
    tile = words.tile(unit)
    signature = {
        "table": "*i64",
        "ids": "*i64",
        "items": "i64",
        "rows": "i32",
        **dict.fromkeys(tile, "constexpr"),
    }
    return compile_for(target, zero._zero_blocks, signature, tile)


@pytest.mark.parametrize("target", TARGETS)
def test_blocks_are_zeroed_16_bytes_at_a_time(target: str) -> None:
    code = compile_zero(target, 16)
    assert code.stores == (16,) * FOUR_A_THREAD[TARGETS[target].backend]
    assert code.spilled_bytes == 0


@pytest.mark.parametrize("unit", [1, 2, 4, 8])
@pytest.mark.parametrize("target", TARGETS)
def test_blocks_that_are_not_aligned(target: str, unit: int) -> None:
    code = compile_zero(target, unit)
    assert set(code.stores) == {unit}
    assert code.spilled_bytes == 0


def test_numbers_of_a_job_do_not_compile_anew() -> None:
    """A first block, or the sixteenth, must not wait for a compiler."""
    params = {param.name: param for param in zero._zero_blocks.params}
    assert params["items"].do_not_specialize
    assert params["rows"].do_not_specialize
    assert params["table"].do_not_specialize_on_alignment
    assert params["ids"].do_not_specialize_on_alignment
