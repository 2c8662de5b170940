"""Where one rank's blocks are: in its KV tensors, and in its host memory."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from kvplugin.connectors.offload.memory import HostMemory, check_machine_memory
from kvplugin.connectors.offload.messages import HostPool
from kvplugin.contract import GroupInfo, KVTensor
from kvplugin.errors import IntegrityError
from kvplugin.kernels.region import Region, staging_regions
from kvplugin.layout import block_runs

GroupRegions: TypeAlias = Mapping[int, Sequence[Region]]
"""The runs of a group's blocks, by the group's index; of a group without layers on
this rank, none."""


def engine_regions(
    groups: Iterable[GroupInfo], tensors: Mapping[str, KVTensor]
) -> GroupRegions:
    """The blocks of all groups that can be found again; others are never copied.

    Layers of a group that share memory (one uses the KV of another) are one. Groups
    may well overlay the same bytes: of those, a block has one group at a time.

    Raises:
        LayoutMismatchError: a tensor is not laid out as its page promises.
    """
    return {
        group.index: _regions_of(group, tensors) for group in groups if group.reusable
    }


def _regions_of(group: GroupInfo, tensors: Mapping[str, KVTensor]) -> list[Region]:
    regions: dict[Region, None] = {}
    for layer, page in group.layers.items():
        tensor = tensors[layer]
        for run in block_runs(tensor.layout, page):
            region = Region(
                tensor.address + run.offset, run.stride, run.nbytes, page.num_blocks
            )
            regions[region] = None
    return list(regions)


class PoolMemory:
    """The host memory of all pools; each has its own, and its own size of a block.

    Host block h of a pool lies at h times the size of the largest block among the
    pool's groups, and holds one block of one of them: the bytes of its layers, one
    after the other.

    Args:
        engine: the blocks in the KV tensors.
        pools: of which groups, and how many blocks.

    Raises:
        CapacityError: the machine has not so much memory.
        IntegrityError: a pool is of a group that is not offloaded, or that another
            pool has.
    """

    def __init__(self, engine: GroupRegions, pools: Sequence[HostPool]) -> None:
        _check_groups(engine, pools)
        self.regions: dict[int, list[Region]] = {
            group: [] for pool in pools for group in pool.groups
        }
        """By group: the host's side of `engine`, in the same order."""
        self.memories: list[tuple[HostMemory, int]] = []
        """Buffers, each with the bytes from one of its blocks to the next."""
        sized = [(pool, _block_bytes(engine, pool)) for pool in pools]
        check_machine_memory(sum(pool.host_blocks * size for pool, size in sized))
        for pool, block_bytes in sized:
            if pool.host_blocks and block_bytes:
                self._add(engine, pool, block_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return sum(memory.nbytes for memory, _ in self.memories)

    def _add(self, engine: GroupRegions, pool: HostPool, block_bytes: int) -> None:
        memory = HostMemory(pool.host_blocks * block_bytes)
        self.memories.append((memory, block_bytes))
        for group in pool.groups:
            self.regions[group] = staging_regions(
                memory.address,
                [region.nbytes for region in engine[group]],
                pool.host_blocks,
                block_bytes,
            )

    def abandon(self) -> None:
        """Never give the memory back: a copy that does not end may still use it."""
        for memory, _ in self.memories:
            memory.abandon()

    def close(self) -> None:
        """Give the memory back; no copy may be under way."""
        self.regions.clear()
        while self.memories:
            self.memories.pop()[0].close()


def _block_bytes(engine: GroupRegions, pool: HostPool) -> int:
    return max(
        (sum(region.nbytes for region in engine[group]) for group in pool.groups),
        default=0,
    )


def _check_groups(engine: GroupRegions, pools: Sequence[HostPool]) -> None:
    groups = [group for pool in pools for group in pool.groups]
    if len(set(groups)) < len(groups) or not engine.keys() >= set(groups):
        raise IntegrityError(
            f"host pools of groups {groups} do not fit an engine that offloads groups "
            f"{list(engine)}"
        )
