"""Copies between a GPU and the host by whichever engine the table prefers.

`choice.py` knows which is faster, `dma.py` and `copy.py` do it; this asks the one and
calls the other, job by job.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Final

import torch

from kvplugin.kernels._runtime_memcpy import open_runtime
from kvplugin.kernels.choice import Engine, choose
from kvplugin.kernels.dispatch import Copier
from kvplugin.kernels.dma import DmaBlockCopier, check_on_host
from kvplugin.kernels.ids import AnyIds
from kvplugin.kernels.region import Region, check_sides, join_neighbours
from kvplugin.kernels.streams import Direction

logger = logging.getLogger("vllm.kvplugin.kernels")

CHOICES: Final = 1024
"""Numbers of pieces whose choice is remembered."""


class TransferCopier:
    """Copies blocks one way between a device and the host.

    Each job asks the table once for its number of pieces (ids times runs of a block,
    neighbours joined) and their size (the mean run); the answer is remembered. Runs of
    ids, which DMA joins, are not looked for. An engine is built when a job first wants
    it, which compiles a kernel: `warm_up` does that beforehand.

    What is not pinned goes by DMA, one call a piece, whatever the table says: a kernel
    cannot reach it. Then a copy is correct but **not asynchronous**: the call may wait
    on the host for all that the stream waits for. Do that on a thread that launches no
    steps; a warning says so once a copier.

    Args:
        device_regions: blocks on the device.
        host_regions: blocks in host memory, region by region the same bytes.
        direction: which way.
        device: the GPU.
        pinned: whether all host memory is registered with the driver (`pinned.py`).
        card: as the table names it; None for `torch.cuda.get_device_name(device)`.
        cuts: where pinned pieces meet, as `DmaBlockCopier` takes them.

    Raises:
        ValueError: the sides differ in length or in a region's bytes, or are empty.
    """

    def __init__(
        self,
        device_regions: Sequence[Region],
        host_regions: Sequence[Region],
        direction: Direction,
        device: torch.device,
        pinned: bool,
        card: str | None = None,
        cuts: Sequence[int] = (),
    ) -> None:
        sources, targets = device_regions, host_regions
        if direction is Direction.LOAD:
            sources, targets = targets, sources
        check_sides(sources, targets)
        self._block_bytes = sum(region.nbytes for region in sources)
        self._runs = len(join_neighbours(zip(sources, targets, strict=True)))
        self._pinned = pinned
        self._choose = _choices(
            torch.cuda.get_device_name(device) if card is None else card,
            direction,
            self._block_bytes // self._runs,
        )
        self._builders: dict[Engine, Callable[[], Copier]] = {
            Engine.DMA: functools.partial(
                _dma_copier, sources, targets, device, pinned, cuts
            ),
            Engine.TRITON: functools.partial(_triton_copier, sources, targets, device),
        }
        self._engines: dict[Engine, Copier] = {}
        self._last: Engine | None = None
        if not pinned:
            logger.warning(
                "host memory is not pinned: each %s of KV blocks waits on the host",
                direction,
            )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all regions."""
        return self._block_bytes

    @property
    def last_engine(self) -> Engine | None:
        """Who was given the last job; None before the first."""
        return self._last

    def warm_up(self) -> None:
        """Build what jobs may want, so that none waits for a compiler."""
        for engine in Engine if self._pinned else (Engine.DMA,):
            self._engine(engine)

    def copy(self, source_ids: AnyIds, target_ids: AnyIds) -> int:
        """Copy block source_ids[i] to block target_ids[i], for every i.

        Launched on the device's current stream and, where host memory is pinned, not
        waited for. Blocks are copied in no particular order; nothing is copied unless
        all ids are good.

        Args:
            source_ids: flat, in host memory; an id may appear more than once.
            target_ids: likewise, and as many, each at most once.

        Returns:
            The bytes that will be copied; 0 for no ids.

        Raises:
            ValueError: ids are not flat lists of integers of one length in host
                memory, are out of range, or a target id is repeated.
            TransferError: DMA was refused; see `DmaBlockCopier.copy`.
            ConfigError: the engine can't be built.
        """
        check_on_host(source_ids, target_ids)
        engine = Engine.DMA
        if self._pinned and len(source_ids):
            engine = self._choose(len(source_ids) * self._runs)
        copier = self._engine(engine)
        self._last = engine
        return copier.copy(source_ids, target_ids)

    def _engine(self, engine: Engine) -> Copier:
        if engine not in self._engines:
            self._engines[engine] = self._builders[engine]()
        return self._engines[engine]


def warm_copier(
    device_regions: Sequence[Region],
    host_regions: Sequence[Region],
    direction: Direction,
    device: torch.device,
    pinned: bool,
    cuts: Sequence[int] = (),
) -> TransferCopier:
    """A copier whose engines are built: no job waits for a compiler."""
    copier = TransferCopier(
        device_regions, host_regions, direction, device, pinned, cuts=cuts
    )
    copier.warm_up()
    return copier


def _choices(
    card: str, direction: Direction, piece_bytes: int
) -> Callable[[int], Engine]:
    """The engine for a number of pieces, looked up once each."""
    return functools.lru_cache(CHOICES)(
        functools.partial(choose, card, direction, piece_bytes)
    )


def _dma_copier(
    sources: Sequence[Region],
    targets: Sequence[Region],
    device: torch.device,
    pinned: bool,
    cuts: Sequence[int],
) -> Copier:
    api = open_runtime(batch=pinned)
    return DmaBlockCopier(sources, targets, device, api=api, cuts=cuts)


def _triton_copier(
    sources: Sequence[Region], targets: Sequence[Region], device: torch.device
) -> Copier:
    from kvplugin.kernels.copy import DeviceBlockCopier

    return DeviceBlockCopier(sources, targets, device)
