"""How much host memory holds, and how it is shared out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvplugin.connectors.offload.chunks import Chunking, chunkings
from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.memory import check_machine_memory
from kvplugin.connectors.offload.messages import HostPool
from kvplugin.contract import EngineInfo
from kvplugin.errors import CapacityError
from kvplugin.spec import cdiv


def host_pools(engine: EngineInfo, config: OffloadConfig) -> list[HostPool]:
    """Blocks that `cpu_bytes_to_use` holds; each rank keeps its part of all of them.

    Groups whose slots are alike share a pool. Several pools get what one request of
    the greatest length would fill of each, so that none is full long before others.

    Raises:
        ConfigError: the model has a kind of group that is not served, or none at all.
        CapacityError: a pool would have not even one slot, or a rank's share is more
            than its machine has.
    """
    demands = _demands(engine, config)
    total = sum(demand.slots * demand.slot_bytes for demand in demands)
    pools = []
    for demand in demands:
        slots = int(config.cpu_bytes_to_use * demand.slots // total)
        if slots < 1:
            raise _too_small(config, engine, demands, total)
        groups = [cut.index for cut in demand.cuts]
        pools.append(HostPool(groups, slots * demand.blocks))
    nbytes = sum(
        pool.host_blocks // demand.blocks * demand.slot_bytes
        for pool, demand in zip(pools, demands, strict=True)
    )
    check_machine_memory(nbytes // engine.world_size)
    return pools


@dataclass(frozen=True)
class _Demand:
    """Of one request on one pool."""

    cuts: Sequence[Chunking]
    slots: int
    slot_bytes: int
    """On all ranks."""

    @property
    def blocks(self) -> int:
        """Host blocks of a slot."""
        return self.cuts[0].blocks


def _demands(engine: EngineInfo, config: OffloadConfig) -> list[_Demand]:
    cuts = chunkings(engine, config.blocks_per_chunk)
    most = max(cut.group.block_size for cut in cuts) * max(1, engine.num_blocks - 1)
    longest = engine.max_model_len or most
    step = engine.max_step_tokens or longest
    pools: dict[tuple[int, int], list[Chunking]] = {}
    for cut in cuts:
        pools.setdefault((cut.slot_bytes, cut.blocks), []).append(cut)
    return [
        _Demand(
            shared,
            sum(cdiv(cut.coverage.kept(longest, step), blocks) for cut in shared),
            max(1, slot_bytes) * engine.world_size,
        )
        for (slot_bytes, blocks), shared in pools.items()
    ]


def _too_small(
    config: OffloadConfig, engine: EngineInfo, demands: Sequence[_Demand], total: int
) -> CapacityError:
    """Names the pool that needs most."""
    rarest = min(demands, key=lambda demand: demand.slots)
    cut = rarest.cuts[0]
    needed = math.ceil(total / rarest.slots)
    kinds = ", ".join(sorted({c.group.kind for c in rarest.cuts}))
    share = "" if len(demands) == 1 else f", in its share of {needed} bytes in all"
    return CapacityError(
        f"cpu_bytes_to_use={config.cpu_bytes_to_use:.0f} holds no chunk of group "
        f"{cut.index} ({kinds}): {cut.blocks} blocks of {cut.group.block_size} tokens "
        f"on {engine.world_size} ranks need {rarest.slot_bytes} bytes{share}"
    )
