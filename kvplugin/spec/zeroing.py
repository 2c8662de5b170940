"""Which configurations need new blocks to be zeroed, and why.

A new block holds what its last owner left. What a kind of layer does with bytes that
it has not written decides (`UNWRITTEN`).
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from kvplugin.spec.attention import EncoderOnlyAttentionSpec
from kvplugin.spec.base import AttentionSpec, KVCacheSpec
from kvplugin.spec.dtypes import dtype_name
from kvplugin.spec.mamba import MambaSpec
from kvplugin.spec.uniform import UniformTypeKVCacheSpecs

if TYPE_CHECKING:
    from kvplugin.spec.config import KVCacheGroupSpec


class Unwritten(StrEnum):
    """What a kind does with the unwritten part of a block."""

    STARTS_FROM = "starts from it: an old request's state would be continued"
    WEIGHS_BY_ZERO = (
        "weighs it by zero: harmless, unless another group wrote the bytes in another "
        "format and they are a NaN in this one"
    )
    NEVER_READS = "never reads it"


UNWRITTEN: Final[Mapping[type[KVCacheSpec], Unwritten]] = MappingProxyType(
    {
        MambaSpec: Unwritten.STARTS_FROM,
        EncoderOnlyAttentionSpec: Unwritten.NEVER_READS,
        AttentionSpec: Unwritten.WEIGHS_BY_ZERO,
        KVCacheSpec: Unwritten.STARTS_FROM,
    }
)
"""Kind -> what it does; the first that a spec is one of counts, and a kind that nobody
knows is taken for the worst."""


def unwritten(spec: KVCacheSpec) -> Unwritten:
    """What a layer with this spec does with the unwritten part of a block."""
    return next(what for kind, what in UNWRITTEN.items() if isinstance(spec, kind))


def zeroing_reasons(groups: Sequence["KVCacheGroupSpec"]) -> tuple[str, ...]:
    """Why new blocks must be zeroed, one reason a group that needs it; empty: no need.

    Layers of one group never meet in a block, so only formats of different groups
    count (vLLM 0.32 compares their dtypes, 0.19.1 asks for recurrent states only).
    """
    kinds = [_layer_specs(group.kv_cache_spec) for group in groups]
    reasons = []
    for i, specs in enumerate(kinds):
        others = {_format(s) for j, group in enumerate(kinds) if j != i for s in group}
        for spec in sorted(specs, key=repr):
            what = unwritten(spec)
            foreign = sorted(others - {_format(spec)})
            if what is Unwritten.STARTS_FROM:
                why = ""
            elif what is Unwritten.WEIGHS_BY_ZERO and foreign:
                why = f" ({_format(spec)}; others: {', '.join(foreign)})"
            else:
                continue
            reasons.append(f"group {i}, {type(spec).__name__}{why}: {what}")
            break
    return tuple(reasons)


def _layer_specs(spec: KVCacheSpec) -> set[KVCacheSpec]:
    """The specs of a group's layers."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return set(spec.kv_cache_specs.values())
    return {spec}


def _format(spec: KVCacheSpec) -> str:
    """What bytes of such a layer are, as far as another layer can tell them apart."""
    if isinstance(spec, MambaSpec):
        return "+".join(sorted({dtype_name(dtype) for dtype in spec.dtypes}))
    packed = getattr(spec, "cache_dtype_str", None)
    dtype = dtype_name(getattr(spec, "dtype", type(spec).__name__))
    return f"{dtype}/{packed}" if packed else dtype
