"""Connectors under this engine: what they are told, and how their halves are made."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvplugin.connectors.nixl.config import NixlConfig, Role
from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.scheduler import OffloadScheduler
from kvplugin.connectors.offload.worker import OffloadWorker
from kvplugin.contract import (
    EngineInfo,
    GroupInfo,
    GroupKind,
    IntroducesItself,
    MeetsPeers,
    ModelIdentity,
    SchedulerHalf,
    WorkerHalf,
)
from kvplugin.integration.reference.config import ModelConfig
from kvplugin.integration.reference.layers.recurrent import KIND, shared_state
from kvplugin.spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    dtype_name,
    layer_spec,
)
from kvplugin.worker.describe import describe_caches
from kvplugin.worker.layout_choice import LayoutWish
from kvplugin.worker.tensors import KVTensors

# Subclasses first: MLA and sinks are full attention.
_KINDS: Final[tuple[tuple[type[KVCacheSpec], GroupKind], ...]] = (
    (MLAAttentionSpec, GroupKind.MLA),
    (FullAttentionSpec, GroupKind.FULL),
    (SlidingWindowSpec, GroupKind.SLIDING_WINDOW),
    (ChunkedLocalAttentionSpec, GroupKind.CHUNKED_LOCAL),
    (MambaSpec, GroupKind.MAMBA),
    (CrossAttentionSpec, GroupKind.CROSS_ATTENTION),
)


@dataclass(frozen=True)
class Connector:
    """How the two halves of a connector are made."""

    make_scheduler_half: Callable[[EngineInfo], SchedulerHalf]
    make_worker_half: Callable[[EngineInfo], WorkerHalf]
    """Called once a rank; the engine registers the rank's KV tensors with it."""
    wishes: tuple[LayoutWish, ...] = ()
    """What it asks of the layout."""


def offload(config: OffloadConfig) -> Connector:
    """Offload to host memory."""
    return Connector(
        lambda info: OffloadScheduler(info, config),
        lambda info: OffloadWorker(info, config),
    )


def nixl(
    config: NixlConfig, role: Role, *, clock: Callable[[], float] = time.monotonic
) -> Connector:
    """Prefill/decode disaggregation over NIXL.

    Args:
        config: its settings.
        role: what the engine is to others.
        clock: seconds, for leases and deadlines.
    """
    # Only here: they need the packages of the extra `nixl`.
    from kvplugin.connectors.nixl.scheduler import NixlScheduler
    from kvplugin.connectors.nixl.worker import NixlWorker

    return Connector(
        lambda info: NixlScheduler(info, config, role, clock=clock),
        lambda info: NixlWorker(info, config, clock=clock),
    )


def engine_info(
    config: KVCacheConfig,
    tensors: KVTensors,
    *,
    hash_block_size: int,
    rank: int = 0,
    world_size: int = 1,
    max_model_len: int = 0,
    max_step_tokens: int = 0,
    model: ModelIdentity = ModelIdentity(),  # noqa: B008
    prefix_caching: bool = True,
    engine_id: str = "reference",
) -> EngineInfo:
    """What connectors may know of this engine and rank.

    Args:
        config: the rank's.
        tensors: its KV memory.
        hash_block_size: tokens of a block hash.
        rank: of the tensor-parallel ranks.
        world_size: their number.
        max_model_len: tokens of the longest request.
        max_step_tokens: tokens that a step computes at most.
        model: whose KV it is.
        prefix_caching: whether the engine has it.
        engine_id: names the engine among others.
    """
    return EngineInfo(
        engine_id=engine_id,
        groups=tuple(
            group_info(index, group, tensors)
            for index, group in enumerate(config.kv_cache_groups)
        ),
        num_blocks=config.num_blocks,
        hash_block_size=hash_block_size,
        world_size=world_size,
        rank=rank,
        tp_size=world_size,
        max_model_len=max_model_len,
        max_step_tokens=max_step_tokens,
        model=model,
        prefix_caching=prefix_caching,
    )


def group_info(index: int, group: KVCacheGroupSpec, tensors: KVTensors) -> GroupInfo:
    """What connectors may know of one group.

    Windows keep nothing for drafts beyond what they read: the core gives their blocks
    back on settled tokens.
    """
    names = group.own_layer_names
    spec = layer_spec(group.kv_cache_spec, names[0])
    return GroupInfo(
        index=index,
        kind=group_kind(group.kv_cache_spec, names),
        block_size=spec.block_size,
        layers={name: tensors.layers[name].page for name in names},
        window=_window(spec),
        state_every_block=isinstance(spec, MambaSpec)
        and spec.mamba_cache_mode == "all",
        has_drafter=group.is_eagle_group,
    )


def _window(spec: KVCacheSpec) -> int:
    if isinstance(spec, SlidingWindowSpec):
        return spec.sliding_window
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return spec.attention_chunk_size
    return 0


def group_kind(spec: KVCacheSpec, layers: Sequence[str]) -> GroupKind:
    """How the layers of a group use their history."""
    one = layer_spec(spec, layers[0])
    return next((kind for cls, kind in _KINDS if isinstance(one, cls)), GroupKind.OTHER)


def register(half: WorkerHalf, tensors: KVTensors, model: ModelConfig) -> None:
    """Give a worker half its rank's KV memory.

    Args:
        half: the rank's.
        tensors: its memory.
        model: whose KV it is.
    """
    heads = {
        name: model.num_kv_heads
        for name, cache in tensors.layers.items()
        if not isinstance(cache.spec, (MLAAttentionSpec, MambaSpec))
    }
    described = describe_caches(tensors, heads)
    for name, tensor in described.items():
        if isinstance(spec := tensors.layers[name].spec, MambaSpec):
            interior = "/".join((KIND, *map(dtype_name, spec.dtypes)))
            state = shared_state(spec, model.num_heads)
            described[name] = replace(tensor, interior=interior, state=state)
    half.register(described)


def introduce(half: SchedulerHalf, workers: Sequence[WorkerHalf]) -> None:
    """Let a scheduler half that meets peers know what they must know of each rank."""
    if isinstance(half, MeetsPeers):
        half.meet(
            {
                rank: worker.introduction()
                for rank, worker in enumerate(workers)
                if isinstance(worker, IntroducesItself)
            }
        )
