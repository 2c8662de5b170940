"""How one engine may read another's KV: an agreement, or all reasons against it.

Two descriptors are compared before any block is allocated for what they say. Equal are
the model and what is cached of it; the rest may differ as far as it can be converted:
block sizes, the order of rows, the number of ranks (docs/pd-negotiation.md). A reason
names what differs, both values, and what to change. `here` is the engine that reads.

Groups are compared in order: the engines must have the same layers in the same groups.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from kvplugin.connectors.differences import differ, some
from kvplugin.connectors.nixl.descriptor import (
    EngineDescriptor,
    GroupDescriptor,
    RankDescriptor,
)
from kvplugin.connectors.pairing import Pairing, Refused, pair_layers
from kvplugin.contract import GroupKind
from kvplugin.errors import LayoutMismatchError

__all__ = ["Agreement", "Pairing", "Refusal", "negotiate", "pair_rank"]

_DRAFTS: Final = "start both with one --speculative-config, or both without"


class Refusal(LayoutMismatchError):  # noqa: N818 - what it is to people
    """Two engines can't exchange KV."""

    def __init__(self, reasons: Iterable[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("; ".join(self.reasons))


@dataclass(frozen=True, slots=True)
class Agreement:
    """What was agreed."""

    summary: str
    """One line for the log."""


def negotiate(reader: EngineDescriptor, source: EngineDescriptor) -> Agreement:
    """Find out whether `reader` can read KV of `source`, for all of its ranks.

    Raises:
        Refusal: it can't; with every reason.
    """
    reasons = [
        *_model(reader, source),
        *_layers(reader, source),
        *_groups(reader, source),
    ]
    refused = Refused()
    pairings = [
        pairing
        for rank in reader.ranks
        for pairing in pair_layers(reader, rank, source, refused)
        if rank.rank % reader.tp_size == 0
    ]
    if reasons or refused:
        raise Refusal([*reasons, *refused.reasons()])
    return Agreement(_summary(reader, source, pairings))


def pair_rank(
    reader: EngineDescriptor, rank: RankDescriptor, source: EngineDescriptor
) -> tuple[Pairing, ...]:
    """What one rank of `reader` reads from where, in order of its layers.

    Args:
        reader: the engine that reads; its other ranks may be left out.
        rank: of it.
        source: the engine that is read.

    Raises:
        Refusal: the engines do not agree, as far as this rank can tell.
    """
    reasons = [*_model(reader, source), *_groups(reader, source)]
    refused = Refused()
    pairings = tuple(pair_layers(reader, rank, source, refused))
    found = {pairing.layer for pairing in pairings}
    missing = [layer.name for layer in rank.layers if layer.name not in found]
    if not (reasons or refused) and missing:
        reasons = [f"layers {some(missing)} are here and not there, or in other groups"]
    if reasons or refused:
        raise Refusal([*reasons, *refused.reasons()])
    return pairings


# -- what must be equal ----------------------------------------------------------------


def _model(reader: EngineDescriptor, source: EngineDescriptor) -> Iterator[str]:
    here, there = reader.model, source.model
    changes = {
        "name": "serve one model, or, if it is one at two paths, set the same "
        "model_name in kv_connector_extra_config of both engines",
        "revision": "start both with one --revision",
        "dtype": "start both with one --dtype",
        "quantization": "start both with one --quantization",
        "weight_epoch": "set one weight_epoch in kv_connector_extra_config of both, "
        "and the same weights",
    }
    for field, change in changes.items():
        values = getattr(here, field), getattr(there, field)
        if values[0] != values[1]:
            yield differ(f"model {field}", values, change)


def _layers(reader: EngineDescriptor, source: EngineDescriptor) -> Iterator[str]:
    """Layers that one side has not, or has elsewhere."""
    here, there = (
        {name: i for i, names in enumerate(side.layers) for name in names}
        for side in (reader, source)
    )
    yield from _strays(here.keys() - there.keys(), here, reader, "here and not there")
    yield from _strays(there.keys() - here.keys(), there, source, "there and not here")
    moved = sorted(
        name for name in here.keys() & there.keys() if here[name] != there[name]
    )
    if moved:
        yield differ(
            f"groups of layers {some(moved)}",
            [sorted({side[name] for name in moved}) for side in (here, there)],
            "groups are compared in order; start both with the same cache options",
        )


def _strays(
    names: Iterable[str], groups: Mapping[str, int], side: EngineDescriptor, where: str
) -> Iterator[str]:
    drafts: list[str] = []
    others: list[str] = []
    for name in sorted(names):
        drafting = side.groups[groups[name]].has_drafter
        (drafts if drafting else others).append(name)
    if drafts:
        yield f"layers {some(drafts)} (of a drafter) are {where}: {_DRAFTS}"
    if others:
        yield f"layers {some(others)} are {where}: serve one model, with equal options"


def _groups(reader: EngineDescriptor, source: EngineDescriptor) -> Iterator[str]:
    if len(reader.groups) != len(source.groups):
        yield differ(
            "number of KV cache groups",
            (len(reader.groups), len(source.groups)),
            "start both with the same model, drafter and cache options",
        )
        return
    for i, (here, there) in enumerate(zip(reader.groups, source.groups, strict=True)):
        yield from _group(i, here, there)


def _group(i: int, here: GroupDescriptor, there: GroupDescriptor) -> Iterator[str]:
    what = f"group {i}"
    if here.kind != there.kind:
        yield differ(
            f"{what}, kind", (here.kind.value, there.kind.value), "serve one model"
        )
        return
    if here.kind in (GroupKind.CROSS_ATTENTION, GroupKind.OTHER):
        yield (
            f"{what} is of kind {here.kind.value!r} here and there: nobody knows which "
            "of its blocks a request needs; serve this model without P/D"
        )
    if here.window != there.window:
        yield differ(f"{what}, window", (here.window, there.window), "serve one model")
    less = there.extra_history < here.extra_history
    if here.has_drafter != there.has_drafter or less:
        sides = [_drafting(side) for side in (here, there)]
        yield differ(
            f"{what}, drafts",
            sides,
            _DRAFTS,
        )


def _drafting(group: GroupDescriptor) -> str:
    drafter = "drafter" if group.has_drafter else "no drafter"
    return f"{drafter}, {group.extra_history} tokens kept for drafts"


# -- for the log -----------------------------------------------------------------------


def _summary(
    reader: EngineDescriptor, source: EngineDescriptor, pairings: Iterable[Pairing]
) -> str:
    """What happens to the layers of tensor-parallel rank 0: these are its pairings."""
    layers: dict[str, list[str]] = {}
    heads: dict[str, list[str]] = {}
    for pairing in pairings:
        how = _how(pairing)
        names = layers.setdefault(how, [])
        if pairing.layer not in names:
            names.append(pairing.layer)
        if len(names) == 1 and reader.tp_size != source.tp_size:
            heads.setdefault(how, []).append(_heads(pairing, source))
    parts = [
        ", ".join(
            [f"{len(names)} layer{'s' * (len(names) > 1)} {how}", *heads.get(how, ())]
        )
        for how, names in layers.items()
    ]
    return "; ".join(parts) or "no layers"


def _how(pairing: Pairing) -> str:
    plan = pairing.conversion
    if plan is None:
        return "of states, part by part" if pairing.is_shared else "moved as they are"
    sizes = plan.source.pool_tokens, plan.target.pool_tokens
    names = [
        layer.rows.name if layer.rows and layer.rows.name else layer.interior
        for layer in (pairing.source, pairing.target)
    ]
    changes = ["converted"]
    if sizes[0] != sizes[1]:
        changes.append(f"blocks of {sizes[0]} tokens to {sizes[1]}")
    if names[0] != names[1]:
        changes.append(f"{names[0]} to {names[1]}")
    return ", ".join(changes)


def _heads(pairing: Pairing, source: EngineDescriptor) -> str:
    total = pairing.target.total_heads
    if not total:
        return f"from rank {pairing.remote_rank}"
    held = max(1, total // source.tp_size)
    first = pairing.remote_rank % source.tp_size * total // source.tp_size
    count = held
    if pairing.conversion is not None:
        first += pairing.conversion.heads.source_first
        count = pairing.conversion.heads.num_heads
    last = f"-{first + count - 1}" if count > 1 else ""
    heads = f"head{'s' * (count > 1)} {first}{last} of {total}"
    return f"{heads} from rank {pairing.remote_rank}"
