"""What is generated for the writes of tokens, on every target.

The kernels are given what the launchers would give them.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kvplugin.kernels import cache_write
from kvplugin.kernels._triton_cache_write import write_records, write_rows
from tests.kernels.cache_writes import MOVED, ROUNDED, Case, cache_views, tokens
from tests.kernels.offline import TARGETS, MachineCode, compile_for

Pair = tuple[torch.dtype, torch.dtype]
"""Of the tokens and of the cache."""

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SOME_ROUNDED = [
    (BF16, E4M3),
    (torch.float32, torch.float8_e5m2),
    (torch.float16, torch.int8),
    (torch.float32, BF16),
]


class Recorder:
    """Stands for a kernel, and keeps what it is launched with."""

    def __init__(self) -> None:
        self.constants: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*_: Any, **constants: Any) -> None:
            self.constants = constants

        return launch


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(cache_write, "write_rows", recorder)
    monkeypatch.setattr(cache_write, "write_records", recorder)
    return recorder


def generated(target: str, kernel: Any, launched: Recorder) -> MachineCode:
    constants = dict(launched.constants)
    warps = constants.pop("num_warps")
    others = {"slots": "*i64", "k_scale": "fp32", "v_scale": "fp32"}
    signature = {
        name: "constexpr" if name in constants else others.get(name, "i64")
        for name in kernel.arg_names
    }
    return compile_for(
        target,
        kernel,
        signature,
        constants,
        divisible_by_16=("slots",),
        num_warps=warps,
    )


def widths(code: MachineCode) -> tuple[set[int], set[int]]:
    """Bytes of the accesses, without the slot's load (a scalar one on AMD's)."""
    loads = code.loads if code.target.startswith("gfx") else code.loads[1:]
    return set(loads), set(code.stores)


def write(case: Case) -> None:
    key, value, _ = tokens(case)
    elements = case.blocks * case.tokens * case.heads * (case.dim + case.value_dim)
    caches = cache_views(case.layout, torch.empty(elements, dtype=case.target), case)
    cache_write.write_kv(key, value, *caches, torch.tensor(case.slots))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "case",
    [
        Case("NHD", BF16, BF16, heads=8, dim=128, value_dim=128),
        Case("HND", BF16, BF16, heads=2, dim=80, value_dim=80),
        Case("fused", torch.float16, torch.float16, heads=8, dim=192, value_dim=128),
        Case("fused, heads first", E4M3, E4M3, heads=32, dim=64, value_dim=64),
        Case("HND", torch.float32, torch.float32, heads=1, dim=256, value_dim=256),
    ],
    ids=lambda case: f"{case.layout}, {case.source}, {case.heads} x {case.dim}",
)
def test_aligned_bytes_move_16_at_once(
    case: Case, target: str, launched: Recorder
) -> None:
    write(case)
    code = generated(target, write_rows, launched)
    assert widths(code) == ({16}, {16})
    assert code.spilled_bytes == 0


@pytest.mark.parametrize("target", TARGETS)
def test_latent_rows_move_16_bytes_at_once(target: str, launched: Recorder) -> None:
    kv_c, k_pe = torch.zeros(3, 512, dtype=BF16), torch.zeros(3, 64, dtype=BF16)
    cache = torch.zeros(4, 16, 576, dtype=BF16)
    cache_write.write_latent(kv_c, k_pe, cache, torch.tensor([0, 1, 2]))
    code = generated(target, write_rows, launched)
    assert widths(code) == ({16}, {16})
    assert code.spilled_bytes == 0


def check_rounding(launched: Recorder, target: str, pair: Pair) -> None:
    """Aligned heads are read as widely as can be; odd ones do not spill either."""
    write(Case("fused", *pair, heads=8, dim=128, value_dim=128))
    code = generated(target, write_rows, launched)
    loads, stores = widths(code)
    assert loads == {16}
    assert min(stores) >= 4
    assert code.spilled_bytes == 0
    check_odd_sizes(launched, target, pair)


def check_odd_sizes(launched: Recorder, target: str, pair: Pair) -> None:
    write(Case("fused, heads first", *pair, heads=40, dim=33, value_dim=20))
    assert generated(target, write_rows, launched).spilled_bytes == 0


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("pair", SOME_ROUNDED, ids=str)
def test_rounding(launched: Recorder, target: str, pair: Pair) -> None:
    check_rounding(launched, target, pair)


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("pair", ROUNDED, ids=str)
def test_all_rounding(launched: Recorder, target: str, pair: Pair) -> None:
    check_rounding(launched, target, pair)


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("pair", MOVED, ids=str)
def test_all_odd_sizes(launched: Recorder, target: str, pair: Pair) -> None:
    check_odd_sizes(launched, target, pair)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_records(dtype: torch.dtype, target: str, launched: Recorder) -> None:
    cache = torch.zeros(4 * 16 * 656 + 16, dtype=torch.uint8)
    for shift, narrowest in ((-cache.data_ptr() % 16, 2), (1, 1)):
        cache_write.write_ds_mla(
            torch.zeros(1, 512, dtype=dtype),
            torch.zeros(1, 64, dtype=dtype),
            cache[shift:][: 4 * 16 * 656].view(4, 16, 656),
            torch.tensor([3]),
        )
        code = generated(target, write_records, launched)
        assert max(code.loads) == 16
        assert min(code.stores) >= narrowest
        assert max(code.stores) >= 8 or shift == 1
        assert code.spilled_bytes == 0


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("stored", [BF16, E4M3], ids=str)
def test_one_odd_stride_narrows_the_access(
    dim: int, stored: torch.dtype, launched: Recorder
) -> None:
    """A misaligned access is no error under the interpreter, but one on a GPU."""
    shape, strides = (2, 2, 2, 32), [1024, 256, 64, 1]
    memory = torch.zeros(4096, dtype=stored)
    memory = memory[-memory.data_ptr() % 16 // memory.itemsize :]
    rows, slots = torch.zeros(2, 2, 64, dtype=BF16)[..., :32], torch.tensor([0, 1])
    for odd, align in ((0, 16), (1, memory.itemsize)):
        strides[dim] += odd
        cache = memory.as_strided(shape, strides)
        cache_write.write_kv(rows, rows, cache, cache, slots)
        assert launched.constants["write_align"] == align


def test_an_odd_address_narrows_the_access(launched: Recorder) -> None:
    memory = torch.zeros(4096, dtype=E4M3)
    start = -memory.data_ptr() % 16
    rows, slots = torch.zeros(2, 2, 32).to(E4M3), torch.tensor([0, 1])
    for shift, align in ((0, 16), (8, 8), (4, 4), (6, 2), (1, 1)):
        cache = memory[start + shift :][:256].view(2, 2, 2, 32)
        cache_write.write_kv(rows, rows, cache, cache, slots)
        assert launched.constants["write_align"] == align
        assert launched.constants["k_dim"] == 64 // min(align, 8)
