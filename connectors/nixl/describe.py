"""Descriptors made from an engine, and read from bytes that a stranger sent."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from kvplugin.connectors.nixl.config import NixlConfig
from kvplugin.connectors.nixl.descriptor import (
    FORMAT,
    EngineDescriptor,
    GroupDescriptor,
    HostIdentity,
    LayerMemory,
    ModelDescriptor,
    RankDescriptor,
)
from kvplugin.connectors.nixl.descriptor_checks import (
    MAX_DESCRIPTOR_BYTES,
    check_engine,
    check_rank,
)
from kvplugin.connectors.nixl.version import VERSION
from kvplugin.contract import EngineInfo, GroupInfo, GroupKind, KVTensor
from kvplugin.errors import IntegrityError, KVPluginError, LayoutMismatchError
from kvplugin.layout import PageLayout, block_runs
from kvplugin.wire import decode, encode

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE: Final = Path("/proc/self/ns/pid")
_LONGEST_ERROR: Final = 1000

T = TypeVar("T", bound=msgspec.Struct)


def describe_rank(
    engine: EngineInfo,
    tensors: Mapping[str, KVTensor],
    generations_address: int,
    incarnation: int,
    agent_metadata: bytes,
) -> RankDescriptor:
    """This rank, in this process.

    Args:
        engine: with this worker's rank.
        tensors: its KV memory by layer.
        generations_address: of the array of generations.
        incarnation: its entry 0.
        agent_metadata: NIXL's.

    Raises:
        LayoutMismatchError: a layer has no tensor, or one that is not laid out as
            its page promises.
    """
    layers = [
        _layer(group, name, page, tensors)
        for group in engine.groups
        if is_handed_over(group)
        for name, page in group.layers.items()
    ]
    return RankDescriptor(
        rank=engine.rank,
        layers=layers,
        generations_address=generations_address,
        incarnation=incarnation,
        agent_metadata=agent_metadata,
        host=host_identity(),
    )


def is_handed_over(group: GroupInfo) -> bool:
    """Whether who continues a request needs this group's blocks: what a hit needs,
    and states in any case."""
    return group.reusable or group.kind is GroupKind.MAMBA


def _layer(
    group: GroupInfo, name: str, page: PageLayout, tensors: Mapping[str, KVTensor]
) -> LayerMemory:
    tensor = tensors.get(name)
    if tensor is None:
        raise LayoutMismatchError(
            f"no KV tensor for layer {name}; the engine gave {list(tensors)}"
        )
    return LayerMemory(
        name=name,
        group=group.index,
        address=tensor.address,
        device=tensor.device,
        page_bytes=page.page_bytes,
        runs=list(block_runs(tensor.layout, page)),
        dtype=tensor.layout.dtype,
        interior=tensor.interior,
        total_heads=tensor.total_heads,
        rows=tensor.rows,
        state=sorted(tensor.state, key=lambda part: part.offset),
    )


def host_identity() -> HostIdentity:
    """This process; on a system that does not tell, one that equals no other."""
    try:
        boot_id = _BOOT_ID.read_text().strip()
        namespace = _PID_NAMESPACE.stat().st_ino
    except OSError:
        boot_id, namespace = "", 0
    return HostIdentity(boot_id=boot_id, pid_namespace=namespace, pid=os.getpid())


def describe_engine(
    engine: EngineInfo, config: NixlConfig, ranks: Iterable[RankDescriptor]
) -> EngineDescriptor:
    """An engine whose ranks have introduced themselves.

    Raises:
        IntegrityError: they do not make up an engine.
    """
    known = sorted(ranks, key=lambda rank: rank.rank)
    missing = set(range(engine.world_size)) - {rank.rank for rank in known}
    if missing:
        numbers = ", ".join(map(str, sorted(missing)))
        raise IntegrityError(
            f"of the engine's {engine.world_size} ranks these have not introduced "
            f"themselves (their logs say why): {numbers}"
        )
    descriptor = _engine(engine, config, known)
    check_engine(descriptor)
    return descriptor


def describe_own_rank(
    engine: EngineInfo, config: NixlConfig, rank: RankDescriptor
) -> EngineDescriptor:
    """An engine of which only this rank is known: one side of
    `kvplugin.connectors.negotiate.pair_rank`."""
    return _engine(engine, config, [rank])


def _engine(
    engine: EngineInfo, config: NixlConfig, known: list[RankDescriptor]
) -> EngineDescriptor:
    model = engine.model
    return EngineDescriptor(
        format=FORMAT,
        version=VERSION,
        engine_id=engine.engine_id,
        model=ModelDescriptor(
            name=config.model_name or model.name,
            revision=model.revision,
            dtype=model.dtype,
            quantization=model.quantization,
            weight_epoch=config.weight_epoch or model.weight_epoch,
        ),
        num_blocks=engine.num_blocks,
        tp_size=engine.tp_size,
        groups=[
            GroupDescriptor(
                kind=group.kind,
                block_size=group.block_size,
                window=group.window,
                extra_history=group.extra_history,
                has_drafter=group.has_drafter,
            )
            for group in engine.groups
        ],
        layers=[_names(known, group.index) for group in engine.groups],
        ranks=known,
    )


def _names(ranks: Iterable[RankDescriptor], group: int) -> list[str]:
    return sorted(
        {layer.name for rank in ranks for layer in rank.layers if layer.group == group}
    )


def encode_rank(rank: RankDescriptor) -> bytes:
    """For `MeetsPeers.meet`."""
    return encode(rank)


def decode_rank(data: bytes) -> RankDescriptor:
    """The same back.

    Raises:
        IntegrityError: it is none, or a field has an impossible value; named.
    """
    rank = _decode(data, RankDescriptor)
    check_rank(rank)
    return rank


def encode_engine(engine: EngineDescriptor) -> bytes:
    """For `kvplugin.connectors.nixl.wire.Description`.

    Raises:
        IntegrityError: peers would not read it.
    """
    data = encode(engine)
    _check_size(data)
    return data


def decode_engine(data: bytes) -> EngineDescriptor:
    """The same back, from anybody: every number is in range, so that arithmetic with
    them neither overflows nor takes long.

    Raises:
        IntegrityError: it is none, too large, or a field has an impossible value;
            named.
    """
    _check_size(data)
    engine = _decode(data, EngineDescriptor)
    check_engine(engine)
    return engine


def _check_size(data: bytes) -> None:
    if len(data) > MAX_DESCRIPTOR_BYTES:
        raise IntegrityError(
            f"an engine's descriptor of {len(data)} bytes: the limit is "
            f"{MAX_DESCRIPTOR_BYTES}. Use fewer ranks an engine (data parallelism)"
        )


def _decode(data: bytes, kind: type[T]) -> T:
    try:
        return decode(data, kind)
    except KVPluginError as error:
        text = str(error)
        if len(text) > _LONGEST_ERROR:
            text = f"{text[:_LONGEST_ERROR]}..."
        raise IntegrityError(f"{kind.__name__}: {text}") from None
