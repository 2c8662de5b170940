"""Copies of KV blocks by a GPU's copy engines, which take nothing from the step.

The DMA twin of `copy.py`: one descriptor a contiguous run of bytes. A descriptor costs
the host about half a microsecond, more than its bytes take below some 32 KiB (measured
by vLLM, pull request 48434, on an H100 with PCIe 5), so runs that continue each other
on both sides become one. This module imports no Triton.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from kvplugin.errors import TransferError
from kvplugin.kernels._runtime_memcpy import open_runtime
from kvplugin.kernels.ids import AnyIds, checked_pairs
from kvplugin.kernels.region import Ids, Pairs, Region, check_sides, join_neighbours

__all__ = ["DmaBlockCopier", "MemcpyApi", "check_on_host"]


class MemcpyApi(Protocol):
    """Who submits descriptors to the copy engines."""

    def copy_batch(self, targets: Ids, sources: Ids, sizes: Ids, stream: int) -> str:
        """Copy sizes[i] bytes from address sources[i] to address targets[i].

        Launched and not waited for, all after what is on the stream and before what
        comes next, among themselves in any order.

        Args:
            targets: addresses, at least one; no two descriptors overlap.
            sources: as many.
            sizes: as many, positive.
            stream: the runtime's handle; 0 is the legacy default stream.

        Returns:
            The runtime's reason to refuse; empty if it took all. What it took before
            it refused still runs.
        """


@dataclass(frozen=True)
class _Side:
    """One side's regions, neighbours joined."""

    starts: Ids
    """[regions, 1]"""
    strides: Ids
    """[regions, 1]"""
    nbytes: Ids
    """[regions]"""

    @classmethod
    def of(cls, regions: Sequence[Region]) -> "_Side":
        table = np.array([(r.address, r.stride, r.nbytes) for r in regions], np.int64)
        return cls(table[:, :1], table[:, 1:2], table[:, 2])

    def addresses(self, ids: Ids) -> Ids:
        """[regions, ids]"""
        return self.starts + ids * self.strides


class DmaBlockCopier:
    """Copies blocks between host and device, one descriptor a contiguous run.

    Region i of the sources goes to region i of the targets; a block has its id in
    all regions of its side. The copier keeps addresses, not memory: the caller keeps
    both sides alive until the copy has ended on the device. Host memory must be pinned
    (`pinned.py`), else the call may wait on the host for all that the stream waits
    for, and a batch may be refused.

    Args:
        sources: where blocks are read.
        targets: where they are written; must not overlap the source blocks of a job.
        device: whose current stream copies are launched on.
        api: who submits; None for the runtime that torch has loaded.
        cuts: addresses where one pinned piece of host memory ends and the next begins
            (`PinnedMemory`): no descriptor spans one, which the runtime would refuse.

    Raises:
        ValueError: the sides differ in length or in a region's bytes, or are empty; or
            a cut lies inside a block's run.
        ConfigError: torch has loaded no runtime that could be called.
    """

    def __init__(
        self,
        sources: Sequence[Region],
        targets: Sequence[Region],
        device: torch.device,
        *,
        api: MemcpyApi | None = None,
        cuts: Iterable[int] = (),
    ) -> None:
        check_sides(sources, targets)
        self._source_blocks = min(region.blocks for region in sources)
        self._target_blocks = min(region.blocks for region in targets)
        self._block_bytes = sum(region.nbytes for region in sources)
        pairs = join_neighbours(zip(sources, targets, strict=True))
        self._reads, self._writes = (
            _Side.of(regions) for regions in zip(*pairs, strict=True)
        )
        self._gapless = (self._reads.strides == self._reads.nbytes[:, None]) & (
            self._writes.strides == self._writes.nbytes[:, None]
        )
        self._cuts = np.array(sorted(cuts), np.int64)
        _check_cuts(pairs, self._cuts)
        self._device = device
        self._api = open_runtime() if api is None else api

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all regions."""
        return self._block_bytes

    def copy(self, source_ids: AnyIds, target_ids: AnyIds) -> int:
        """Copy block source_ids[i] to block target_ids[i], for every i.

        The copy is launched on the device's current stream and not waited for, in one
        call of the runtime for some thousands of descriptors where it can (not on the
        default stream). Not while the stream is captured into a graph. Blocks are
        copied in no particular order; nothing is copied unless all ids are good. Where
        regions have no gaps, ids that go up in step on both sides are one descriptor.

        Args:
            source_ids: flat, in host memory; an id may appear more than once.
            target_ids: likewise, and as many, each at most once.

        Returns:
            The bytes that will be copied; 0 for no ids.

        Raises:
            ValueError: ids are not flat lists of integers of one length in host
                memory, are out of range, or a target id is repeated.
            TransferError: the runtime refused, in its words. What it took before
                still runs.
        """
        check_on_host(source_ids, target_ids)
        sources, targets = checked_pairs(
            source_ids, target_ids, self._source_blocks, self._target_blocks
        )
        if len(sources):
            self._launch(*self._descriptors(sources, targets))
        return len(sources) * self._block_bytes

    def _descriptors(self, source_ids: Ids, target_ids: Ids) -> tuple[Ids, Ids, Ids]:
        """Targets, sources and sizes, from arrays [pairs of regions, ids]."""
        reads = self._reads.addresses(source_ids)
        writes = self._writes.addresses(target_ids)
        first = np.ones(reads.shape, np.bool_)
        in_step = (np.diff(source_ids) == 1) & (np.diff(target_ids) == 1)
        first[:, 1:] = ~(in_step & self._gapless)
        if len(self._cuts):
            first |= np.isin(reads, self._cuts) | np.isin(writes, self._cuts)
        # A run ends where the next begins: each pair's first id begins one.
        starts = np.flatnonzero(first)
        blocks = np.diff(starts, append=first.size)
        sizes = blocks * self._reads.nbytes[starts // len(source_ids)]
        return writes[first], reads[first], sizes

    def _launch(self, targets: Ids, sources: Ids, sizes: Ids) -> None:
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                stream = torch.cuda.current_stream(self._device).cuda_stream
                reason = self._api.copy_batch(targets, sources, sizes, stream)
        else:
            reason = self._api.copy_batch(targets, sources, sizes, 0)
        if reason:
            raise TransferError(
                f"{len(sizes)} copies of {int(sizes.sum())} bytes by DMA on "
                f"{self._device} failed: {reason}"
            )


def check_on_host(*ids: AnyIds) -> None:
    """Check that ids are not on a device: reading them there would wait for it.

    Raises:
        ValueError: they are.
    """
    for side in ids:
        if isinstance(side, torch.Tensor) and side.device.type != "cpu":
            raise ValueError(
                f"block ids must be in host memory, not on {side.device}: DMA takes "
                "its descriptors from the host"
            )


def _check_cuts(pairs: Pairs, cuts: Ids) -> None:
    for region in (region for pair in pairs for region in pair):
        offsets = cuts - region.address
        inside = (offsets > 0) & (offsets < region.stride * region.blocks)
        inside &= (offsets % region.stride > 0) & (
            offsets % region.stride < region.nbytes
        )
        if inside.any():
            raise ValueError(
                f"pinned pieces meet at {int(cuts[inside][0]):#x}, inside a block's "
                f"{region.nbytes} bytes: pin with unit_bytes of a whole slot"
            )
