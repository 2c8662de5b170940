"""The GPU benchmark's logic, with the timer or the device replaced."""

import ctypes
import functools
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import gpu
from benchmarks.__main__ import COMMANDS
from benchmarks.__main__ import main as all_benchmarks
from benchmarks._timing import Speed, Work
from benchmarks.gpu import CASES, Case, Result, measure, rows, source_of, table
from kvplugin.kernels.choice import Engine, Row, choose
from kvplugin.kernels.streams import Direction

CARD = "NVIDIA H200"


class FakeDevice:
    """Its works name themselves; `times` says how they do, as shares."""

    card = CARD

    def __init__(self, shares: Callable[[Case, str], float]) -> None:
        self.shares = shares
        self.names: dict[Work, tuple[Case, str]] = {}

    def _work(self, case: Case, name: str) -> Work:
        def work() -> int:
            return case.block_kib << 10

        self.names[work] = (case, name)
        return work

    def contiguous(self, case: Case) -> Work:
        return self._work(case, "contiguous")

    def engines(self, case: Case) -> Mapping[str, Work]:
        host = case.kind in tuple(Direction)
        names = [Engine.TRITON, *([Engine.DMA] if host else [])]
        names += ["vllm"] if case.kind != "permute" else []
        return {name: self._work(case, name) for name in names}

    def timer(
        self, baseline: Work, works: Mapping[str, Work], repeats: int
    ) -> dict[str, Speed]:
        case, name = self.names[baseline]
        assert name == "contiguous"
        assert repeats == 7
        assert all(self.names[work][0] is case for work in works.values())
        shares = {name: self.shares(case, name) for name in works}
        return {name: Speed(50e9 * share, share) for name, share in shares.items()}


def shares(case: Case, engine: str) -> float:
    """Triton wins at 16 KiB, ties at 64 and loses at 256."""
    if engine == Engine.TRITON:
        return {16: 0.9, 64: 0.54, 256: 0.4}[case.block_kib]
    return 0.5


def results() -> list[Result]:
    device = FakeDevice(shares)
    return list(measure(device, CASES, 7, device.timer))


def test_cases_cover_what_the_table_decides() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    kinds = {case.kind for case in CASES}
    assert kinds >= set(Direction)
    assert kinds >= {"gather", "scatter", "pool to pool", "permute"}
    for kind in kinds:
        assert {c.block_kib for c in CASES if c.kind == kind} == {16, 64, 256}
    assert all(bool(c.pieces) == (c.kind in tuple(Direction)) for c in CASES)


def test_a_table_for_people() -> None:
    lines = list(table(CARD, results()))
    assert lines[0].startswith(CARD)
    assert "load 16 KiB x 16 (triton)                   45.0    90%" in lines
    assert "gather 256 KiB (vllm)                       25.0    50%" in lines


def test_rows_for_the_table_of_the_package() -> None:
    found = list(rows(CARD, results(), "a day"))
    assert len(found) == 2 * len(gpu.BLOCK_KIB) * len(gpu.PIECES)
    assert found[0] == Row(
        CARD,
        Direction.LOAD,
        16 << 10,
        16,
        Engine.TRITON,
        "triton 0.90, dma 0.50, vllm 0.50 of cudaMemcpyAsync; a day",
    )
    for direction in Direction:
        for kib, engine in ((16, "triton"), (64, "dma"), (256, "dma")):
            assert choose(CARD, direction, kib << 10, 20, found) == engine


def test_printed_rows_are_the_rows() -> None:
    found = list(rows('A "card"', results(), "a day"))
    names = {"Row": Row, "Direction": Direction, "Engine": Engine}
    lines = list(source_of(found))
    assert eval("(" + "\n".join(lines) + ")", names) == tuple(found)  # noqa: S307
    assert max(map(len, lines)) <= 88


@pytest.mark.parametrize("arguments", [[], ["--json"], ["--write"]])
def test_the_command(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    pytest.importorskip("torch")
    device = FakeDevice(shares)
    monkeypatch.setattr(gpu, "open_device", lambda nbytes: device)
    monkeypatch.setattr(gpu, "speeds", device.timer)
    done = CliRunner().invoke(all_benchmarks, ["gpu", *arguments])
    assert done.exit_code == 0, done.output
    assert CARD in done.output
    assert ("Row(" in done.output) == (arguments == ["--write"])
    if arguments == ["--json"]:
        told = json.loads(done.output)
        assert told["card"] == CARD
        assert len(told["results"]) == len(results())


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(all_benchmarks, ["gpu"])
    assert done.exit_code == 1
    assert "no GPU: torch" in done.output
    assert "python -m benchmarks copy" in done.output


def test_without_torch_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    done = CliRunner().invoke(all_benchmarks, ["gpu"])
    assert done.exit_code == 1
    assert "install kvplugin[worker]" in done.output


def test_all_benchmarks_leave_it_out() -> None:
    assert gpu.main not in COMMANDS
    assert all_benchmarks.commands["gpu"] is gpu.main


@pytest.fixture
def cpu_device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's device with a CPU's memory and the kernels' host twins."""
    pytest.importorskip("triton")
    import torch

    from benchmarks import _gpu_device
    from kvplugin.kernels.dma import DmaBlockCopier
    from kvplugin.kernels.host import BlockCopier
    from kvplugin.kernels.host_convert import BlockConverter
    from tests.kernels.memcpy_apis import Memmove

    class CpuDevice(_gpu_device.CudaDevice):
        device = torch.device("cpu")

        def name_card(self) -> str:
            return "none"

        def pin(self, memory: object) -> None:
            return None

        def on_side_stream(self) -> AbstractContextManager[None]:
            return nullcontext()

        def synchronize(self) -> None:
            return None

    def copier(sources: Any, targets: Any, device: torch.device) -> BlockCopier:
        return BlockCopier(sources, targets)

    def converter(
        plan: Any, source: int, target: int, device: torch.device
    ) -> BlockConverter:
        return BlockConverter(plan, source, target)

    def batch(sources: Any, targets: Any, sizes: Any) -> None:
        for source, target, nbytes in zip(
            sources.tolist(), targets.tolist(), sizes.tolist(), strict=True
        ):
            ctypes.memmove(target, source, nbytes)

    monkeypatch.setattr(_gpu_device, "DeviceBlockCopier", copier)
    dma = functools.partial(DmaBlockCopier, api=Memmove())
    monkeypatch.setattr(_gpu_device, "DmaBlockCopier", dma)
    monkeypatch.setattr(_gpu_device, "DeviceBlockConverter", converter)
    monkeypatch.setattr(_gpu_device, "vllm_batch_copy", lambda: batch)
    monkeypatch.setattr(_gpu_device, "TIMED_BYTES", 1)
    return CpuDevice(4 << 20)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_engine_moves_the_bytes_of_the_case(cpu_device: Any, case: Case) -> None:
    import torch

    source, target = cpu_device.sides(case)
    source.random_(generator=torch.Generator().manual_seed(1))
    nbytes = case.block_kib << 10
    source_ids, target_ids = cpu_device.pairs(case)
    engines = cpu_device.engines(case)
    host = case.kind in tuple(Direction)
    assert set(engines) == {"triton"} | ({"dma"} if host else set()) | (
        {"vllm"} if case.kind != "permute" else set()
    )
    for work in engines.values():
        target.zero_()
        assert work() == len(source_ids) * nbytes
        wanted = source.view(-1, nbytes)[source_ids]
        if case.kind == "permute":
            wanted = wanted.view(len(source_ids), -1, 4, 256).transpose(1, 2)
        assert torch.equal(
            target.view(-1, nbytes)[target_ids], wanted.reshape(-1, nbytes)
        )
        assert int(target.count_nonzero()) == int(wanted.count_nonzero())
    assert cpu_device.contiguous(case)() == len(source_ids) * nbytes


def test_small_copies_are_repeated(
    cpu_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks._gpu_device.TIMED_BYTES", 1 << 20)
    case = Case("load", 16, 16)
    assert cpu_device.contiguous(case)() == 1 << 20


def test_vllm_is_asked_for_its_copy() -> None:
    pytest.importorskip("triton")
    from benchmarks._gpu_device import vllm_batch_copy

    copy = vllm_batch_copy()
    assert copy is None or callable(copy)


def test_less_memory_than_the_largest_case_is_refused() -> None:
    done = CliRunner().invoke(all_benchmarks, ["gpu", "--mib", "511"])
    assert done.exit_code == 2
    assert "511 is not in the range x>=512" in done.output
