"""Engines' KV memory in numpy arrays, described as ranks do it, and plans of reads
carried out on it byte by byte."""

import ctypes
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvplugin.connectors.nixl.config import NixlConfig
from kvplugin.connectors.nixl.describe import (
    decode_engine,
    describe_engine,
    describe_rank,
    encode_engine,
)
from kvplugin.connectors.nixl.descriptor import EngineDescriptor, RankDescriptor
from kvplugin.connectors.nixl.messages import GroupRead
from kvplugin.connectors.nixl.reads import ReadPlanner, Transfer
from kvplugin.contract import EngineInfo, GroupInfo, GroupKind, KVTensor, ModelIdentity
from kvplugin.layout import (
    PageLayout,
    Section,
    StatePart,
    TensorLayout,
    state_parts,
)
from tests.core.kv_caches import Cache, Sizes

MODEL = ModelIdentity(name="toy", dtype="bfloat16")
STATE_STRIDE = 128
"""Of rank 0; of each other one it is larger, as where pages are padded."""
STATE_ROWS = {"x": 8, "B": 1, "matrix": 8}
"""Over all ranks."""


@dataclass(frozen=True)
class Layer:
    """What both engines agree on of a layer."""

    name: str
    group: int
    heads: int
    """Over all ranks; 0 for a latent."""
    key: int
    value: int
    dtype: str = "uint16"
    state: bool = False


@dataclass(frozen=True)
class Side:
    """What an engine decides for itself."""

    backends: Mapping[str, str]
    """By layer; states have none."""
    block_sizes: Sequence[int]
    """By group, in tokens of a block of the pool."""
    splits: Sequence[int]
    blocks: int
    tp: int = 1
    pp: int = 1
    seed: int = 0
    state_gap: int = 0
    """Bytes between a state's convolution and its matrix."""


class StateCache:
    """Blocks of bytes: a convolution's last three inputs, each of two projections, and
    a matrix a head."""

    def __init__(
        self, blocks: int, seed: int, ranks: int, rank: int, gap: int = 0
    ) -> None:
        generator = np.random.default_rng(seed)
        stride = STATE_STRIDE + 8 * rank
        size = (blocks + 2) * stride
        self.buffer = generator.integers(0, 256, size, dtype=np.uint8)
        self.parts = self._parts(ranks, gap)
        pages = self.buffer[stride:-stride].reshape(blocks, stride)
        self.array = pages[:, : self.parts[-1].end]
        self.address = self.array.ctypes.data

    @staticmethod
    def _parts(ranks: int, gap: int) -> tuple[StatePart, ...]:
        x, inputs, matrix = (
            Section(name, max(1, total // ranks), total, width)
            for (name, total), width in zip(STATE_ROWS.items(), (2, 4, 1), strict=True)
        )
        channels = x.rows * x.width + inputs.rows * inputs.width
        conv = state_parts((3, channels), 1, [x, inputs], itemsize=1, offset=0)
        heads = (matrix.rows, 6)
        return (
            *conv,
            *state_parts(heads, 0, [matrix], itemsize=1, offset=conv[-1].end + gap),
        )

    def rows(self, part: StatePart) -> np.ndarray:
        """[blocks, places, rows, bytes]"""
        step, inner = self.array.strides
        return np.lib.stride_tricks.as_strided(
            self.array[:, part.offset :],
            (len(self.array), part.places, part.rows, part.row_bytes),
            (step, part.place_stride, part.row_bytes, inner),
        )


def held(total: int, ranks: int, rank: int) -> list[int]:
    """Heads of a rank, by vLLM's rule; a latent is one that all have."""
    if not total:
        return [0]
    if total >= ranks:
        each = total // ranks
        return list(range(rank * each, (rank + 1) * each))
    return [rank // (ranks // total)]


@dataclass
class Engine:
    """All ranks of an engine, in this process."""

    layers: Sequence[Layer]
    side: Side
    kinds: Sequence[GroupKind]
    engine_id: str = "engine"
    model: ModelIdentity = MODEL
    windows: Sequence[int] = ()
    caches: list[dict[str, Cache | StateCache]] = field(default_factory=list)
    generations: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        for rank in range(self.side.tp * self.side.pp):
            self.caches.append(
                {
                    layer.name: self._cache(layer, rank, i)
                    for i, layer in enumerate(self.layers)
                    if self.stage_of(i) == rank // self.side.tp
                }
            )
            generation = np.ones(self.side.blocks, np.int64)
            generation[0] = 1000 + rank
            self.generations.append(generation)

    def stage_of(self, layer: int) -> int:
        """Layers are dealt to the stages in turn."""
        return layer % self.side.pp

    def _cache(self, layer: Layer, rank: int, index: int) -> Cache | StateCache:
        seed = self.side.seed * 1000 + rank * 100 + index
        if layer.state:
            side = self.side
            return StateCache(side.blocks, seed, side.tp, rank, side.state_gap)
        split = self.side.splits[layer.group]
        tokens = self.side.block_sizes[layer.group] // split
        heads = len(held(layer.heads, self.side.tp, rank % self.side.tp))
        sizes = Sizes(heads, layer.key, layer.value, layer.dtype)
        backend = self.side.backends[layer.name]
        cache = Cache(backend, sizes, self.side.blocks * split, tokens, seed)
        cache.layout = replace(cache.layout, split=split)
        return cache

    def info(self, rank: int) -> EngineInfo:
        return EngineInfo(
            engine_id=self.engine_id,
            groups=tuple(self._group(i, rank) for i in range(len(self.kinds))),
            num_blocks=self.side.blocks,
            hash_block_size=self.side.block_sizes[0],
            world_size=len(self.caches),
            rank=rank,
            tp_size=self.side.tp,
            model=self.model,
        )

    def _group(self, index: int, rank: int) -> GroupInfo:
        return GroupInfo(
            index=index,
            kind=self.kinds[index],
            block_size=self.side.block_sizes[index],
            layers={
                layer.name: PageLayout(self._page_bytes(layer, rank), self.side.blocks)
                for layer in self.layers
                if layer.group == index and layer.name in self.caches[rank]
            },
            window=self.windows[index] if self.windows else 0,
        )

    def _page_bytes(self, layer: Layer, rank: int) -> int:
        array = self.caches[rank][layer.name].array
        return array.size * array.itemsize // self.side.blocks

    def tensors(self, rank: int) -> dict[str, KVTensor]:
        return {
            layer.name: self._tensor(layer, self.caches[rank][layer.name])
            for layer in self.layers
            if layer.name in self.caches[rank]
        }

    def _tensor(self, layer: Layer, cache: Cache | StateCache) -> KVTensor:
        array = cache.array
        axes = ["block", "dim"] if layer.state else cache.axes  # type: ignore[union-attr]
        view = TensorLayout(
            array.shape,
            array.strides,
            array.itemsize,
            str(array.dtype),
            axes.index("block"),
        )
        if isinstance(cache, StateCache):
            return KVTensor(cache.address, view, interior="state", state=cache.parts)
        return KVTensor(
            cache.address,
            view,
            rows=cache.layout,
            interior=f"{self.side.backends[layer.name]} {layer.dtype}",
            total_heads=layer.heads,
        )

    def rank(self, rank: int) -> RankDescriptor:
        generations = self.generations[rank]
        return describe_rank(
            self.info(rank),
            self.tensors(rank),
            generations.ctypes.data,
            int(generations[0]),
            b"agent",
        )

    def descriptor(self, config: NixlConfig | None = None) -> EngineDescriptor:
        """As a peer gets it: over the wire."""
        ranks = [self.rank(rank) for rank in range(len(self.caches))]
        made = describe_engine(self.info(0), config or NixlConfig(), ranks)
        return decode_engine(encode_engine(made))

    # -- content -----------------------------------------------------------------------

    def fill(self) -> None:
        """Ranks that hold copies of a head, or a latent, hold the same."""
        for layer in self.layers:
            if layer.state:
                self._fill_states(layer)
            else:
                self._fill(layer)

    def _fill_states(self, layer: Layer) -> None:
        for rank, caches in enumerate(self.caches):
            cache = caches.get(layer.name)
            if not isinstance(cache, StateCache):
                continue
            for i, part in enumerate(cache.parts):
                own = held(part.total_rows, self.side.tp, rank % self.side.tp)
                rng = np.random.default_rng(self.side.seed + i)
                shape = (self.side.blocks, part.places, part.total_rows, part.row_bytes)
                cache.rows(part)[:] = rng.integers(0, 256, shape, np.uint8)[:, :, own]

    def _fill(self, layer: Layer) -> None:
        content: list[np.ndarray] = []
        for rank, caches in enumerate(self.caches):
            cache = caches.get(layer.name)
            if cache is None:
                continue
            assert isinstance(cache, Cache)
            heads = held(layer.heads, self.side.tp, rank % self.side.tp)
            for i, part in enumerate(cache.parts):
                if len(content) == i:
                    shape = (*part.shape[:2], max(1, layer.heads), part.shape[3])
                    rng = np.random.default_rng(self.side.seed + i)
                    top = np.iinfo(part.dtype).max
                    content.append(rng.integers(0, top, shape, part.dtype, True))
                part[:] = content[i][:, :, heads]

    def token(
        self, layer: Layer, rank: int, block: int, place: int
    ) -> list[np.ndarray]:
        """What a block of the pool holds for one of its tokens: [heads, dim] a part."""
        cache = self.caches[rank][layer.name]
        assert isinstance(cache, Cache)
        inner, token = divmod(place, cache.tokens)
        kernel = block * cache.layout.split + inner
        return [part[kernel, token] for part in cache.parts]

    def buffers(self, rank: int) -> list[np.ndarray]:
        return [cache.buffer for cache in self.caches[rank].values()]


class Memory:
    """Buffers of a rank, and which of their bytes may be touched."""

    def __init__(self, buffers: Sequence[np.ndarray]) -> None:
        self._allowed = [
            (buffer.ctypes.data, np.zeros(buffer.nbytes, np.bool_))
            for buffer in buffers
        ]

    def allow(self, address: int, nbytes: int) -> None:
        mask, at = self._find(address, nbytes)
        mask[at : at + nbytes] = True

    def check(self, address: int, nbytes: int) -> None:
        mask, at = self._find(address, nbytes)
        assert mask[at : at + nbytes].all(), f"{nbytes} bytes at {address:#x}"

    def _find(self, address: int, nbytes: int) -> tuple[np.ndarray, int]:
        for start, mask in self._allowed:
            if start <= address and address + nbytes <= start + len(mask):
                return mask, address - start
        raise AssertionError(f"{nbytes} bytes at {address:#x} are nobody's")


def allow_blocks(
    memory: Memory, rank: RankDescriptor, reads: Sequence[GroupRead], ours: bool
) -> None:
    """The bytes of an order's blocks, on one side."""
    for read in reads:
        for layer in rank.layers:
            if layer.group != read.group:
                continue
            for block in read.local_ids if ours else read.remote_ids:
                for run in layer.runs if block else ():
                    start = layer.address + run.offset + block * run.stride
                    memory.allow(start, run.nbytes)


def execute(
    planner: ReadPlanner,
    batches: Sequence[tuple[Sequence[Transfer], Sequence[object]]],
    remote: Mapping[int, Memory],
    local: Memory,
) -> Iterator[Transfer]:
    """Carry out a plan, batch by batch; yields the transfers."""
    for batch in batches:
        filled = sorted(
            (start, start + nbytes)
            for transfer in batch.transfers  # type: ignore[attr-defined]
            for start, nbytes in zip(
                transfer.local.tolist(), transfer.nbytes.tolist(), strict=True
            )
        )
        for one, other in itertools.pairwise(filled):
            assert one[1] <= other[0], "two reads fill the same bytes"
        for transfer in batch.transfers:  # type: ignore[attr-defined]
            for there, here, nbytes in zip(
                transfer.remote.tolist(),
                transfer.local.tolist(),
                transfer.nbytes.tolist(),
                strict=True,
            ):
                remote[transfer.remote_rank].check(there, nbytes)
                local.check(here, nbytes)
                ctypes.memmove(here, there, nbytes)
            yield transfer
        for work in batch.conversions:  # type: ignore[attr-defined]
            plan, source, target = planner.converters[work.converter]
            for pair in zip(
                work.source_chunks.tolist(), work.target_chunks.tolist(), strict=True
            ):
                for from_, to, nbytes in plan.runs(*pair):
                    local.check(source + from_, nbytes)
                    local.check(target + to, nbytes)
                    ctypes.memmove(target + to, source + from_, nbytes)
