"""The bytes of KV blocks, as copies find and leave them."""

import ctypes
from collections.abc import Iterator

from kvplugin.connectors.offload.host_copies import HostCopies
from kvplugin.contract import CopyJob
from kvplugin.integration.reference import ReferenceEngine
from kvplugin.integration.reference.runner import Runner
from kvplugin.kernels.region import Region
from kvplugin.worker.describe import regions
from tests.reference.bench import Bench


def regions_of(runner: Runner, group: int) -> list[Region]:
    """Where a rank has the blocks of a group, over all of the group's layers."""
    return [
        region
        for cache in runner.tensors.layers.values()
        if cache.group == group
        for region in regions(cache)
    ]


def read(places: list[Region], block: int) -> bytes:
    """A block's bytes."""
    return b"".join(
        ctypes.string_at(place.address + block * place.stride, place.nbytes)
        for place in places
    )


def zero(places: list[Region], block: int) -> None:
    """Make them zeros."""
    for place in places:
        ctypes.memset(place.address + block * place.stride, 0, place.nbytes)


class Pages:
    """Bytes of the only request's blocks: what stores read, and what loads wrote.

        pages = Pages()
        bench = Bench(layers, fate=..., move=pages.move)
        pages.bench = bench

    Keys are (rank, group, entry of the request's row).
    """

    def __init__(self) -> None:
        self.bench: Bench
        self.stored: dict[tuple[int, int, int], bytes] = {}
        self.loaded: dict[tuple[int, int, int], bytes] = {}
        self.zeroed_group = -1
        """Of which loads leave zeros."""
        self._ranks: list[HostCopies] = []

    def move(self, copies: HostCopies, job: CopyJob) -> int:
        """Execute a copy, and look at its blocks of the engine."""
        if copies not in self._ranks:
            self._ranks.append(copies)
        rank, engine = self._ranks.index(copies), self.bench.engine
        moved = copies.execute(job)
        seen = self.stored if job.store else self.loaded
        for group, entry, block in _entries(engine, job):
            places = regions_of(engine.ranks.runners[rank], group)
            if group == self.zeroed_group and not job.store:
                zero(places, block)
            seen[rank, group, entry] = read(places, block)
        return moved

    def check(self) -> int:
        """All that was loaded is what was stored; the number of blocks."""
        assert self.loaded
        for place, found in self.loaded.items():
            assert found == self.stored[place], f"other bytes in {place}"
        return len(self.loaded)


def _entries(engine: ReferenceEngine, job: CopyJob) -> Iterator[tuple[int, int, int]]:
    """Group, entry and block of what a job copies for the engine's only request."""
    (req_id,) = engine.scheduler.requests
    rows = engine.manager.get_block_ids(req_id)
    for group, blocks, _ in job.parts:
        for block in blocks:
            yield group, list(rows[group]).index(block), block
