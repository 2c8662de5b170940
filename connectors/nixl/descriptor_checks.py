"""Whether a descriptor describes an engine that can be.

What passes has numbers that fit 63 bits in every sum that is made of them, lists of
bounded length, texts that a log can show, and ranks that are alike. Whoever sent it,
reading and checking it takes less than about a second.
"""

import itertools
from typing import Final

from kvplugin.connectors.nixl.descriptor import (
    EngineDescriptor,
    LayerMemory,
    RankDescriptor,
)
from kvplugin.errors import IntegrityError
from kvplugin.layout import MAX_RUNS, KVLayout, Run

MAX_DESCRIPTOR_BYTES: Final = 4 << 20
"""Of an encoded descriptor: about 10,000 layers, counted on each rank."""
MAX_ALL_RUNS: Final = 1 << 17
"""Of all layers of all ranks together."""
MAX_STATE_PARTS: Final = 16
"""Of a layer."""
MAX_RANKS: Final = 1024
MAX_LAYERS: Final = 4096
"""Of a rank."""
MAX_GROUPS: Final = 1024
MAX_BLOCKS: Final = 1 << 31
MAX_TOKENS: Final = 1 << 20
"""Of a block."""
MAX_PAGE_BYTES: Final = 1 << 40
MAX_TEXT: Final = 1024
MAX_AGENT_BYTES: Final = 1 << 20
_END: Final = 1 << 63


def check_engine(engine: EngineDescriptor) -> None:
    """Refuse what is no engine.

    Raises:
        IntegrityError: naming the field and its value.
    """
    _text("engine_id", engine.engine_id)
    _text("version", engine.version)
    for field in ("name", "revision", "dtype", "quantization"):
        _text(f"model.{field}", getattr(engine.model, field), empty=True)
    _number("model.weight_epoch", engine.model.weight_epoch, 0, _END)
    _number("num_blocks", engine.num_blocks, 1, MAX_BLOCKS)
    _number("groups", len(engine.groups), 1, MAX_GROUPS, "entries")
    _number("ranks", len(engine.ranks), 1, MAX_RANKS, "entries")
    _number("tp_size", engine.tp_size, 1, len(engine.ranks))
    if len(engine.ranks) % engine.tp_size:
        raise _wrong(
            "tp_size", f"{engine.tp_size}, which {len(engine.ranks)} ranks do not fill"
        )
    layers = [layer for rank in engine.ranks for layer in rank.layers]
    runs = sum(len(layer.runs) for layer in layers)
    _number("runs", runs, 0, MAX_ALL_RUNS, "in all layers")
    places = sum(part.places for layer in layers for part in layer.state)
    _number("state.places", places, 0, MAX_ALL_RUNS, "in all layers")
    for i, group in enumerate(engine.groups):
        _number(f"groups[{i}].block_size", group.block_size, 1, MAX_TOKENS)
        _number(f"groups[{i}].window", group.window, 0, _END)
        _number(f"groups[{i}].extra_history", group.extra_history, 0, _END)
    for place, rank in enumerate(engine.ranks):
        if rank.rank != place:
            raise _wrong(f"ranks[{place}].rank", f"{rank.rank}, not {place}")
        check_rank(rank)
        _check_memory(rank, engine)
    _check_stages(engine)
    _check_names(engine)


def check_rank(rank: RankDescriptor) -> None:
    """Refuse what no rank can be, as far as a rank alone tells.

    Raises:
        IntegrityError: naming the field and its value.
    """
    where = f"ranks[{rank.rank}]"
    _number(f"{where}.rank", rank.rank, 0, MAX_RANKS)
    _number(f"{where}.layers", len(rank.layers), 0, MAX_LAYERS, "entries")
    _number(f"{where}.generations_address", rank.generations_address, 1, _END)
    _number(f"{where}.incarnation", rank.incarnation, 1, _END)
    _number(
        f"{where}.agent_metadata", len(rank.agent_metadata), 0, MAX_AGENT_BYTES, "bytes"
    )
    _text(f"{where}.host.boot_id", rank.host.boot_id, empty=True)
    _number(f"{where}.host.pid_namespace", rank.host.pid_namespace, 0, _END)
    _number(f"{where}.host.pid", rank.host.pid, 0, 1 << 31)
    seen: set[str] = set()
    for i, layer in enumerate(rank.layers):
        field = f"{where}.layers[{i}]"
        _text(f"{field}.name", layer.name)
        if layer.name in seen:
            raise _wrong(f"{field}.name", f"{layer.name!r} a second time")
        seen.add(layer.name)
        _check_layer(field, layer)


def _check_layer(field: str, layer: LayerMemory) -> None:
    _number(f"{field}.group", layer.group, 0, MAX_GROUPS)
    _number(f"{field}.address", layer.address, 1, _END)
    _text(f"{field}.device", layer.device)
    _text(f"{field}.dtype", layer.dtype, empty=True)
    _text(f"{field}.interior", layer.interior, empty=True)
    _number(f"{field}.page_bytes", layer.page_bytes, 1, MAX_PAGE_BYTES)
    _number(f"{field}.total_heads", layer.total_heads, 0, 1 << 20)
    _number(f"{field}.runs", len(layer.runs), 1, MAX_RUNS, "entries")
    _number(f"{field}.state", len(layer.state), 0, MAX_STATE_PARTS, "entries")
    for j, run in enumerate(layer.runs):
        if not _can_be(run):
            where = f"{field}.runs[{j}]"
            _number(f"{where}.nbytes", run.nbytes, 1, MAX_PAGE_BYTES)
            _number(f"{where}.offset", run.offset, 0, _END)
            _number(f"{where}.stride", run.stride, run.nbytes, _END)
    total = sum(run.nbytes for run in layer.runs)
    if total > layer.page_bytes:
        raise _wrong(
            f"{field}.runs", f"{total} bytes, more than the page's {layer.page_bytes}"
        )


def _can_be(run: Run) -> bool:
    offset, stride, nbytes = run
    return (
        0 <= offset < _END
        and 1 <= nbytes <= stride < _END
        and (nbytes <= MAX_PAGE_BYTES)
    )


def _check_memory(rank: RankDescriptor, engine: EngineDescriptor) -> None:
    """What a rank says of its memory, against the engine's blocks."""
    last = engine.num_blocks - 1
    where = f"ranks[{rank.rank}]"
    end = rank.generations_address + 8 * engine.num_blocks
    _number(f"{where}.generations_address", end, 1, _END, "is its end")
    for i, layer in enumerate(rank.layers):
        field = f"{where}.layers[{i}]"
        _number(f"{field}.group", layer.group, 0, len(engine.groups) - 1)
        for j, run in enumerate(layer.runs):
            end = layer.address + run.offset + last * run.stride + run.nbytes
            if end >= _END:
                _number(f"{field}.runs[{j}]", end, 1, _END, "is its end")
        if layer.rows is not None:
            _check_rows(f"{field}.rows", layer, layer.rows, engine)
        _check_state(f"{field}.state", layer, engine.tp_size)


def _check_rows(
    field: str, layer: LayerMemory, rows: KVLayout, engine: EngineDescriptor
) -> None:
    for name in ("dtype", "name", "packing"):
        _text(f"{field}.{name}", getattr(rows, name), empty=True)
    for part in rows.parts:
        _text(f"{field}.parts.name", part.name)
    if rows.num_blocks != engine.num_blocks * rows.split:
        raise _wrong(
            f"{field}.num_blocks",
            f"{rows.num_blocks} of which {rows.split} are one of {engine.num_blocks}",
        )
    block_size = engine.groups[layer.group].block_size
    if rows.pool_tokens != block_size:
        raise _wrong(
            f"{field}.tokens", f"{rows.pool_tokens} a block, the group has {block_size}"
        )
    total = sum(run.nbytes for run in layer.runs)
    if rows.pool_bytes > total:
        raise _wrong(
            f"{field}.parts", f"{rows.pool_bytes} bytes a block of {total} bytes"
        )
    end = max(
        rows.row(i, rows.num_blocks - 1, rows.tokens - 1, rows.heads - 1)
        + (part.columns - 1) * part.column_stride
        + part.column_bytes
        for i, part in enumerate(rows.parts)
    )
    _number(f"{field}.parts", layer.address + end, 1, _END, "is their end")
    if layer.total_heads:
        _check_heads(f"{field}.heads", layer.total_heads, rows.heads, engine.tp_size)


def _check_heads(field: str, total: int, heads: int, tp_size: int) -> None:
    if total % tp_size and tp_size % total:
        raise _wrong(field, f"{total} heads on {tp_size} ranks are not split evenly")
    if heads != max(1, total // tp_size):
        raise _wrong(field, f"{heads} of {total} on each of {tp_size} ranks")


def _check_state(field: str, layer: LayerMemory, tp_size: int) -> None:
    """Parts are in the page's one run, and do not overlap."""
    if layer.state and len(layer.runs) != 1:
        raise _wrong(field, f"of a page in {len(layer.runs)} runs")
    runs: list[tuple[int, int]] = []
    for part in layer.state:
        _text(f"{field}.name", part.name)
        for name in ("rows", "row_bytes", "total_rows", "place_stride"):
            _number(f"{field}.{name}", getattr(part, name), 1, MAX_PAGE_BYTES)
        _number(f"{field}.places", part.places, 1, MAX_RUNS)
        _number(f"{field}.offset", part.offset, 0, MAX_PAGE_BYTES)
        _check_heads(f"{field}.rows", part.total_rows, part.rows, tp_size)
        _number(f"{field}.offset", part.end, 0, layer.runs[0].nbytes, "is its end")
        size = part.rows * part.row_bytes
        for place in range(part.places):
            start = part.offset + place * part.place_stride
            runs.append((start, start + size))
    for (_, end), (start, _) in itertools.pairwise(sorted(runs)):
        _number(f"{field}.offset", start, end, MAX_PAGE_BYTES)


def _check_stages(engine: EngineDescriptor) -> None:
    """Ranks that share the heads of layers hold equal shapes; no others hold them."""
    homes: dict[str, int] = {}
    for rank in engine.ranks:
        stage = rank.rank // engine.tp_size
        first = engine.ranks[stage * engine.tp_size]
        if _shape(rank) != _shape(first):
            raise _wrong(
                f"ranks[{rank.rank}].layers", f"unlike those of rank {first.rank}"
            )
        for layer in rank.layers:
            if homes.setdefault(layer.name, stage) != stage:
                raise _wrong(
                    f"ranks[{rank.rank}].layers",
                    f"layer {layer.name!r} of stage {homes[layer.name]} too",
                )


def _shape(rank: RankDescriptor) -> list[tuple[object, ...]]:
    return sorted(
        (
            layer.name,
            layer.group,
            layer.page_bytes,
            [run.nbytes for run in layer.runs],
            layer.dtype,
            layer.interior,
            layer.total_heads,
            layer.rows.heads if layer.rows else 0,
            layer.state,
        )
        for layer in rank.layers
    )


def _check_names(engine: EngineDescriptor) -> None:
    found: list[set[str]] = [set() for _ in engine.groups]
    for rank in engine.ranks:
        for layer in rank.layers:
            found[layer.group].add(layer.name)
    if engine.layers != [sorted(names) for names in found]:
        raise _wrong("layers", "not those of the ranks by group, sorted")


def _number(field: str, value: int, least: int, most: int, what: str = "") -> None:
    """`most` is allowed, but where it is the end of 63 bits."""
    if not least <= value <= most or value >= _END:
        raise _wrong(field, f"{value} {what}".strip() + f", not from {least} to {most}")


def _text(field: str, value: str, *, empty: bool = False) -> None:
    if len(value) > MAX_TEXT or not value.isprintable() or not (value or empty):
        raise _wrong(field, f"{value[:80]!r}: no printable text, or too long")


def _wrong(field: str, why: str) -> IntegrityError:
    return IntegrityError(f"descriptor refused: {field} is {why}")
