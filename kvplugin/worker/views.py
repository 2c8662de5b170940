"""Where the views of a layer lie in its memory: shapes and strides, no tensors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvplugin.errors import ConfigError
from kvplugin.layout import PageLayout, Run, TensorLayout, block_runs
from kvplugin.spec import (
    FP8_DS_MLA,
    AttentionSpec,
    KVCacheSpec,
    MambaSpec,
    dtype_bytes,
    dtype_name,
)
from kvplugin.worker.backends import BackendLayout, keys_first
from kvplugin.worker.kernel_blocks import reads_blocks_of


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """What decides the view of an attention layer."""

    layer: str
    """For messages."""
    spec: AttentionSpec
    backend: BackendLayout
    layout: str
    num_blocks: int
    """Of the pool."""
    block_size: int
    """Tokens of a block as the kernels count: the spec's, or a divisor of it."""
    block_major: bool = False
    """Keys and values of a block are to lie together."""
    num_layers: int = 1
    """That lie in the same memory, one beside the other."""

    @property
    def split(self) -> int:
        """Blocks of the view that one block of the pool is."""
        return self.spec.block_size // self.block_size

    @property
    def kernel_blocks(self) -> int:
        """Blocks of the view. Block b of the pool is `split` of them from b*split."""
        return self.num_blocks * self.split

    def order(self) -> tuple[str, ...]:
        """Axes as they lie in memory, outermost first, ``layer`` among them."""
        return self.backend.order(self.layout, block_major=self.block_major)

    @property
    def padded(self) -> bool:
        """Whether a page has bytes without data."""
        return self.spec.page_size_bytes != self.spec.real_page_size_bytes

    @property
    def keys_first(self) -> bool:
        """Whether a block is in two places: its keys before all values."""
        return keys_first(self.order())

    def refusal(self, why: str) -> ConfigError:
        """An error that says what was to be viewed how."""
        return ConfigError(
            f"layer {self.layer!r}: {why}. Backend {self.backend.name}, layout "
            f"{self.layout}, kernel block size {self.block_size}, {self.spec}"
        )

    def check(self) -> None:
        """Refuse what the backend cannot read.

        Raises:
            ConfigError: naming layer, spec and backend.
        """
        spec, backend, itemsize = self.spec, self.backend, dtype_bytes(self.spec.dtype)
        if self.block_size < 1 or spec.block_size % self.block_size:
            raise self.refusal(
                f"kernel blocks of {self.block_size} tokens do not divide blocks of "
                f"{spec.block_size}"
            )
        if not reads_blocks_of(self.block_size, backend.block_sizes):
            sizes = ", ".join(map(str, backend.block_sizes))
            raise self.refusal(f"the backend reads blocks of {sizes} tokens")
        if self.layout not in backend.orders:
            known = ", ".join(backend.orders)
            raise self.refusal(f"the backend supports layouts {known}")
        made = math.prod(backend.shape(spec, 1, spec.block_size)) * itemsize
        if made != spec.real_page_size_bytes:
            raise self.refusal(
                f"the backend makes pages of {made} bytes, the spec of "
                f"{spec.real_page_size_bytes}{_hint(spec)}"
            )
        if spec.page_size_bytes % itemsize:
            raise self.refusal(f"page_size_padded is no multiple of {itemsize} bytes")


@dataclass(frozen=True, slots=True)
class View:
    """One tensor of a layer."""

    tensor: TensorLayout
    offset: int
    """Bytes from the start of the memory."""


def attention_view(plan: AttentionPlan, layer_index: int = 0) -> View:
    """The view of an attention layer, axes in the backend's order.

    Args:
        plan: what decides it.
        layer_index: which of `plan.num_layers` it is.

    Raises:
        ConfigError: the backend cannot read such blocks, or padding would lie inside
            of what it takes for dense; names layer, spec and backend.
    """
    plan.check()
    strides = _strides(plan)
    itemsize = dtype_bytes(plan.spec.dtype)
    tensor = TensorLayout(
        shape=plan.backend.shape(plan.spec, plan.kernel_blocks, plan.block_size),
        strides=tuple(strides[axis] for axis in plan.backend.axes),
        itemsize=itemsize,
        dtype=dtype_name(plan.spec.dtype),
        block_axis=plan.backend.axes.index("block"),
    )
    return View(tensor, layer_index * strides["layer"])


def state_views(layer: str, spec: MambaSpec, num_blocks: int) -> tuple[View, ...]:
    """The views [blocks, *shape] of a recurrent layer, one for each of its states.

    A page has the states one after the other, then its padding.

    Raises:
        ConfigError: a state would start where its dtype cannot.
    """
    views, offset = [], 0
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        itemsize = dtype_bytes(dtype)
        if offset % itemsize or spec.page_size_bytes % itemsize:
            raise ConfigError(
                f"layer {layer!r}: a state of {dtype_name(dtype)} starts at byte "
                f"{offset} of pages of {spec.page_size_bytes} bytes, which is no "
                f"multiple of {itemsize}. Put states of wider dtypes first, or pad the "
                f"page (page_size_padded). {spec}"
            )
        strides = (spec.page_size_bytes, *_dense_strides(shape, itemsize))
        tensor = TensorLayout(
            (num_blocks, *shape), strides, itemsize, dtype_name(dtype), 0
        )
        views.append(View(tensor, offset))
        offset += math.prod(shape) * itemsize
    return tuple(views)


def state_bytes_view(spec: MambaSpec, num_blocks: int) -> View:
    """The bytes of all states of a block, padding left out, as one view."""
    nbytes = spec.real_page_size_bytes
    strides = (spec.page_size_bytes, 1)
    return View(TensorLayout((num_blocks, nbytes), strides, 1, "uint8", 0), 0)


def view_runs(view: View, page: PageLayout) -> tuple[Run, ...]:
    """The runs that make up a block, from the start of the memory.

    Raises:
        LayoutMismatchError: the view's blocks are not those of the page.
    """
    return tuple(
        run._replace(offset=run.offset + view.offset)
        for run in block_runs(view.tensor, page)
    )


def page_layout(
    spec: KVCacheSpec, num_blocks: int, backend: BackendLayout | None
) -> PageLayout:
    """What the spec promises about the pages of a layer."""
    name = "state" if backend is None else backend.name
    return PageLayout(
        page_bytes=spec.page_size_bytes,
        num_blocks=num_blocks,
        padded=spec.page_size_bytes != spec.real_page_size_bytes,
        interior=f"{name}/{_dtypes(spec)}",
    )


def _dtypes(spec: KVCacheSpec) -> str:
    if isinstance(spec, MambaSpec):
        return "+".join(
            f"{dtype_name(d)}{list(shape)}"
            for d, shape in zip(spec.dtypes, spec.shapes, strict=True)
        )
    return dtype_name(getattr(spec, "dtype", ""))


def _hint(spec: AttentionSpec) -> str:
    packed = getattr(spec, "cache_dtype_str", None) == FP8_DS_MLA
    return ": its cache format has rows of bytes, of dtype uint8" if packed else ""


def _strides(plan: AttentionPlan) -> dict[str, int]:
    """Bytes between neighbours along each axis, ``layer`` among them."""
    shape = plan.backend.shape(plan.spec, plan.kernel_blocks, plan.block_size)
    sizes = dict(zip(plan.backend.axes, shape, strict=True))
    sizes["layer"] = plan.num_layers
    order = plan.order()
    page = plan.spec.page_size_bytes
    padded = plan.padded
    page_begins = max(order.index("layer"), order.index("block")) + 1
    if padded:
        _check_padding(plan, [axis for axis in order[:page_begins] if sizes[axis] > 1])
    strides, step = {}, dtype_bytes(plan.spec.dtype)
    for place, axis in reversed(list(enumerate(order))):
        if padded and place == page_begins - 1:
            step = page
        strides[axis] = step
        step *= sizes[axis]
    return strides


def _check_padding(plan: AttentionPlan, outside: Sequence[str]) -> None:
    """Padding ends a page, so a page has to be one run, and one kernel block."""
    if plan.block_size != plan.spec.block_size:
        raise plan.refusal(
            "padded pages can't be split into kernel blocks: use the kernel block size "
            "as block size"
        )
    split = [axis for axis in outside if axis not in ("layer", "block")]
    if split:
        raise plan.refusal(
            f"padded pages have to be one run of bytes, but axis {split[0]} lies "
            "outside of the blocks: choose another layout"
        )


def _dense_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape)))
