"""Copies between one rank's KV tensors on a device and its host memory."""

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvplugin.connectors.offload.group_copiers import GroupCopiers
from kvplugin.connectors.offload.messages import HostPool
from kvplugin.connectors.offload.pool_memory import PoolMemory, engine_regions
from kvplugin.connectors.offload.stream_transport import StreamTransport
from kvplugin.contract import CopyJob, GroupInfo, KVTensor
from kvplugin.errors import CapacityError
from kvplugin.kernels.dispatch import Copier, transfer_copier
from kvplugin.kernels.pinned import PinnedMemory, Registrar
from kvplugin.kernels.region import Region
from kvplugin.kernels.streams import CopyStreams, Direction, Keep, StreamApi

logger = logging.getLogger("vllm.kvplugin.offload")

MakeCopier: TypeAlias = Callable[
    [Sequence[Region], Sequence[Region], Direction, Sequence[int]], Copier
]
"""From the device's regions, the host's, the direction and the addresses where pinned
pieces meet. It launches on the stream of the calling thread, and takes its ids from
host memory that it pins itself where the device reads them."""


@dataclass(frozen=True)
class Device:
    """What a device does for copies; a test puts something else in its place."""

    streams: StreamApi
    registrar: Registrar
    make_copier: MakeCopier


def cuda_device(name: str) -> Device:
    """The GPU of this name (``cuda:0``; ROCm's as well), through torch."""
    import torch

    from kvplugin.kernels.pinned import CudaRegistrar
    from kvplugin.kernels.torch_streams import TorchStreams

    device = torch.device(name)
    index = device.index or 0

    def make_copier(
        regions: Sequence[Region],
        host: Sequence[Region],
        direction: Direction,
        cuts: Sequence[int],
    ) -> Copier:
        return transfer_copier(regions, host, direction, device, pinned=True, cuts=cuts)

    return Device(TorchStreams(index), CudaRegistrar(index), make_copier)


class DeviceCopies:
    """Launches copies on a device's streams, from and to pinned host memory. All calls
    come from one thread, the one that launches the steps.

    Args:
        groups: the groups and the pages of their layers.
        tensors: KV memory by layer, all of one device.
        device: the device.

    Raises:
        LayoutMismatchError: a tensor is not laid out as its page promises.
    """

    may_hold_a_step = False

    def __init__(
        self,
        groups: Iterable[GroupInfo],
        tensors: Mapping[str, KVTensor],
        device: Device,
    ) -> None:
        self._engine = engine_regions(groups, tensors)
        self._device = device
        self._host: _PinnedPools | None = None
        self._copiers: GroupCopiers | None = None
        self._transport: StreamTransport | None = None

    def allocate(self, pools: Sequence[HostPool]) -> int:
        """Make room for all pools, in place of what there was, pin it, and build the
        copy engines.

        Returns:
            Bytes of host memory.

        Raises:
            CapacityError: the machine has not so much memory, or pins less.
            IntegrityError: the pools are not of these groups.
            ConfigError: a copy engine can't be built.
        """
        self.close()
        memory = PoolMemory(self._engine, pools)
        self._host = host = _PinnedPools(memory, self._device.registrar)
        make = functools.partial(self._copier, host.cuts)
        try:
            self._copiers = GroupCopiers(self._engine, memory.regions, make)
        except BaseException:
            self.close()  # nothing stays pinned that nobody would unpin
            raise
        return memory.nbytes

    def _copier(
        self,
        cuts: Sequence[int],
        engine: Sequence[Region],
        host: Sequence[Region],
        store: bool,
    ) -> Copier:
        direction = Direction.STORE if store else Direction.LOAD
        return self._device.make_copier(engine, host, direction, cuts)

    def transport(self) -> StreamTransport:
        """Over side streams of the device."""
        self._transport = StreamTransport(
            CopyStreams(self._device.streams), self.launch
        )
        return self._transport

    def launch(self, job: CopyJob, keep: Keep) -> int:
        """Launch a job's copies on the current stream; the bytes.

        Nothing is handed to `keep`: the copiers' ids are in memory of torch's, which
        goes to other work only behind the stream that used it.

        Raises:
            ValueError: an id is out of range, or a group is not offloaded.
            TransferError: the device's runtime refused.
        """
        del keep
        if self._copiers is None:
            raise ValueError("there is no host memory")
        return self._copiers.copy(job)

    def close(self) -> None:
        """Give host memory back, unless the transport, closed before, has jobs that do
        not end: what a device may still write to stays pinned."""
        self._copiers = None
        host, self._host = self._host, None
        if host is None:
            return
        if self._transport is None or not self._transport.outstanding:
            host.close()
            return
        host.memory.abandon()
        logger.error("%.2f GiB of host memory stay pinned", host.memory.nbytes / 2**30)


class _PinnedPools:
    """Host memory of all pools, pinned, each pool by itself.

    Raises:
        CapacityError: the driver refuses; nothing is left pinned or allocated.
    """

    def __init__(self, memory: PoolMemory, registrar: Registrar) -> None:
        self.memory = memory
        self._pinned: list[PinnedMemory] = []
        try:
            for buffer, block_bytes in memory.memories:
                self._pinned.append(
                    PinnedMemory(
                        buffer.address,
                        buffer.nbytes,
                        registrar,
                        unit_bytes=block_bytes,
                    )
                )
        except CapacityError:
            self.close()
            raise

    @property
    def cuts(self) -> list[int]:
        """Addresses where pinned pieces meet; no block lies across one."""
        return [cut for pinned in self._pinned for cut in pinned.cuts]

    def close(self) -> None:
        """Unpin it all and give it back."""
        while self._pinned:
            self._pinned.pop().close()
        self.memory.close()
