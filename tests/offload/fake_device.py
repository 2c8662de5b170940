"""A device whose streams are simulated and whose copies really move bytes."""

from collections.abc import Sequence
from typing import Any

from kvplugin.connectors.offload.device_copies import Device
from kvplugin.kernels.host import BlockCopier
from kvplugin.kernels.ids import checked_pairs
from kvplugin.kernels.region import Region
from kvplugin.kernels.streams import Direction
from tests.kernels.fake_streams import FakeStreams, Place


class FakeDriver:
    """Pins memory, all but the piece of number `refused`, from 1 on."""

    def __init__(self, refused: int = 0) -> None:
        self.refused = refused
        self.pinned: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> str:
        if len(self.pinned) + 1 == self.refused:
            return "out of memory"
        self.pinned[address] = nbytes
        return ""

    def unregister(self, address: int) -> str:
        del self.pinned[address]
        return ""


class FakeCopier:
    """Looks at ids when a copy is launched, moves bytes when its stream comes to it."""

    def __init__(
        self,
        gpu: FakeStreams,
        device: Sequence[Region],
        host: Sequence[Region],
        direction: Direction,
    ) -> None:
        self._gpu = gpu
        self._host = host
        self._direction = direction
        sides = (device, host) if direction is Direction.STORE else (host, device)
        self._blocks = [min(region.blocks for region in side) for side in sides]
        self._copier = BlockCopier(*sides)

    @property
    def block_bytes(self) -> int:
        return self._copier.block_bytes

    def copy(self, source_ids: Any, target_ids: Any) -> int:
        checked_pairs(source_ids, target_ids, *self._blocks)
        is_store = self._direction is Direction.STORE
        self._gpu.launch(
            f"copy of a {self._direction}",
            reads=[self._place(i, host=not is_store) for i in source_ids],
            writes=[(self._place(i, host=is_store), None) for i in target_ids],
            runs=lambda: self._copier.copy(source_ids, target_ids),
        )
        return len(source_ids) * self.block_bytes

    def _place(self, block: int, *, host: bool) -> Place:
        if host:
            return ("host", self._host[0].address + block * self._host[0].stride)
        return ("device", block)


class FakeGpu:
    """One device; `device` is what the connector gets of it."""

    def __init__(self, *, refused: int = 0, streams: FakeStreams | None = None) -> None:
        self.streams = streams or FakeStreams()
        self.driver = FakeDriver(refused)
        self.asked: list[tuple[Direction, bool]] = []
        """Copiers that were made, and whether their host memory was pinned."""
        self.cuts: list[Sequence[int]] = []
        self.device = Device(self.streams, self.driver, self._make_copier)

    def _make_copier(
        self,
        device: Sequence[Region],
        host: Sequence[Region],
        direction: Direction,
        cuts: Sequence[int],
    ) -> FakeCopier:
        last = host[0].address + host[0].stride * (host[0].blocks - 1)
        is_pinned = all(
            any(a <= address < a + n for a, n in self.driver.pinned.items())
            for address in (host[0].address, last + host[-1].nbytes - 1)
        )
        self.asked.append((direction, is_pinned))
        self.cuts.append(cuts)
        return FakeCopier(self.streams, device, host, direction)
