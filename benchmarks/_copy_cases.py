"""What `copy.py` measures, and the bars: shares of a contiguous copy, with numba."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal, Protocol, TypeAlias

import numpy as np

from benchmarks._copy_memory import Ids, Memory, half_of, together
from benchmarks._timing import Work
from kvplugin.kernels.engines import Engine
from kvplugin.kernels.host import BlockCopier, Region
from kvplugin.kernels.host_convert import BlockConverter
from kvplugin.layout import KVLayout, TensorLayout, plan_conversion

Shape: TypeAlias = Literal["layers", "slots"]
"""layers: [regions, blocks, bytes], as KV tensors. slots: [blocks, regions, bytes],
as a host pool, or KV tensors across layers. With one region they are the same."""
HEADS: Final = 8
ROW_BYTES: Final = 256
"""128 elements of bf16."""


class Case(Protocol):
    """Half of one memory goes to half of another."""

    @property
    def name(self) -> str:
        """A line of the table."""

    @property
    def bar(self) -> float | None:
        """The least share that is good enough."""

    def work(
        self, engine: Engine, source: Memory, target: Memory, threads: int
    ) -> Work:
        """The copy, by threads that share the blocks."""


@dataclass(frozen=True)
class Blocks:
    """Blocks that stay as they are."""

    name: str
    block_kib: int
    """Of one region."""
    source_run: int
    """Ids in a row before the next jump; 0: all in order."""
    target_run: int
    bar: float | None = None
    regions: int = 1
    source: Shape = "layers"
    target: Shape = "layers"

    def work(
        self, engine: Engine, source: Memory, target: Memory, threads: int
    ) -> Work:
        """One job a thread."""
        nbytes = self.block_kib << 10
        blocks = len(source) // (nbytes * self.regions)
        copier = BlockCopier(
            _regions(source, nbytes, blocks, self.regions, self.source),
            _regions(target, nbytes, blocks, self.regions, self.target),
            engine=engine,
        )
        source_ids = half_of(blocks, self.source_run, seed=0)
        target_ids = half_of(blocks, self.target_run, seed=1)
        return together(
            [
                lambda pair=pair: copier.copy(*pair)
                for pair in _shares(source_ids, target_ids, threads)
            ]
        )


@dataclass(frozen=True)
class Rows:
    """Pages of keys and values whose rows change places, all in random order."""

    name: str
    source_order: Literal["NHD", "HND"]
    target_order: Literal["NHD", "HND"]
    bar: float | None = None
    source_tokens: int = 16
    target_tokens: int = 16

    def work(
        self, engine: Engine, source: Memory, target: Memory, threads: int
    ) -> Work:
        """One job a thread."""
        conversion = plan_conversion(
            _layout(len(source), self.source_tokens, self.source_order),
            _layout(len(target), self.target_tokens, self.target_order),
        )
        converter = BlockConverter(
            conversion, source.ctypes.data, target.ctypes.data, engine=engine
        )
        ids = [
            half_of(layout.num_blocks, 1, seed).tolist()
            for seed, layout in enumerate((conversion.source, conversion.target))
        ]
        chunks = (np.array(side) for side in conversion.pair_chunks(ids[0], ids[1]))
        return together(
            [
                lambda pair=pair: converter.convert(*pair)
                for pair in _shares(*chunks, threads)
            ]
        )


def _regions(
    memory: Memory, nbytes: int, blocks: int, regions: int, shape: Shape
) -> list[Region]:
    layers = shape == "layers"
    apart = nbytes * blocks if layers else nbytes
    stride = nbytes if layers else nbytes * regions
    address = memory.ctypes.data
    return [Region(address + i * apart, stride, nbytes, blocks) for i in range(regions)]


def _layout(nbytes: int, tokens: int, order: Literal["NHD", "HND"]) -> KVLayout:
    """Pages as FlashInfer has them: (blocks, 2, tokens, heads, dim)."""
    half = tokens * HEADS * ROW_BYTES
    blocks = nbytes // (2 * half)
    token, head = HEADS * ROW_BYTES, ROW_BYTES
    if order == "HND":
        token, head = ROW_BYTES, tokens * ROW_BYTES
    view = TensorLayout(
        (blocks, 2, tokens, HEADS, ROW_BYTES // 2),
        (2 * half, half, token, head, 2),
        itemsize=2,
        dtype="bf16",
        block_axis=0,
    )
    return KVLayout.of_tensor(view, ("block", "kv", "token", "head", "dim"), name=order)


def _shares(source: Ids, target: Ids, threads: int) -> Iterator[tuple[Ids, Ids]]:
    sides = (np.array_split(ids, threads) for ids in (source, target))
    return zip(*sides, strict=True)


def _sizes(kib: int, random: float | None, runs: float | None) -> Iterator[Blocks]:
    yield Blocks(f"gather {kib} KiB", kib, 1, 0, random)
    yield Blocks(f"scatter {kib} KiB", kib, 0, 1, random)
    yield Blocks(f"pool to pool {kib} KiB", kib, 1, 1, random)
    yield Blocks(f"pool to pool {kib} KiB, runs of 8", kib, 8, 8, runs)


_LAYERS: Final = Blocks("", 32, 1, 1, 0.75, 64)
"""Segments of 16 tokens, 8 heads of 128 elements, bf16, keys or values."""

CASES: Final[tuple[Case, ...]] = (
    # what the machine can do, where the baseline falls short of it
    Blocks("one run", 64, 0, 0),
    *_sizes(16, 0.65, 1.0),
    *_sizes(64, 0.9, None),
    *_sizes(256, None, None),
    replace(_LAYERS, name="store 64 layers of 32 KiB", target="slots"),
    replace(_LAYERS, name="load 64 layers of 32 KiB", source="slots"),
    replace(_LAYERS, name="layers to layers, 64 of 32 KiB"),
    replace(_LAYERS, name="across 64 layers of 32 KiB", source="slots", target="slots"),
    Rows("NHD to HND, 16 x 8 x 256 bytes", "NHD", "HND", 0.6),
    Rows("HND to NHD, 16 x 8 x 256 bytes", "HND", "NHD", 0.6),
    Rows("HND, 16 to 64 tokens", "HND", "HND", None, 16, 64),
    Rows("HND, 64 to 16 tokens", "HND", "HND", None, 64, 16),
)
