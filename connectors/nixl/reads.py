"""From an order to addresses: which bytes of the peer go where.

Blocks whose pages are alike, or whose rows fall into a few long runs, are read to where
they belong. Others are read into staging, as they are, and converted from there; so are
small pages that the peer has side by side and we have not, where that saves
descriptors: a descriptor of a 16 KiB page costs more than to copy it once more.

Nothing here touches memory or waits.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvplugin.connectors.negotiate import Pairing
from kvplugin.connectors.nixl.messages import ReadOrder
from kvplugin.connectors.nixl.read_parts import (
    LARGE_BYTES,
    Piece,
    Way,
    addresses,
    can_go_direct,
    joined,
    merged,
    pieces_of,
    stage,
    way_of,
)
from kvplugin.connectors.nixl.read_units import Cut, Numbers, Units
from kvplugin.errors import ConfigError
from kvplugin.layout import Conversion, Stretch

_SAVING: Final = 2
"""Staging must lessen descriptors by this factor."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes of one rank of the peer; entry i of each array belongs together."""

    remote_rank: int
    remote: Numbers
    """Addresses there."""
    local: Numbers
    """Addresses here, in a layer's memory or in staging."""
    nbytes: Numbers
    remote_device: str
    local_device: str


@dataclass(frozen=True, slots=True)
class StagedConversion:
    """Chunks from staging to where they belong."""

    converter: int
    """Index into `ReadPlanner.converters`."""
    source_chunks: Numbers
    target_chunks: Numbers


@dataclass(frozen=True, slots=True)
class Batch:
    """First all transfers, in any order; when their bytes are there, the conversions,
    in any order. Then staging is free again."""

    transfers: tuple[Transfer, ...]
    conversions: tuple[StagedConversion, ...]


@dataclass(frozen=True, slots=True)
class _Stage:
    """A pairing's way through staging."""

    way: Way
    address: int
    """Of the peer's layer."""
    stretches: tuple[Stretch, ...]
    starts: tuple[int, ...]
    """Addresses in staging of slot 0, by stretch."""
    slots: int
    converter: int
    source_chunks: int
    target_chunks: int
    kind: int
    """Stages of one kind share slots."""

    def descriptors(self, units: Units) -> int:
        """Of a read of their blocks."""
        runs, blocks = units.block_runs, len(units.blocks)
        return sum(
            runs if stretch.stride == stretch.nbytes else blocks
            for stretch in self.stretches
        )


@dataclass(frozen=True, slots=True)
class _Set:
    """Pairings of a group that are cut alike."""

    cut: Cut
    pieces: tuple[Piece, ...]
    """Empty where they are too many."""
    stages: tuple[_Stage, ...]
    """Empty where there is nothing to gain."""


class ReadPlanner:
    """Plans reads from one peer into one rank's memory.

    Args:
        pairings: what is read from where (`kvplugin.connectors.negotiate.pair_rank`).
        staging_address: of the memory that blocks may go through, on the layers' own
            device.
        staging_bytes: its size.
        stage_pages: whether small pages that need no conversion may go through it.

    Raises:
        ConfigError: `staging_bytes` is too small for a block of a layer that has to be
            converted.
        LayoutMismatchError: a pairing's rows lie outside its pages.
    """

    def __init__(
        self,
        pairings: Iterable[Pairing],
        staging_address: int,
        staging_bytes: int,
        *,
        stage_pages: bool = True,
    ) -> None:
        self._address = staging_address
        self._bytes = staging_bytes
        self._stage_pages = stage_pages
        self._converters: list[tuple[Conversion, int, int]] = []
        self._kinds: dict[object, int] = {}
        sets: dict[tuple[int, Cut, bool], list[Pairing]] = {}
        for pairing in pairings:
            key = pairing.group, Cut.of(pairing), can_go_direct(pairing)
            sets.setdefault(key, []).append(pairing)
        self._sets: dict[int, list[_Set]] = {}
        for (group, cut, direct), members in sets.items():
            self._sets.setdefault(group, []).append(self._set(cut, direct, members))

    @property
    def converters(self) -> tuple[tuple[Conversion, int, int], ...]:
        """Plan, source address and target address of every converter that batches
        name."""
        return tuple(self._converters)

    def plan(self, order: ReadOrder) -> list[Batch]:
        """Batches, to be done one after the other.

        Raises:
            IntegrityError: the order's rows do not hold its tokens, or name blocks
                that there are not.
        """
        batches = _Batches()
        staged: list[tuple[_Stage, Units]] = []
        for read in order.parts:
            for members in self._sets.get(read.group, ()):
                units = members.cut.units(read)
                if len(units):
                    staged += self._direct(members, units, batches)
        staged.sort(key=lambda work: work[0].kind)
        for one, units in staged:
            batches.stage(one, units)
        return batches.take()

    def _direct(
        self, members: _Set, units: Units, batches: "_Batches"
    ) -> list[tuple[_Stage, Units]]:
        """Plan what goes where it belongs; the rest."""
        staged = [(one, units) for one in members.stages]
        if not members.pieces:
            return staged
        found = []
        total = nbytes = 0
        for way, pieces in _by_way(members.pieces):
            descriptors = addresses(pieces, units)
            found.append((way, descriptors))
            total += len(descriptors[2])
            nbytes += int(descriptors[2].sum())
        if staged and nbytes < total * LARGE_BYTES:
            least = sum(one.descriptors(units) for one in members.stages)
            if least * _SAVING <= total:
                return staged
        for way, descriptors in found:
            batches.add(way, *descriptors)
        return []

    def _set(self, cut: Cut, direct: bool, members: Sequence[Pairing]) -> _Set:
        pieces = joined(p for m in members for p in pieces_of(m)) if direct else []
        stages = []
        if not direct or self._stage_pages:
            stages = [self._stage(pairing, needed=not direct) for pairing in members]
        known = tuple(one for one in stages if one is not None)
        return _Set(cut, tuple(pieces), known if len(known) == len(members) else ())

    def _stage(self, pairing: Pairing, *, needed: bool) -> _Stage | None:
        staging = stage(pairing)
        slots = staging.slots(self._bytes) if staging else 0
        if staging is None or not slots:
            if needed:
                size = staging.slot_bytes if staging else 0
                raise ConfigError(
                    f"staging_bytes={self._bytes} is too small: a block of layer "
                    f"{pairing.layer!r} needs {size} bytes"
                )
            return None
        plan = staging.onward(slots)
        kind = (plan.source, plan.chunk_tokens, slots)
        self._converters.append((plan, self._address, pairing.target.address))
        return _Stage(
            way=way_of(pairing),
            address=pairing.source.address,
            stretches=staging.stretches,
            starts=tuple(self._address + start for start in staging.offsets(slots)),
            slots=slots,
            converter=len(self._converters) - 1,
            source_chunks=plan.source_chunks,
            target_chunks=plan.target_chunks,
            kind=self._kinds.setdefault(kind, len(self._kinds)),
        )


def _by_way(pieces: Sequence[Piece]) -> Iterator[tuple[Way, list[Piece]]]:
    ways: dict[Way, list[Piece]] = {}
    for piece in pieces:
        ways.setdefault(piece.way, []).append(piece)
    yield from ways.items()


class _Batches:
    """Batches in the making."""

    def __init__(self) -> None:
        self._done: list[Batch] = []
        self._transfers: dict[Way, list[tuple[Numbers, Numbers, Numbers]]] = {}
        self._conversions: list[StagedConversion] = []
        self._kind = -1
        self._used = 0

    def add(self, way: Way, remote: Numbers, local: Numbers, nbytes: Numbers) -> None:
        self._transfers.setdefault(way, []).append((remote, local, nbytes))

    def stage(self, one: _Stage, units: Units) -> None:
        """Blocks into slots that are free, in as many batches as it takes."""
        if one.kind != self._kind:
            if self._used:
                self._end()
            self._kind = one.kind
        blocks, owner = units.blocks, units.owner
        first = 0
        while first < len(blocks):
            if self._used >= one.slots:
                self._end()
            last = min(len(blocks), first + one.slots - self._used)
            chunks = slice(*np.searchsorted(owner, (first, last)))
            slots = owner[chunks] - first + self._used
            self._read(one, blocks[first:last])
            self._conversions.append(
                StagedConversion(
                    one.converter,
                    slots * one.source_chunks + units.remote_place[chunks],
                    units.local_block[chunks] * one.target_chunks
                    + units.local_place[chunks],
                )
            )
            self._used += last - first
            first = last

    def _read(self, one: _Stage, blocks: Numbers) -> None:
        slots = np.arange(self._used, self._used + len(blocks), dtype=np.int64)
        for stretch, start in zip(one.stretches, one.starts, strict=True):
            self.add(
                one.way,
                one.address + stretch.offset + blocks * stretch.stride,
                start + slots * stretch.nbytes,
                np.full(len(blocks), stretch.nbytes, np.int64),
            )

    def _end(self) -> None:
        transfers = tuple(_transfer(*item) for item in self._transfers.items())
        self._done.append(Batch(transfers, tuple(self._conversions)))
        self._transfers, self._conversions, self._used = {}, [], 0

    def take(self) -> list[Batch]:
        if self._transfers:
            self._end()
        return self._done


def _transfer(way: Way, parts: Sequence[tuple[Numbers, Numbers, Numbers]]) -> Transfer:
    remote, local, nbytes = (np.concatenate(part) for part in zip(*parts, strict=True))
    remote, local, nbytes = merged(remote, local, nbytes)
    return Transfer(
        way.remote_rank, remote, local, nbytes, way.remote_device, way.local_device
    )
