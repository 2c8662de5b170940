"""The slot kernel's machine code: slots leave in whole vectors, nothing is spilled."""

import pytest

pytest.importorskip("triton")

from kvplugin.kernels.slots import TOKENS_PER_PROGRAM, write_slots
from tests.kernels.offline import TARGETS, compile_for

SIGNATURE = {
    "descriptors": "*i64",
    "rows": "*i32",
    "positions": "*i64",
    "out": "*i64",
    "out_stride": "i32",
    "count": "i32",
    "width": "i32",
    "interleave": "i32",
    "pad": "constexpr",
    "tokens": "constexpr",
}
CONSTANTS = {"pad": -1, "tokens": TOKENS_PER_PROGRAM}
ALIGNED = ("descriptors", "rows", "positions", "out", "out_stride", "width")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_slots_leave_in_vectors(target: str, interleaved: bool) -> None:
    # Without interleaving Triton makes a constant of the 1.
    plain = {} if interleaved else {"interleave": 1}
    code = compile_for(
        target,
        write_slots,
        SIGNATURE | dict.fromkeys(plain, "constexpr"),
        CONSTANTS | plain,
        divisible_by_16=ALIGNED,
    )
    assert code.stores
    assert set(code.stores) == {16}
    assert code.spilled_bytes == 0
