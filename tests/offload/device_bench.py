"""A worker half beside a simulated device, with real bytes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvplugin.connectors.offload.capacity import host_pools
from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.device_copies import DeviceCopies
from kvplugin.connectors.offload.messages import CopyOrder, Report
from kvplugin.connectors.offload.worker import OffloadWorker
from kvplugin.contract import EngineInfo, GroupInfo, KVTensor, WorkerOutcome
from kvplugin.wire import decode
from tests.kernels.fake_streams import FakeStreams
from tests.offload.fake_device import FakeGpu
from tests.offload.layers import BLOCKS, Layer, group_of, noise, tensors_of
from tests.offload.plans import order, plan

CONFIG = OffloadConfig(cpu_bytes_to_use=1 << 20, copy_wait_ms=60_000)
"""A worker that waited for its copies in a step would not end in time."""


def on_device(tensors: Mapping[str, KVTensor]) -> dict[str, KVTensor]:
    return {name: replace(t, device="cuda:0") for name, t in tensors.items()}


class Bench:
    """Three groups on a device: two layers, one larger one, a padded state."""

    def __init__(self, streams: FakeStreams | None = None) -> None:
        self.gpu = FakeGpu(streams=streams)
        self.groups = [
            [Layer(noise(BLOCKS, 4, 16, seed=1)), Layer(noise(BLOCKS, 32, seed=2))],
            [Layer(noise(2, BLOCKS, 80, seed=3), axis=1)],
            [Layer(noise(BLOCKS, 96, seed=4)[:, :70], page_bytes=96)],
        ]
        infos = tuple(group_of(layers, i) for i, layers in enumerate(self.groups))
        self.info = EngineInfo("engine", infos, BLOCKS, hash_block_size=16)
        self.worker = OffloadWorker(self.info, CONFIG, make_copies=self._copies)
        tensors: dict[str, KVTensor] = {}
        for index, layers in enumerate(self.groups):
            tensors |= tensors_of(layers, index)
        self.worker.register(on_device(tensors))
        self.pools = host_pools(self.info, CONFIG)
        assert [pool.groups for pool in self.pools] == [[0, 2], [1]]
        self._number = 0

    def _copies(
        self, groups: Iterable[GroupInfo], tensors: Mapping[str, KVTensor]
    ) -> DeviceCopies:
        self.copies = DeviceCopies(groups, tensors, self.gpu.device)
        return self.copies

    def bytes_of(self, group: int, block: int) -> bytes:
        return b"".join(layer.now(block).tobytes() for layer in self.groups[group])

    def forward(
        self, writes: Mapping[tuple[int, int], int], reads: Iterable[int] = ()
    ) -> None:
        """Launch a step that fills blocks (group, block) with a value."""

        def run() -> None:
            for (group, block), value in writes.items():
                for layer in self.groups[group]:
                    layer.now_is(block, value)

        self.gpu.streams.launch(
            "step",
            writes=[(("device", block), None) for _, block in writes],
            reads=[("device", block) for block in reads],
            runs=run,
        )

    def plan(self, **orders: Any) -> bytes:
        self._number += 1
        return plan(self.info, self._number, self.pools, **orders)

    def step(
        self,
        forward: Callable[[], None] = lambda: None,
        *,
        loads_first: bool = False,
        **orders: Any,
    ) -> WorkerOutcome:
        """In vLLM's order: loads behind the forward, or before it as in 0.19."""
        message = self.plan(**orders)
        if loads_first:
            self.worker.begin_step(message)
            forward()
        else:
            forward()
            self.worker.begin_step(message)
        self.worker.end_step()
        return self.worker.poll()

    def settle(self) -> WorkerOutcome:
        """What a poll finds when the device has done all of its work."""
        self.gpu.streams.run_all()
        return self.worker.poll()


def errors(outcome: WorkerOutcome) -> dict[int, str]:
    if not outcome.report:
        return {}
    completions = decode(outcome.report, Report).completions
    return {done.id: done.error for done in completions}


def of_all_groups(job: int, engine: Sequence[int], hosts: Sequence[int]) -> CopyOrder:
    """One block of each group."""
    parts = [
        order(job, [e], [h], group).parts[0]
        for group, (e, h) in enumerate(zip(engine, hosts, strict=True))
    ]
    return CopyOrder(job, f"r{job}", parts, "")
