"""Copy engines of all groups, both ways."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from kvplugin.connectors.offload.pool_memory import GroupRegions
from kvplugin.contract import CopyJob
from kvplugin.kernels.dispatch import Copier
from kvplugin.kernels.region import Region

MakeCopier: TypeAlias = Callable[[Sequence[Region], Sequence[Region], bool], Copier]
"""From a group's blocks in the KV tensors and in host memory, and whether it stores."""


class GroupCopiers:
    """Copies the blocks of jobs, each group's by engines of its own.

    Args:
        engine: the groups' blocks in the KV tensors.
        host: their blocks in host memory; of a group without layers on this rank,
            none.
        make: makes an engine for one way.
    """

    def __init__(
        self,
        engine: GroupRegions,
        host: Mapping[int, Sequence[Region]],
        make: MakeCopier,
    ) -> None:
        self._groups = frozenset(host)
        self._copiers = {
            (group, store): make(engine[group], regions, store)
            for group, regions in host.items()
            if regions
            for store in (True, False)
        }

    def copy(self, job: CopyJob) -> int:
        """Copy a job's blocks; returns the bytes.

        Raises:
            ValueError: an id is out of range, or a group is not offloaded.
        """
        return sum(self._copy(job.store, *part) for part in job.parts)

    def _copy(
        self,
        store: bool,
        group: int,
        engine_ids: Sequence[int],
        host_ids: Sequence[int],
    ) -> int:
        if group not in self._groups:
            raise ValueError(f"group {group} is not offloaded")
        copier = self._copiers.get((group, store))
        if copier is None:
            return 0  # its layers are on other ranks
        pairs = (engine_ids, host_ids) if store else (host_ids, engine_ids)
        return copier.copy(*pairs)
