"""Layers of two engines, pairwise: whom to read, and how its pages become ours."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import structs

from kvplugin.connectors.differences import (
    Holder,
    Sides,
    differences,
    is_whole,
    run_sizes,
    some,
)
from kvplugin.connectors.nixl.descriptor import (
    EngineDescriptor,
    LayerMemory,
    RankDescriptor,
)
from kvplugin.contract import GroupKind
from kvplugin.errors import LayoutMismatchError
from kvplugin.layout import (
    Conversion,
    HeadSlice,
    KVLayout,
    Run,
    head_slices,
    plan_conversion,
    plan_staging,
    state_slices,
)


@dataclass(frozen=True, slots=True)
class Pairing:
    """A layer of one of our ranks, and a rank of the peer that has it, or some of its
    heads."""

    group: int
    layer: str
    remote_rank: int
    source: LayerMemory
    target: LayerMemory
    conversion: Conversion | None
    """None: the runs of `source` and `target` are moved as bytes, pairwise."""
    source_blocks: int
    """Of the peer's pool, the null block included."""
    target_blocks: int
    """Of ours."""
    is_shared: bool = False
    """Rows of a state, not whole pages."""


class Refused:
    """Layers that can't be paired, by the reason."""

    def __init__(self) -> None:
        self._layers: dict[str, list[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._layers)

    def add(self, layer: str, reason: str) -> None:
        layers = self._layers.setdefault(reason, [])
        if layer not in layers:
            layers.append(layer)

    def reasons(self) -> list[str]:
        """One for all layers that it holds for."""
        return [
            f"{'layers' if len(layers) > 1 else 'layer'} {some(layers)}: {reason}"
            for reason, layers in self._layers.items()
        ]


def pair_layers(
    reader: EngineDescriptor,
    rank: RankDescriptor,
    source: EngineDescriptor,
    refused: Refused,
) -> Iterator[Pairing]:
    """What a rank of `reader` reads from where, in order of its layers.

    Layers that only one side has, or has in another group, are left out: nothing is
    said of them here. Whatever else can't be paired goes to `refused`.
    """
    holders, plans = _holders(source), _Plans()
    groups = list(zip(reader.groups, source.groups, strict=False))
    for layer in rank.layers:
        there = holders.get(layer.name)
        if there is None or there[0].layer.group != layer.group:
            continue
        if layer.group >= len(groups):
            continue
        here_group, there_group = groups[layer.group]
        sides = Sides(
            layer,
            there,
            here_group.kind,
            (here_group.block_size, there_group.block_size),
            (reader.tp_size, source.tp_size),
            rank.rank % reader.tp_size,
        )
        reasons = list(differences(sides))
        for reason in reasons:
            refused.add(layer.name, reason)
        if reasons:
            continue
        try:
            found = list(_sources(sides, plans))
        except LayoutMismatchError as error:
            refused.add(layer.name, str(error))
            continue
        for one in found:
            yield Pairing(
                group=layer.group,
                layer=layer.name,
                remote_rank=one.rank,
                source=one.source,
                target=one.target,
                conversion=one.conversion,
                source_blocks=source.num_blocks,
                target_blocks=reader.num_blocks,
                is_shared=one.is_shared,
            )


def _holders(engine: EngineDescriptor) -> dict[str, list[Holder]]:
    """Who has a layer: all ranks of one stage, in order."""
    found: dict[str, list[Holder]] = {}
    for rank in engine.ranks:
        for layer in rank.layers:
            found.setdefault(layer.name, []).append(Holder(rank.rank, layer))
    return found


# -- what is read ----------------------------------------------------------------------


class _Source(NamedTuple):
    """What is read of a layer from one rank."""

    rank: int
    source: LayerMemory
    target: LayerMemory
    conversion: Conversion | None = None
    is_shared: bool = False


def _sources(sides: Sides, plans: "_Plans") -> Iterator[_Source]:
    here = sides.here
    if sides.kind is GroupKind.MAMBA and _is_shared_anew(sides):
        yield from _shares_of_a_state(sides)
        return
    if not here.total_heads:
        # All ranks hold the same rows: ours spread over them. A state is our own
        # rank's, whose number of ranks is the same.
        holder = sides.there[sides.own % len(sides.there)]
        yield _source(holder, here, plans, None)
        return
    slices = head_slices(here.total_heads, *sides.tp_sizes[::-1], sides.own)
    whole = is_whole(sides)
    for rank, heads in slices:
        yield _source(sides.there[rank], here, plans, None if whole else heads)


def _source(
    holder: Holder, here: LayerMemory, plans: "_Plans", heads: HeadSlice | None
) -> _Source:
    conversion = plans.conversion(here, holder.layer, heads)
    return _Source(holder.rank, holder.layer, here, conversion)


def _is_shared_anew(sides: Sides) -> bool:
    """Whether our rank's state is made of rows of several states, or of some rows."""
    here, there = sides.here, sides.there[0].layer
    if not (here.state and there.state):
        return False
    return (
        sides.tp_sizes[0] != sides.tp_sizes[1]
        or here.state != there.state
        or run_sizes(here) != run_sizes(there)
    )


def _shares_of_a_state(sides: Sides) -> Iterator[_Source]:
    """Runs of rows, in place of those of whole pages."""
    here = sides.here
    pages = [holder.layer.runs[0] for holder in sides.there]
    for part in state_slices(
        (sides.there[0].layer.state, pages),
        (here.state, here.runs[0]),
        sides.tp_sizes[0],
        sides.own,
    ):
        holder = sides.there[part.source_rank]
        yield _Source(
            holder.rank,
            structs.replace(holder.layer, runs=list(part.source)),
            structs.replace(here, runs=list(part.target)),
            is_shared=True,
        )


class _Plans:
    """Conversions, each planned once: layers are mostly alike."""

    def __init__(self) -> None:
        self._known: dict[object, Conversion] = {}

    def conversion(
        self, here: LayerMemory, there: LayerMemory, heads: HeadSlice | None
    ) -> Conversion | None:
        """How pages become ours; None where they are equal.

        Raises:
            LayoutMismatchError: they can't.
        """
        if heads is None and _are_equal(here, there):
            return None
        if here.rows is None or there.rows is None:
            raise LayoutMismatchError(
                f"pages {there.interior!r} can't become pages {here.interior!r}"
            )
        key = (there.rows, here.rows, heads, tuple(there.runs))
        if key not in self._known:
            plan = plan_conversion(there.rows, here.rows, heads)
            # What can't be staged is refused here and now.
            plan_staging(plan, there.runs).onward(slots=2)
            self._known[key] = plan
        return self._known[key]


def _are_equal(here: LayerMemory, there: LayerMemory) -> bool:
    """Whether pages may be moved as bytes: their names say so, and what is known of
    their rows."""
    if not here.interior or here.interior != there.interior:
        return False
    if run_sizes(here) != run_sizes(there):
        return False
    if here.rows is None or there.rows is None:
        return True
    return _inside(here.rows, here.runs) == _inside(there.rows, there.runs)


def _inside(rows: KVLayout, runs: Sequence[Run]) -> list[tuple[object, ...]]:
    """Where rows lie in a block, whatever the number of blocks."""
    extents = (rows.tokens, rows.heads, rows.split, rows.tokens_per_row, rows.packing)
    return [
        (
            *extents,
            part.name,
            part.row_bytes,
            part.columns,
            part.column_stride if part.columns > 1 else 0,
            part.token_stride if rows.rows > 1 else 0,
            part.head_stride if rows.heads > 1 else 0,
            part.block_stride if rows.split > 1 else 0,
            *_place(part.offset, runs),
        )
        for part in rows.parts
    ]


def _place(offset: int, runs: Sequence[Run]) -> tuple[int, int]:
    """Run of block 0, and where in it."""
    for i, run in enumerate(runs):
        if run.offset <= offset < run.offset + run.nbytes:
            return i, offset - run.offset
    return -1, offset
