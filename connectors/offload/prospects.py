"""Whether host memory, as it is configured, can ever give a hit."""

from collections.abc import Iterator, Sequence

from kvplugin.connectors.offload.boundary import needed
from kvplugin.connectors.offload.chunks import Chunking, alignment, chunkings
from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.messages import HostPool
from kvplugin.contract import EngineInfo


def hopeless(
    engine: EngineInfo, config: OffloadConfig, pools: Sequence[HostPool]
) -> list[str]:
    """Why no request of this engine will ever be hit, naming the settings; nothing if
    it may be."""
    cuts = chunkings(engine, config.blocks_per_chunk)
    return [*_too_long(engine, config, cuts), *_too_small(pools, cuts)]


def _too_long(
    engine: EngineInfo, config: OffloadConfig, cuts: Sequence[Chunking]
) -> Iterator[str]:
    longest = engine.max_model_len
    if not longest:
        return
    chunk = max(cut.tokens for cut in cuts)
    if chunk > longest:
        yield (
            f"a chunk of {config.blocks_per_chunk} blocks has {chunk} tokens and a "
            f"request {longest} at most (max_model_len): lower blocks_per_chunk"
        )
    least = config.min_load_tokens or alignment(cuts)
    if least >= longest:
        yield (
            f"a request has {longest} tokens at most (max_model_len), the last of "
            f"which is always computed, and fewer than {least} are not loaded: lower "
            "min_load_tokens, or the block size"
        )


def _too_small(pools: Sequence[HostPool], cuts: Sequence[Chunking]) -> Iterator[str]:
    """The shortest hit needs more slots than a pool has."""
    unit, by_index = alignment(cuts), {cut.index: cut for cut in cuts}
    for pool in pools:
        shared = [by_index[index] for index in pool.groups]
        wanted = sum(len(needed(cut, unit)) for cut in shared)
        slots = pool.host_blocks // shared[0].blocks
        if slots < wanted:
            yield (
                f"the shortest hit, of {unit} tokens, needs {wanted} slots of host "
                f"memory for groups {pool.groups}, which have {slots}: raise "
                "cpu_bytes_to_use"
            )
