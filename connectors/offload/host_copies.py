"""Copies between one rank's KV tensors and its host memory, by the CPU."""

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence

from kvplugin.connectors.offload.copy_thread import CopyThread
from kvplugin.connectors.offload.group_copiers import GroupCopiers
from kvplugin.connectors.offload.messages import HostPool
from kvplugin.connectors.offload.pool_memory import PoolMemory, engine_regions
from kvplugin.contract import CopyJob, GroupInfo, KVTensor
from kvplugin.kernels.dispatch import Copier, block_copier
from kvplugin.kernels.host import warm_up
from kvplugin.kernels.region import Region

logger = logging.getLogger("vllm.kvplugin.offload")


class HostCopies:
    """Copies blocks of KV tensors that the CPU can address. Any number of threads may
    `execute` at once, as long as their jobs have no block in common.

    Args:
        groups: the groups and the pages of their layers.
        tensors: KV memory by layer.

    Raises:
        LayoutMismatchError: a tensor is not laid out as its page promises.
    """

    may_hold_a_step = True

    def __init__(
        self, groups: Iterable[GroupInfo], tensors: Mapping[str, KVTensor]
    ) -> None:
        self._engine = engine_regions(groups, tensors)
        warm_up()  # while the engine starts, not at its first copy
        self._memory: PoolMemory | None = None
        self._copiers: GroupCopiers | None = None
        self._lock = threading.Lock()
        self._under_way = 0

    def allocate(self, pools: Sequence[HostPool]) -> int:
        """Make room for all pools, in place of what there was, and build the copy
        engines.

        Returns:
            Bytes of host memory.

        Raises:
            CapacityError: the machine has not so much memory.
            IntegrityError: the pools are not of these groups.
        """
        self.close()
        self._memory = PoolMemory(self._engine, pools)
        self._copiers = GroupCopiers(self._engine, self._memory.regions, _copier)
        return self._memory.nbytes

    def transport(self) -> CopyThread:
        """Copies in a thread beside the engine's."""
        return CopyThread(self.execute)

    def execute(self, job: CopyJob) -> int:
        """Copy a job's blocks; returns the bytes copied.

        Raises:
            ValueError: an id is out of range, or a group is not offloaded.
        """
        with self._lock:
            copiers = self._copiers
            if copiers is None:
                raise ValueError("there is no host memory")
            self._under_way += 1
        try:
            return copiers.copy(job)
        finally:
            with self._lock:
                self._under_way -= 1

    def close(self) -> None:
        """Give host memory back, unless a copy that does not end may still use it."""
        memory, self._memory = self._memory, None
        with self._lock:
            self._copiers = None
            under_way = self._under_way
        if memory is None:
            return
        if not under_way:
            memory.close()
            return
        memory.abandon()
        logger.error(
            "%d copies do not end: %.2f GiB of host memory are not given back",
            under_way,
            memory.nbytes / 2**30,
        )


def _copier(engine: Sequence[Region], host: Sequence[Region], store: bool) -> Copier:
    return block_copier(engine, host) if store else block_copier(host, engine)
