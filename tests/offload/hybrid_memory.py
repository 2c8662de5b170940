"""Memory of several ranks, and the host memory below each.

Every rank computes the same tokens over blocks of the same ids, and copies its own
bytes at its own time. What is in a block is the content model's; here is what makes
several of it one engine, and host memory that knows which pool an id belongs to.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvplugin.connectors.offload.messages import HostPool
from kvplugin.contract import CopyJob
from kvplugin.testing import ContentModel, Row, watch_pool
from kvplugin.testing.faults import BLOCK_BYTES
from kvplugin.testing.slots import BlockContent, ContentError


class Ranks(ContentModel):
    """The first rank's memory, and behind it that of the others.

    Args:
        groups: of all ranks.
        pool: of all ranks, not used yet.
        num_ranks: at least one.
    """

    def __init__(self, groups: Sequence[Any], pool: Any, num_ranks: int) -> None:
        super().__init__(groups, pool.num_blocks)
        self.others = [
            ContentModel(groups, pool.num_blocks) for _ in range(num_ranks - 1)
        ]
        watch_pool(pool, self)
        for other in self.others:
            other.in_use = self.in_use

    @property
    def ranks(self) -> list[ContentModel]:
        """Every rank's memory."""
        return [self, *self.others]

    def handed_out(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        super().handed_out(blocks)
        for other in self.others:
            other.handed_out(blocks)

    def poison(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        super().poison(blocks)
        for other in self.others:
            other.poison(blocks)

    def zero(self, blocks: Iterable[int], grants: Sequence[int] | None = None) -> None:
        blocks = list(blocks)
        super().zero(blocks, grants)
        for other in self.others:
            other.zero(blocks, grants)

    def write(self, group: int, row: Row, start: int, histories: Sequence[int]) -> None:
        super().write(group, row, start, histories)
        for other in self.others:
            other.write(group, row, start, histories)

    def scribble(self, group: int, row: Row, start: int, stop: int) -> None:
        super().scribble(group, row, start, stop)
        for other in self.others:
            other.scribble(group, row, start, stop)

    def read(
        self, group: int, row: Row, positions: Iterable[int], histories: Sequence[int]
    ) -> list[int]:
        positions = list(positions)
        for other in self.others:
            other.read(group, row, positions, histories)
        return super().read(group, row, positions, histories)

    def write_state(
        self, group: int, row: Row, index: int, position: int, history: int
    ) -> None:
        super().write_state(group, row, index, position, history)
        for other in self.others:
            other.write_state(group, row, index, position, history)

    def read_state(
        self, group: int, row: Row, index: int, position: int, history: int
    ) -> int:
        for other in self.others:
            other.read_state(group, row, index, position, history)
        return super().read_state(group, row, index, position, history)

    def copy_state(self, group: int, row: Row, source: int, target: int) -> None:
        super().copy_state(group, row, source, target)
        for other in self.others:
            other.copy_state(group, row, source, target)


class HostMemory:
    """One rank's host memory: what `FakeTransport` moves.

    Args:
        memory: the rank's engine blocks.
        awaits_load: whether an engine block is to be filled by a load.
    """

    def __init__(
        self, memory: ContentModel, awaits_load: Callable[[int], bool]
    ) -> None:
        self.blocks: dict[tuple[int, int], BlockContent] = {}
        """By pool and host id."""
        self.moved = 0
        """Blocks so far, either way."""
        self._memory = memory
        self._awaits_load = awaits_load
        self._pools: Sequence[HostPool] = ()

    def open(self, pools: Sequence[HostPool]) -> None:
        """Host memory of this size, which loses what it held."""
        self._pools = list(pools)
        self.blocks.clear()

    def execute(self, job: CopyJob) -> int:
        """Move the blocks of a job, as they are now.

        Raises:
            ContentError: an engine block is null, free, or does not await a load; a
                host block lies outside its pool, or was never written.
        """
        for group, engine_ids, host_ids in job.parts:
            places = [self.place(group, host) for host in host_ids]
            if job.store:
                copies = self._memory.store(engine_ids)
                self.blocks.update(zip(places, copies, strict=True))
            else:
                self._load(group, engine_ids, places)
            self.moved += len(engine_ids)
        return BLOCK_BYTES * sum(len(part[1]) for part in job.parts)

    def _load(
        self, group: int, engine_ids: Sequence[int], places: list[tuple[int, int]]
    ) -> None:
        for block, place in zip(engine_ids, places, strict=True):
            if not self._awaits_load(block):
                raise ContentError(f"block {block} of group {group} awaits no load")
            if place not in self.blocks:
                raise ContentError(f"host block {place} was never written")
        self._memory.load([self.blocks[place] for place in places], engine_ids)

    def place(self, group: int, host: int) -> tuple[int, int]:
        """Where a host block of a group is: key of `blocks`."""
        for index, pool in enumerate(self._pools):
            if group in pool.groups:
                if not 0 <= host < pool.host_blocks:
                    raise ContentError(f"{pool} has no block {host}")
                return index, host
        raise ContentError(f"group {group} has no host memory: {self._pools}")
