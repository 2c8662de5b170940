"""Why a layer of one engine can't be read into another's: reasons with both values."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from kvplugin.connectors.nixl.descriptor import LayerMemory
from kvplugin.contract import GroupKind
from kvplugin.layout import KVLayout, StatePart

_FEW: Final = 3
"""Names of a list that a message shows."""


class _Changes(NamedTuple):
    """What makes pages equal."""

    of_sizes: str
    of_insides: str


_PAGES: Final = _Changes(
    "use one --block-size",
    "use one attention backend, --kv-cache-dtype and instruction set",
)
_NO_TOKENS: Final = "a recurrent state has no rows of tokens"
_STATES: Final = _Changes(
    "by itself vLLM makes blocks as large as a rank's state needs; start both with the "
    "larger as --block-size",
    "use one kind of device, VLLM_SSM_CONV_STATE_LAYOUT, --mamba-cache-dtype and "
    "--mamba-ssm-cache-dtype",
)


class Holder(NamedTuple):
    """A rank of the peer, and its part of a layer."""

    rank: int
    layer: LayerMemory


class Sides(NamedTuple):
    """A layer of both engines, which have it in the same group."""

    here: LayerMemory
    there: Sequence[Holder]
    """By tensor-parallel rank."""
    kind: GroupKind
    block_sizes: tuple[int, int]
    """Here, there."""
    tp_sizes: tuple[int, int]
    own: int
    """Our tensor-parallel rank."""


def some(names: Iterable[str]) -> str:
    """The first few of them."""
    known = list(names)
    shown = ", ".join(known[:_FEW]) or "none"
    return f"{shown} and {len(known) - _FEW} more" if len(known) > _FEW else shown


def differ(what: str, values: Sequence[object], change: str) -> str:
    """A reason, of values here and there."""
    here, there = values
    return f"{what}: {here!r} here, {there!r} there: {change}"


def differences(sides: Sides) -> Iterator[str]:
    """All that keeps a layer's blocks from being read; what only shows when a
    conversion is planned is missing."""
    here, there = sides.here, sides.there[0].layer
    types = here.dtype, there.dtype
    if here.rows is not None and there.rows is not None:
        types = here.rows.dtype, there.rows.dtype
    if types[0] != types[1]:
        yield differ("KV dtype", types, "start both with one --kv-cache-dtype")
    if here.total_heads != there.total_heads:
        yield differ(
            "KV heads", (here.total_heads, there.total_heads), "serve one model"
        )
        return
    if sides.kind is GroupKind.MAMBA:
        yield from _unequal_states(sides)
    elif _unknown_bytes(here) or _unknown_bytes(there):
        yield from _unequal_pages(sides)
    else:
        yield from _unequal_rows(here.rows, there.rows)


def _unequal_states(sides: Sides) -> Iterator[str]:
    here, there = sides.here, sides.there[0].layer
    if here.state and there.state:
        yield from _unequal_insides(sides, _NO_TOKENS, _STATES)
        yield from _unequal_parts(here.state, there.state)
        return
    if sides.tp_sizes[0] != sides.tp_sizes[1]:
        yield differ(
            "tensor-parallel ranks of a recurrent state",
            sides.tp_sizes,
            "nobody knows how ranks share it: use one --tensor-parallel-size",
        )
    yield from _unequal_bytes(sides, _NO_TOKENS, _STATES)


def _unequal_parts(
    here: Sequence[StatePart], there: Sequence[StatePart]
) -> Iterator[str]:
    """Of states whose rows are known: the same rows, on whatever ranks."""
    sides = [
        [(part.name, part.row_bytes, part.total_rows, part.places) for part in parts]
        for parts in (here, there)
    ]
    if sides[0] != sides[1]:
        pairs = zip(*sides, strict=False)
        first = next((pair for pair in pairs if pair[0] != pair[1]), sides)
        yield differ(
            "parts of a recurrent state, (name, bytes of a row, rows, places)",
            first,
            "serve one model, with one --speculative-config",
        )


def _unequal_pages(sides: Sides) -> Iterator[str]:
    """Of layers whose rows nobody knows, or not all of them."""
    here, there = sides.here, sides.there[0].layer
    why = " and ".join(
        f"{_unknown_bytes(layer)} {where}"
        for layer, where in ((here, "here"), (there, "there"))
        if _unknown_bytes(layer)
    )
    if here.total_heads and not is_whole(sides):
        yield differ(
            "tensor-parallel ranks",
            sides.tp_sizes,
            f"pages can't be split ({why}): use one --tensor-parallel-size",
        )
    yield from _unequal_bytes(sides, why)


def _unknown_bytes(layer: LayerMemory) -> str:
    """Why pages can only be moved as they are; empty if they can be converted."""
    if layer.rows is None:
        return "rows are not known"
    total = sum(run.nbytes for run in layer.runs)
    if layer.rows.pool_bytes != total:
        return f"rows are {layer.rows.pool_bytes} of a page's {total} bytes"
    return ""


def _unequal_bytes(sides: Sides, why: str, changes: _Changes = _PAGES) -> Iterator[str]:
    here, there = sides.here, sides.there[0].layer
    yield from _unequal_insides(sides, why, changes)
    sizes = [(side.page_bytes, run_sizes(side)) for side in (here, there)]
    if sides.block_sizes[0] == sides.block_sizes[1] and sizes[0] != sizes[1]:
        yield differ(
            "bytes of a page, and of its runs",
            sizes,
            f"pages can't be converted ({why}): use one KV cache layout",
        )


def _unequal_insides(sides: Sides, why: str, changes: _Changes) -> Iterator[str]:
    here, there = sides.here, sides.there[0].layer
    if sides.block_sizes[0] != sides.block_sizes[1]:
        yield differ(
            "block size",
            sides.block_sizes,
            f"pages can't be converted ({why}): {changes.of_sizes}",
        )
    elif not here.interior and not there.interior:
        yield (
            "what is inside a page has no name, neither here nor there "
            f"({why}): the engine's adapter has to name it (KVTensor.interior)"
        )
    elif here.interior != there.interior:
        yield differ(
            "inside of a page",
            (here.interior, there.interior),
            f"pages can't be converted ({why}): {changes.of_insides}",
        )


def run_sizes(layer: LayerMemory) -> list[int]:
    return [run.nbytes for run in layer.runs]


def _unequal_rows(here: KVLayout | None, there: KVLayout | None) -> Iterator[str]:
    if here is None or there is None:
        return
    packings = [f"{side.packing!r} of {side.tokens_per_row}" for side in (here, there)]
    if packings[0] != packings[1]:
        yield (
            f"packing of rows: {packings[0]} tokens here, {packings[1]} there: run "
            "both on one kind of processor, with one instruction set for attention"
        )
    rows = [[(p.name, p.row_bytes) for p in side.parts] for side in (here, there)]
    if rows[0] != rows[1]:
        yield differ(
            "rows and their bytes", rows, "serve one model with one attention backend"
        )


def is_whole(sides: Sides) -> bool:
    """Whether a rank there holds as many heads as one here: the same, then."""
    held = [max(1, sides.here.total_heads // size) for size in sides.tp_sizes]
    return held[0] == held[1]
