"""Copies between one rank's KV tensors and its host memory."""

from collections.abc import Iterable, Mapping

from kvplugin.connectors.offload.memory import HostMemory
from kvplugin.contract import CopyJob, GroupInfo, KVTensor
from kvplugin.errors import IntegrityError
from kvplugin.kernels.host import BlockCopier, Region, warm_up
from kvplugin.kernels.region import staging_regions
from kvplugin.layout import block_runs


class HostCopies:
    """Host block h is one block of one group: the bytes of its layers, one after
    the other, at h times the size of the largest group's block.

    Args:
        groups: the groups and the pages of their layers.
        tensors: KV memory by layer; layers that share another's memory are copied
            once.

    Raises:
        LayoutMismatchError: a tensor is not laid out as its page promises.
    """

    def __init__(
        self, groups: Iterable[GroupInfo], tensors: Mapping[str, KVTensor]
    ) -> None:
        self._engine = {
            group.index: _engine_regions(group, tensors) for group in groups
        }
        self._block_bytes = max(
            sum(region.nbytes for region in regions)
            for regions in self._engine.values()
        )
        warm_up()  # while the engine starts, not at its first copy
        self._memory: HostMemory | None = None
        self._copiers: dict[tuple[int, bool], BlockCopier] = {}

    def allocate(self, host_blocks: int) -> int:
        """Make room for `host_blocks` blocks and build the copy engines.

        Returns:
            Bytes of host memory.

        Raises:
            CapacityError: the machine has not so much memory.
        """
        self._memory = HostMemory(host_blocks * self._block_bytes)
        for group, engine in self._engine.items():
            host = staging_regions(
                self._memory.address,
                [region.nbytes for region in engine],
                host_blocks,
                self._block_bytes,
            )
            self._copiers[group, True] = BlockCopier(engine, host)
            self._copiers[group, False] = BlockCopier(host, engine)
        return self._memory.nbytes

    def execute(self, job: CopyJob) -> int:
        """Copy a job's blocks; returns the bytes copied.

        Raises:
            ValueError: an id is out of range.
        """
        nbytes = 0
        for group, engine_ids, host_ids in job.parts:
            copier = self._copiers[group, job.store]
            pairs = (engine_ids, host_ids) if job.store else (host_ids, engine_ids)
            nbytes += copier.copy(*pairs)
        return nbytes

    def close(self) -> None:
        """Give host memory back; no copy may be under way."""
        self._copiers.clear()
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()


def _engine_regions(group: GroupInfo, tensors: Mapping[str, KVTensor]) -> list[Region]:
    regions: dict[Region, None] = {}
    for layer, page in group.layers.items():
        tensor = tensors[layer]
        for run in block_runs(tensor.layout, page):
            region = Region(
                tensor.address + run.offset, run.stride, run.nbytes, page.num_blocks
            )
            regions[region] = None
    if not regions:
        raise IntegrityError(f"group {group.index} has no layers")
    return list(regions)
