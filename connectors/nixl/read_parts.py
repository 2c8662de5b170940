"""What a read is made of: pieces of pages that go where they belong, and blocks that
go through staging."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from kvplugin.connectors.negotiate import Pairing
from kvplugin.connectors.nixl.descriptor import LayerMemory
from kvplugin.connectors.nixl.read_units import Numbers, Units
from kvplugin.errors import LayoutMismatchError
from kvplugin.layout import (
    MAX_PARTS,
    Box,
    Conversion,
    KVLayout,
    Part,
    Staging,
    plan_conversion,
    plan_staging,
)

MAX_DIRECT_RUNS: Final = 4
"""Runs of a chunk that may go where they belong without staging, unless they are
large."""
LARGE_BYTES: Final = 1 << 16
"""A run of so many bytes costs more than its descriptor: measured over UCX between two
processes of one machine, 16 KiB runs 2.7 GB/s, 64 KiB 6.7, larger ones 12."""


class Way(NamedTuple):
    """Between whom bytes go."""

    remote_rank: int
    remote_device: str
    local_device: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of every chunk that go where they belong."""

    way: Way
    remote: int
    remote_steps: tuple[int, int]
    """From block to block, from chunk to chunk."""
    local: int
    local_steps: tuple[int, int]
    nbytes: int

    def is_dense(self, units: Units) -> bool:
        """Whether it leaves no gap between a chunk and the next, on both sides."""
        return all(
            block == chunks * self.nbytes and (chunks == 1 or chunk == self.nbytes)
            for (block, chunk), chunks in (
                (self.remote_steps, units.remote_chunks),
                (self.local_steps, units.local_chunks),
            )
        )

    def continues(self, other: "Piece") -> bool:
        """Whether it begins where the other ends, on both sides of every chunk."""
        return (
            self.remote == other.remote + other.nbytes
            and self.local == other.local + other.nbytes
            and (self.way, self.remote_steps, self.local_steps)
            == (other.way, other.remote_steps, other.local_steps)
        )


def way_of(pairing: Pairing) -> Way:
    """Between which memories a pairing is."""
    return Way(pairing.remote_rank, pairing.source.device, pairing.target.device)


def pieces_of(pairing: Pairing) -> Iterator[Piece]:
    """All of what a pairing moves, without staging."""
    way, source, target = way_of(pairing), pairing.source, pairing.target
    if pairing.conversion is None:
        for here, there in zip(target.runs, source.runs, strict=True):
            yield Piece(
                way,
                source.address + there.offset,
                (there.stride, 0),
                target.address + here.offset,
                (here.stride, 0),
                here.nbytes,
            )
        return
    for box in pairing.conversion.boxes:
        extents = [range(axis.extent) for axis in box.axes]
        for place in itertools.product(*extents):
            steps = list(zip(place, box.axes, strict=True))
            yield Piece(
                way,
                source.address
                + box.source.offset
                + sum(i * axis.source_stride for i, axis in steps),
                box.source[1:],
                target.address
                + box.target.offset
                + sum(i * axis.target_stride for i, axis in steps),
                box.target[1:],
                box.nbytes,
            )


def can_go_direct(pairing: Pairing) -> bool:
    """Whether bytes may be read to where they belong: in few pieces, or large ones."""
    plan = pairing.conversion
    if plan is None:
        return True
    runs = sum(_runs(box) for box in plan.boxes)
    small = any(box.nbytes < LARGE_BYTES for box in plan.boxes)
    return runs <= MAX_DIRECT_RUNS or not small


def _runs(box: Box) -> int:
    return box.total_bytes // box.nbytes


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same in fewer: layers, or runs, that lie side by side on both sides."""
    found: list[Piece] = []
    for piece in sorted(pieces, key=lambda p: (p.way, p.remote)):
        if found and piece.continues(found[-1]):
            before = found[-1]
            nbytes = before.nbytes + piece.nbytes
            found[-1] = Piece(
                before.way,
                before.remote,
                before.remote_steps,
                before.local,
                before.local_steps,
                nbytes,
            )
        else:
            found.append(piece)
    return found


def stage(pairing: Pairing) -> Staging | None:
    """How a pairing's blocks go through staging; None for pages that do not."""
    plan = pairing.conversion
    if plan is not None:
        return plan_staging(plan, pairing.source.runs)
    runs = pairing.source.runs
    if len(runs) > MAX_PARTS or max(run.nbytes for run in runs) >= LARGE_BYTES:
        return None
    try:
        return plan_staging(_page_plan(pairing), runs)
    except LayoutMismatchError:
        return None


def _page_plan(pairing: Pairing) -> Conversion:
    return plan_conversion(
        _page_layout(pairing.source, pairing.source_blocks),
        _page_layout(pairing.target, pairing.target_blocks),
    )


def _page_layout(layer: LayerMemory, blocks: int) -> KVLayout:
    """A block as one token, whose rows are its runs."""
    parts = tuple(
        Part(f"run {i}", run.offset, run.stride, run.nbytes, run.nbytes, run.nbytes)
        for i, run in enumerate(layer.runs)
    )
    return KVLayout(parts, blocks, 1, 1, packing="page")


def merged(
    remote: Numbers, local: Numbers, nbytes: Numbers
) -> tuple[Numbers, Numbers, Numbers]:
    """The same in fewer descriptors: neighbours that continue each other on both
    sides are one."""
    if len(remote) < 2:
        return remote, local, nbytes
    begins = np.ones(len(remote), np.bool_)
    ends = nbytes[:-1]
    begins[1:] = (remote[1:] - remote[:-1] != ends) | (local[1:] - local[:-1] != ends)
    starts = np.flatnonzero(begins)
    if len(starts) == len(remote):
        return remote, local, nbytes
    return remote[starts], local[starts], np.add.reduceat(nbytes, starts)


def addresses(
    pieces: Sequence[Piece], units: Units
) -> tuple[Numbers, Numbers, Numbers]:
    """Of every piece of every pair of chunks, piece by piece; merged."""
    dense = [piece for piece in pieces if piece.is_dense(units)]
    others = [piece for piece in pieces if not piece.is_dense(units)]
    columns = [
        made(some, units) for made, some in ((_dense, dense), (_each, others)) if some
    ]
    remote, local, nbytes = (
        np.concatenate(part) for part in zip(*columns, strict=True)
    )
    return merged(remote, local, nbytes)


def _dense(pieces: Sequence[Piece], units: Units) -> tuple[Numbers, ...]:
    """Runs of chunks are runs of bytes."""
    bases = np.array([(p.remote, p.local, p.nbytes) for p in pieces], np.int64)
    starts, counts = units.runs
    size = bases[:, 2]
    sides = [
        np.multiply.outer(size, ids[starts]) + base[:, np.newaxis]
        for base, ids in ((bases[:, 0], units.remote), (bases[:, 1], units.local))
    ]
    return (
        *(side.reshape(-1) for side in sides),
        np.multiply.outer(size, counts).reshape(-1),
    )


def _each(pieces: Sequence[Piece], units: Units) -> tuple[Numbers, ...]:
    bases = np.array([(p.remote, p.local, p.nbytes) for p in pieces], np.int64)
    steps = np.array([(*p.remote_steps, *p.local_steps) for p in pieces], np.int64)
    sides = []
    for base, at, block, place in (
        (bases[:, 0], 0, units.remote_block, units.remote_place),
        (bases[:, 1], 2, units.local_block, units.local_place),
    ):
        side = np.multiply.outer(steps[:, at], block)
        side += base[:, np.newaxis]
        if place.any():
            side += np.multiply.outer(steps[:, at + 1], place)
        sides.append(side.reshape(-1))
    return sides[0], sides[1], np.repeat(bases[:, 2], len(units))
