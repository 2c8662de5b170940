"""What a rank registers once: its KV, its generations, and staging."""

import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from msgspec import structs

from kvplugin.connectors.nixl.agent import HOST, Area, NixlAgent, agent_name
from kvplugin.connectors.nixl.config import NixlConfig
from kvplugin.connectors.nixl.describe import describe_own_rank, describe_rank
from kvplugin.connectors.nixl.descriptor import RankDescriptor
from kvplugin.connectors.nixl.generations import FIRST
from kvplugin.connectors.nixl.huge_pages import move
from kvplugin.connectors.nixl.staging import Staging
from kvplugin.contract import EngineInfo, KVTensor
from kvplugin.errors import IntegrityError


class RankMemory:
    """This rank's memory, as other engines see it.

    Args:
        engine: the engine, with this worker's rank.
        config: the connector's configuration.
        tensors: the rank's KV memory by layer.

    Raises:
        ConfigError: NIXL is not installed, or has no such backend.
        LayoutMismatchError: a layer has no tensor, or one that is not laid out as its
            page promises.
        TransferError: NIXL does not register the memory.
    """

    def __init__(
        self, engine: EngineInfo, config: NixlConfig, tensors: Mapping[str, KVTensor]
    ) -> None:
        incarnation = secrets.randbelow(2**62) + 1
        self.generations: np.ndarray[Any, np.dtype[np.int64]]
        self.generations = np.full(engine.num_blocks, FIRST, np.int64)
        self.generations[0] = incarnation
        address = self.generations.ctypes.data
        rank = describe_rank(engine, tensors, address, incarnation, b"")
        device = next((layer.device for layer in rank.layers), HOST)
        self.staging = Staging(config.staging_bytes, device)
        self.agent: NixlAgent | None = None
        self._registered: list[Any] = []
        areas = merged(_areas(rank, engine.num_blocks))
        move(areas, config.huge_pages_s)
        if config.backends:
            name = agent_name(engine.rank, incarnation)
            self.agent = NixlAgent(name, config.backends)
            self._registered = self.agent.register([*areas, _area(self.generations)])
            rank = structs.replace(rank, agent_metadata=self.agent.metadata)
            # Not before: others are told of what they may read, and of nothing else.
            self._registered += self.agent.register([self.staging.area])
        self.rank = rank
        self.own = describe_own_rank(engine, config, rank)

    def set_generations(self, changes: Iterable[tuple[int, int]]) -> None:
        """What the array holds of these blocks from now on.

        Raises:
            IntegrityError: a block is not one that can be handed over.
        """
        for block, generation in changes:
            if not 0 < block < len(self.generations):
                raise IntegrityError(
                    f"a generation of block {block}, of {len(self.generations)} blocks"
                )
            self.generations[block] = generation

    def close(self) -> None:
        """Let NIXL forget it; no read is under way. Again: does nothing."""
        agent, self.agent = self.agent, None
        if agent is not None:
            agent.deregister(self._registered)
            self._registered = []
            agent.close()


def _areas(rank: RankDescriptor, num_blocks: int) -> Iterable[Area]:
    """The memory of all blocks, a layer at a time."""
    for layer in rank.layers:
        start = min(run.offset for run in layer.runs)
        end = max(
            run.offset + (num_blocks - 1) * run.stride + run.nbytes
            for run in layer.runs
        )
        yield Area(layer.address + start, end - start, layer.device)


def _area(array: "np.ndarray[Any, Any]") -> Area:
    return Area(array.ctypes.data, array.nbytes, HOST)


def merged(areas: Iterable[Area]) -> list[Area]:
    """The same memory in areas that neither overlap nor touch: layers often share one
    storage, and NIXL looks for one area that holds all of a piece."""
    found: list[Area] = []
    for area in sorted(areas, key=lambda area: (area.device, area.address)):
        before = found[-1] if found else None
        if (
            before is not None
            and before.device == area.device
            and area.address <= before.address + before.nbytes
        ):
            end = max(before.address + before.nbytes, area.address + area.nbytes)
            found[-1] = before._replace(nbytes=end - before.address)
        else:
            found.append(area)
    return found
