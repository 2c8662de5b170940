"""Ranks with real memory: an engine's worker half without the engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvplugin.connectors.nixl.config import NixlConfig
from kvplugin.connectors.nixl.describe import (
    decode_rank,
    describe_engine,
    encode_engine,
)
from kvplugin.connectors.nixl.messages import (
    VERSION,
    Completion,
    GroupRead,
    Peer,
    Plan,
    ReadOrder,
    Report,
)
from kvplugin.connectors.nixl.worker import NixlWorker
from kvplugin.contract import (
    EngineInfo,
    GroupInfo,
    GroupKind,
    KVTensor,
    ModelIdentity,
    WorkerOutcome,
)
from kvplugin.layout import KVLayout, PageLayout, TensorLayout
from kvplugin.wire import decode, encode

ITEM = 2
"""Bytes of an element."""


@dataclass(frozen=True)
class GroupSpec:
    """Layers of one group."""

    kind: GroupKind = GroupKind.FULL
    block_size: int = 16
    layers: int = 2
    heads: int = 2
    head_size: int = 8
    order: str = "NHD"
    """NHD, HND, or the name of an interior that nobody knows."""
    total_heads: int = 0
    """0: as many as `heads`."""
    window: int = 0

    @property
    def page_bytes(self) -> int:
        """Of one layer's block."""
        return 2 * self.block_size * self.heads * self.head_size * ITEM

    def tensor(self, num_blocks: int) -> tuple[TensorLayout, KVLayout | None]:
        """How a layer lies in memory."""
        sizes = {
            "block": num_blocks,
            "kv": 2,
            "token": self.block_size,
            "head": self.heads,
            "dim": self.head_size,
        }
        axes = ["block", "kv", "token", "head", "dim"]
        if self.order == "HND":
            axes = ["block", "kv", "head", "token", "dim"]
        shape = tuple(sizes[axis] for axis in axes)
        strides = [ITEM]
        for size in shape[:0:-1]:
            strides.append(strides[-1] * size)
        layout = TensorLayout(shape, tuple(strides[::-1]), ITEM, "bfloat16", 0)
        if self.order not in ("NHD", "HND"):
            return layout, None
        return layout, KVLayout.of_tensor(layout, axes, name=self.order)


@dataclass(frozen=True)
class RankSpec:
    """One rank of an engine; can be sent to another process."""

    engine_id: str
    groups: tuple[GroupSpec, ...] = (GroupSpec(),)
    num_blocks: int = 64
    rank: int = 0
    tp_size: int = 1
    seed: int = 1
    """Of what its memory holds; 0 for zeroes."""
    is_shared: bool = False
    """All groups' layers lie over each other in one storage."""
    config: Mapping[str, Any] = field(default_factory=dict)

    def info(self) -> EngineInfo:
        """The engine."""
        groups = tuple(
            GroupInfo(
                index=i,
                kind=group.kind,
                block_size=group.block_size,
                layers={
                    f"{i}.{j}": PageLayout(
                        group.page_bytes, self.num_blocks, interior=group.order
                    )
                    for j in range(group.layers)
                },
                window=group.window,
            )
            for i, group in enumerate(self.groups)
        )
        return EngineInfo(
            engine_id=self.engine_id,
            groups=groups,
            num_blocks=self.num_blocks,
            hash_block_size=min(group.block_size for group in self.groups),
            world_size=self.tp_size,
            rank=self.rank,
            tp_size=self.tp_size,
            model=ModelIdentity(name="tiny", dtype="bfloat16"),
        )

    def memory(self) -> dict[str, "np.ndarray[Any, Any]"]:
        """Bytes of each layer, [num_blocks, page_bytes]."""
        shapes = {
            f"{i}.{j}": (self.num_blocks, group.page_bytes)
            for i, group in enumerate(self.groups)
            for j in range(group.layers)
        }
        places: dict[str, int] = {}
        end = 0
        for name, (blocks, nbytes) in shapes.items():
            if self.is_shared and name.partition(".")[0] != "0":
                places[name] = places[f"0.{name.partition('.')[2]}"]
                continue
            places[name], end = end, end + blocks * nbytes
        storage = np.zeros(end, np.uint8)
        if self.seed:
            numbers = np.random.default_rng(self.seed)
            storage[:] = numbers.integers(0, 256, end, np.uint8)
        return {
            name: storage[places[name] :][: blocks * nbytes].reshape(blocks, nbytes)
            for name, (blocks, nbytes) in shapes.items()
        }


class Rank:
    """A worker half over memory of its own."""

    def __init__(self, spec: RankSpec, **seams: Any) -> None:
        self.spec = spec
        self.info = spec.info()
        self.config = NixlConfig(**spec.config)
        self.memory = spec.memory()
        self.worker = NixlWorker(self.info, self.config, **seams)
        self._step = 0
        tensors = {}
        for i, group in enumerate(spec.groups):
            layout, rows = group.tensor(spec.num_blocks)
            for j in range(group.layers):
                name = f"{i}.{j}"
                tensors[name] = KVTensor(
                    self.memory[name].ctypes.data,
                    layout,
                    rows=rows,
                    interior=group.order,
                    total_heads=group.total_heads or group.heads,
                )
        self.worker.register(tensors)

    def introduction(self) -> bytes:
        """As the worker half says it."""
        return self.worker.introduction()

    def step(
        self,
        *,
        peers: Sequence[Peer] = (),
        gone: Sequence[str] = (),
        reads: Sequence[ReadOrder] = (),
        given_up: Sequence[int] = (),
        generations: Sequence[tuple[int, int]] = (),
        sends: Sequence[str] = (),
        is_idle: bool = True,
    ) -> bytes:
        """Begin and end a step; the plan."""
        self._step += 1
        plan = encode(
            Plan(
                VERSION,
                self._step,
                list(peers),
                list(gone),
                list(reads),
                list(given_up),
                list(generations),
                list(sends),
                is_idle,
            )
        )
        self.worker.begin_step(plan)
        self.worker.end_step()
        return plan


def peer_of(spec: RankSpec, introductions: Sequence[bytes]) -> Peer:
    """The engine of these ranks, for a plan."""
    descriptor = describe_engine(
        spec.info(), NixlConfig(**spec.config), map(decode_rank, introductions)
    )
    return Peer(descriptor.peer_id, encode_engine(descriptor))


def order(
    order_id: int,
    peer: Peer,
    parts: Sequence[GroupRead],
    generations: Mapping[int, int] | None = None,
) -> ReadOrder:
    """An order whose blocks are in generation 0, but for those named."""
    found = {block: 0 for part in parts for block in part.remote_ids}
    found.update(generations or {})
    return ReadOrder(
        order_id, f"r{order_id}", peer.peer_id, list(parts), sorted(found.items())
    )


def ends(outcome: WorkerOutcome) -> dict[int, Completion]:
    """What a report says of orders."""
    if not outcome.report:
        return {}
    return {end.id: end for end in decode(outcome.report, Report).completions}


def rows_of(
    spec: GroupSpec,
    memory: "np.ndarray[Any, Any]",
    blocks: Sequence[int],
    tokens: range,
) -> bytes:
    """The rows of some tokens, in one order whatever the layout: what a reader of the
    cache sees. `tokens` count from the row's first block on."""
    layout = spec.tensor(len(memory))[1]
    assert layout is not None
    flat = memory.reshape(-1)
    found = []
    for part, rows in enumerate(layout.parts):
        for token in tokens:
            block, place = divmod(token, spec.block_size)
            for head in range(spec.heads):
                start = layout.row(part, blocks[block], place, head)
                found.append(flat[start : start + rows.row_bytes].tobytes())
    return b"".join(found)
