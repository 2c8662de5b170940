"""What `gpu.py` times: copies on the first GPU. Imports torch and Triton."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from benchmarks._timing import Work
from benchmarks.gpu import Case
from kvplugin.connectors.offload.memory import HostMemory
from kvplugin.kernels.choice import Engine
from kvplugin.kernels.copy import DeviceBlockCopier
from kvplugin.kernels.dma import DmaBlockCopier
from kvplugin.kernels.permute import DeviceBlockConverter
from kvplugin.kernels.pinned import CudaRegistrar, PinnedMemory
from kvplugin.kernels.region import Region
from kvplugin.layout import Conversion, KVLayout, Part, plan_conversion

TIMED_BYTES: Final = 64 << 20
"""Least bytes between two looks at the clock: small copies are repeated."""

HEADS: Final = 4
ROW_BYTES: Final = 256
"""Of a permuted block: 128 elements of bf16 for each token and head."""

Ids = torch.Tensor
BatchCopy = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


class CudaDevice:
    """Implements `benchmarks.gpu.Device`.

    Args:
        nbytes: of each of two pools on the device and one in pinned host memory.
    """

    device = torch.device("cuda", 0)

    def __init__(self, nbytes: int) -> None:
        self.card = self.name_card()
        self._pools = [
            torch.ones(nbytes, dtype=torch.uint8, device=self.device) for _ in range(2)
        ]
        self._memory = HostMemory(nbytes)
        self._host = torch.frombuffer(self._memory.view, dtype=torch.uint8)
        self._host.fill_(1)
        self._pinned = self.pin(self._memory)
        self._batch = vllm_batch_copy()
        self._side = self.on_side_stream()
        self.synchronize()

    def name_card(self) -> str:
        """As `choice.py` knows it."""
        return torch.cuda.get_device_name(self.device)

    def pin(self, memory: HostMemory) -> PinnedMemory | None:
        """For as long as the process runs."""
        return PinnedMemory(memory.address, memory.nbytes, CudaRegistrar(0))

    def on_side_stream(self) -> AbstractContextManager[Any]:
        """Where copies run in service, and many at once can be submitted: drivers
        take no batch on the default stream."""
        return torch.cuda.stream(torch.cuda.Stream(self.device))

    def synchronize(self) -> None:
        """Wait for all that was launched."""
        torch.cuda.synchronize(self.device)

    def sides(self, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        """Source and target memory, uint8."""
        source = self._host if case.kind == "load" else self._pools[0]
        target = self._host if case.kind == "store" else self._pools[1]
        return source, target

    def pairs(self, case: Case) -> tuple[Ids, Ids]:
        """Block ids, int64 [n] in host memory: random, but in order on the one side
        that a gather or a scatter packs."""
        total = len(self._pools[0]) // (case.block_kib << 10)
        count = min(case.pieces or total, total // 2)
        generator = torch.Generator().manual_seed(0)
        source = torch.randperm(total, generator=generator)[:count]
        target = torch.randperm(total, generator=generator)[:count]
        in_order = torch.arange(count)
        return (
            in_order if case.kind == "scatter" else source,
            in_order if case.kind == "gather" else target,
        )

    def contiguous(self, case: Case) -> Work:
        """One `cudaMemcpyAsync`, which is what torch does here."""
        nbytes = len(self.pairs(case)[0]) * (case.block_kib << 10)
        source, target = (side[:nbytes] for side in self.sides(case))
        return self._timed(
            nbytes, functools.partial(target.copy_, source, non_blocking=True)
        )

    def engines(self, case: Case) -> dict[str, Work]:
        """Triton for all, DMA for what crosses the bus, vLLM for whole blocks."""
        launches: dict[str, Callable[[], object]] = {Engine.TRITON: self._triton(case)}
        if case.kind in ("load", "store"):
            launches[Engine.DMA] = self._dma(case)
        if self._batch is not None and case.kind != "permute":
            launches["vllm"] = self._vllm(case, self._batch)
        nbytes = len(self.pairs(case)[0]) * (case.block_kib << 10)
        return {name: self._timed(nbytes, launch) for name, launch in launches.items()}

    def _timed(self, nbytes: int, launch: Callable[[], object]) -> Work:
        times = max(1, TIMED_BYTES // nbytes)

        def work() -> int:
            with self._side:
                for _ in range(times):
                    launch()
            self.synchronize()
            return times * nbytes

        return work

    def _triton(self, case: Case) -> Callable[[], object]:
        source, target = self.sides(case)
        ids = [side.to(self.device) for side in self.pairs(case)]
        if case.kind == "permute":
            nbytes = case.block_kib << 10
            converter = DeviceBlockConverter(
                nhd_to_hnd(nbytes, len(source) // nbytes),
                source.data_ptr(),
                target.data_ptr(),
                self.device,
            )
            return functools.partial(converter.convert, *ids)
        copier = DeviceBlockCopier(*self._regions(case), self.device)
        return functools.partial(copier.copy, *ids)

    def _dma(self, case: Case) -> Callable[[], object]:
        copier = DmaBlockCopier(*self._regions(case), self.device)
        return functools.partial(copier.copy, *self.pairs(case))

    def _regions(self, case: Case) -> list[list[Region]]:
        nbytes = case.block_kib << 10
        return [
            [Region(side.data_ptr(), nbytes, nbytes, len(side) // nbytes)]
            for side in self.sides(case)
        ]

    def _vllm(self, case: Case, batch: BatchCopy) -> Callable[[], object]:
        nbytes = case.block_kib << 10
        sources, targets = (
            memory.data_ptr() + ids * nbytes
            for memory, ids in zip(self.sides(case), self.pairs(case), strict=True)
        )
        sizes = torch.full_like(sources, nbytes)
        return lambda: batch(sources, targets, sizes)


def nhd_to_hnd(block_bytes: int, blocks: int) -> Conversion:
    """Blocks [tokens, heads, row] become blocks [heads, tokens, row]."""
    tokens = block_bytes // (HEADS * ROW_BYTES)

    def layout(name: str, token_stride: int, head_stride: int) -> KVLayout:
        part = Part("k", 0, block_bytes, token_stride, head_stride, ROW_BYTES)
        return KVLayout((part,), blocks, tokens, HEADS, "bfloat16", name)

    return plan_conversion(
        layout("NHD", HEADS * ROW_BYTES, ROW_BYTES),
        layout("HND", ROW_BYTES, tokens * ROW_BYTES),
    )


def vllm_batch_copy() -> BatchCopy | None:
    """vLLM's copy of (address, address, bytes), one call of the driver since CUDA
    12.8; None where vLLM, or its build, has none."""
    try:
        from vllm import _custom_ops as ops

        torch.ops._C_cache_ops.swap_blocks_batch  # noqa: B018
    except (ImportError, AttributeError):
        return None
    return ops.swap_blocks_batch
