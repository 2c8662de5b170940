"""What connectors and copy engines are told about a layer's KV memory."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from kvplugin.contract import KVTensor
from kvplugin.errors import ConfigError, LayoutMismatchError
from kvplugin.kernels.region import Region
from kvplugin.layout import KVLayout, TensorLayout
from kvplugin.worker.tensors import KVTensors, LayerCache
from kvplugin.worker.views import AttentionPlan, attention_view


def describe_tensor(tensor: torch.Tensor, block_axis: int) -> TensorLayout:
    """Shape and strides of a tensor as it is."""
    itemsize = tensor.element_size()
    return TensorLayout(
        shape=tuple(tensor.shape),
        strides=tuple(stride * itemsize for stride in tensor.stride()),
        itemsize=itemsize,
        dtype=str(tensor.dtype).removeprefix("torch."),
        block_axis=block_axis,
    )


def describe_cache(cache: LayerCache, total_heads: int = 0) -> KVTensor:
    """A layer's memory as connectors get to know it.

    States are one view of bytes, [blocks, bytes of all states].

    Args:
        cache: of one rank.
        total_heads: KV heads over all ranks, see `KVTensor.total_heads`.
    """
    known = cache.plan is not None and not cache.plan.backend.opaque
    return KVTensor(
        address=cache.tensors[0].data_ptr(),
        layout=cache.bytes_view.tensor,
        device=str(cache.tensors[0].device),
        rows=kv_layout(cache) if known else None,
        interior=_interior(cache),
        total_heads=total_heads,
    )


def describe_caches(
    tensors: KVTensors, total_heads: Mapping[str, int] = MappingProxyType({})
) -> dict[str, KVTensor]:
    """The same for all layers with a cache of their own.

    Args:
        tensors: of one rank.
        total_heads: by layer; 0 for those that are not named.
    """
    return {
        name: describe_cache(cache, total_heads.get(name, 0))
        for name, cache in tensors.layers.items()
        if cache.layer == name
    }


def _interior(cache: LayerCache) -> str:
    """Pages with equal names hold the same bytes for the same rows: what is in them,
    and in which order and number."""
    if cache.plan is None:
        return cache.page.interior
    view = cache.views[0].tensor
    sizes = dict(zip(cache.plan.backend.axes, view.shape, strict=True))
    inside = [axis for axis in cache.plan.order() if axis not in ("layer", "block")]
    order = " ".join(f"{axis}:{sizes[axis]}" for axis in inside)
    return f"{cache.page.interior}/{order}"


def regions(cache: LayerCache) -> list[Region]:
    """The bytes of a block, in the order of the view's axes, for copy engines.

    Raises:
        LayoutMismatchError: a block falls into too many pieces to be copied so.
    """
    start = cache.tensors[0].data_ptr() - cache.views[0].offset
    return [
        Region(start + run.offset, run.stride, run.nbytes, cache.num_blocks)
        for run in cache.runs()
    ]


def kv_layout(cache: LayerCache) -> KVLayout:
    """Where each row of a layer's blocks lies, from its first element on: from
    ``cache.tensors[0].data_ptr()``.

    Its blocks are those of the view, `split` of them to a block of the pool, so that
    conversions take ids of the pool.

    Raises:
        LayoutMismatchError: the backend keeps the inside of a page to itself, or the
            layer keeps states: its blocks can only be moved as they are.
    """
    if cache.plan is None:
        raise LayoutMismatchError(
            f"layer {cache.layer!r} keeps recurrent states, which have no rows: its "
            f"blocks can be moved, not converted. {cache.spec}"
        )
    return plan_rows(cache.plan)


def plan_rows(plan: AttentionPlan) -> KVLayout:
    """Where each row of a planned view lies, from its first element on.

    Raises:
        LayoutMismatchError: the backend keeps the inside of a page to itself.
    """
    backend, spec = plan.backend, plan.spec
    if backend.opaque:
        raise LayoutMismatchError(
            f"layer {plan.layer!r}: blocks of attention backend {backend.name} can be "
            f"moved, not converted: {backend.opaque}. {spec}"
        )
    return KVLayout.of_tensor(
        attention_view(plan).tensor,
        backend.axes,
        key_size=spec.head_size if backend.row_holds_key_and_value else None,
        name=f"{backend.name} {plan.layout}",
        split=plan.split,
    )


def recognise(tensor: TensorLayout, plan: AttentionPlan) -> AttentionPlan:
    """The plan that made this tensor: `plan` but for layout and order of K and V.

    For memory that an engine made: what it registers has to be what its backend is
    known to make, or every later copy is of the wrong bytes.

    Raises:
        LayoutMismatchError: it is nothing that the backend is known to make; shows
            the tensor and what it could have been.
    """
    known = dict(_variants(plan))
    for variant, view in known.items():
        if _same(tensor, view):
            return variant
    expected = "; ".join(
        f"{variant.layout}{' (K and V of a block together)' * variant.block_major}: "
        f"{view}"
        for variant, view in known.items()
    )
    raise LayoutMismatchError(
        f"layer {plan.layer!r}: its KV tensor is not as attention backend "
        f"{plan.backend.name} is known to make it for {plan.spec}. Tensor: {tensor}. "
        f"Known: {expected or 'nothing'}. Name the backend and version that made it."
    )


def _variants(plan: AttentionPlan) -> Iterator[tuple[AttentionPlan, TensorLayout]]:
    for layout in plan.backend.orders:
        apart = replace(plan, layout=layout, block_major=False)
        together = [replace(apart, block_major=True)] if apart.keys_first else []
        for variant in (apart, *together):
            try:
                yield variant, attention_view(variant).tensor
            except ConfigError:
                continue  # Padding rules this layout out.


def _same(one: TensorLayout, other: TensorLayout) -> bool:
    """Whether they are the same elements; strides of an axis of one say nothing."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    steps = zip(one.shape, one.strides, other.strides, strict=True)
    return all(size == 1 or a == b for size, a, b in steps)
