"""How much host memory holds."""

from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.memory import check_machine_memory
from kvplugin.contract import EngineInfo
from kvplugin.errors import CapacityError, ConfigError


def host_slots(engine: EngineInfo, config: OffloadConfig) -> int:
    """Chunks that `cpu_bytes_to_use` holds; each rank keeps its part of all of them.

    Raises:
        ConfigError: the engine has several groups, which offload cannot keep yet.
        CapacityError: it holds not even one chunk, or a rank's share is more than
            its machine has.
    """
    if len(engine.groups) != 1:
        kinds = ", ".join(group.kind for group in engine.groups)
        raise ConfigError(
            f"offload keeps one group of full attention or MLA; the engine has {kinds}"
        )
    (group,), ranks = engine.groups, engine.world_size
    chunk_bytes = group.block_bytes * config.blocks_per_chunk * ranks
    slots = int(config.cpu_bytes_to_use // chunk_bytes)
    if slots < 1:
        raise CapacityError(
            f"cpu_bytes_to_use={config.cpu_bytes_to_use:.0f} holds no chunk: "
            f"{config.blocks_per_chunk} blocks of {group.block_size} tokens on "
            f"{ranks} ranks need {chunk_bytes} bytes"
        )
    check_machine_memory(slots * chunk_bytes // ranks)
    return slots
