"""The KV memory of a worker, and each layer's view of it.

A `KVCacheTensor` is one buffer of bytes, and one layer of each group lies in it:

    buffer 0     | block 0 | block 1 | block 2 | block 3 | ...
    full.0       |  null   |  r1     |         |  r1     |       group 0's block table
    sw.0         |  null   |         |  r1     |         |       group 1's

A block belongs to one group at a time, so the layers never meet, provided that block b
is the same bytes in every view. Where keys lie before all values, it is only among
views that all do so alike: beside anything else they are viewed block by block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kvplugin.errors import ConfigError
from kvplugin.layout import PageLayout, Run
from kvplugin.spec import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
)
from kvplugin.worker.backends import BackendLayout, canonical_layout, is_cross_layer
from kvplugin.worker.placement import Place, layer_places
from kvplugin.worker.views import (
    AttentionPlan,
    View,
    attention_view,
    page_layout,
    state_bytes_view,
    state_views,
    view_runs,
)


@dataclass(frozen=True)
class LayerCache:
    """One layer's KV cache."""

    layer: str
    """Its owner, also where other layers use it."""
    group: int
    spec: KVCacheSpec
    num_blocks: int
    """Of the pool; a view may count kernel blocks, some to a block."""
    views: tuple[View, ...]
    tensors: tuple[torch.Tensor, ...]
    """One a view: one, or one a state."""
    plan: AttentionPlan | None = None
    """How its view came about; None for states."""
    buffer: int = 0
    """Which of the worker's buffers it lies in."""

    @property
    def page(self) -> PageLayout:
        """What its spec promises about a page."""
        backend = None if self.plan is None else self.plan.backend
        return page_layout(self.spec, self.num_blocks, backend)

    @property
    def bytes_view(self) -> View:
        """All its bytes as one view: its tensor, or its states unseparated."""
        if isinstance(self.spec, MambaSpec):
            return state_bytes_view(self.spec, self.num_blocks)
        return self.views[0]

    @property
    def kv_cache(self) -> torch.Tensor | list[torch.Tensor]:
        """What the layer is given: a tensor, or a list of states."""
        return self.tensors[0] if self.plan is not None else list(self.tensors)

    def runs(self) -> tuple[Run, ...]:
        """The bytes of a block in the buffer, without padding.

        Raises:
            LayoutMismatchError: a block falls into too many pieces.
        """
        return view_runs(self.bytes_view, self.page)


@dataclass(frozen=True)
class KVTensors:
    """All KV memory of a worker."""

    num_blocks: int
    buffers: tuple[torch.Tensor, ...]
    """int8 [bytes]; together exactly the bytes of the configuration."""
    layers: Mapping[str, LayerCache]
    """By layer name, those included that use another's cache."""
    kernel_block_sizes: tuple[int, ...] = ()
    """Tokens of a block as the kernels of each group count; for `table_shape`, whose
    tables must count so too."""

    def kv_caches(self) -> dict[str, torch.Tensor | list[torch.Tensor]]:
        """What each layer is given."""
        return {name: cache.kv_cache for name, cache in self.layers.items()}


def allocate_kv_cache(
    config: KVCacheConfig,
    backends: Mapping[str, BackendLayout],
    layout: str,
    *,
    kernel_block_sizes: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
    pin_memory: bool = False,
) -> KVTensors:
    """Allocate zeroed KV memory and view it as every layer's backend wants it.

    Args:
        config: the worker's; all of its layers are allocated.
        backends: attention layer -> its backend; recurrent layers need none.
        layout: from `choose_layout`. If the layers of a block lie together in it, all
            memory is one buffer, in which layers are in the order of the tensors.
        kernel_block_sizes: tokens of a block as the kernels of each group count; None
            for the blocks of the specs.
        device: where.
        pin_memory: host memory that a GPU can read; on a machine with a GPU.

    Raises:
        ConfigError: the configuration contradicts itself, or a layer cannot be viewed
            so; names layer, spec and backend.
    """
    if config.num_blocks < 1:
        raise ConfigError(
            f"num_blocks {config.num_blocks}: a KV cache has at least the null block. "
            "Give it more memory, or set num_gpu_blocks_override"
        )
    layout = canonical_layout(layout)
    together = is_cross_layer(layout)
    places = layer_places(config)
    sizes_of_groups = _kernel_block_sizes(config, kernel_block_sizes)
    plans = _plans(config, places, backends, layout, sizes_of_groups)
    sizes = [tensor.size for tensor in config.kv_cache_tensors]
    if together and sizes:
        plans = _cross_layer_plans(config, plans, layout)
        sizes = [sum(sizes)]
    buffers = tuple(
        torch.zeros(size, dtype=torch.int8, device=device, pin_memory=pin_memory)
        for size in sizes
    )
    own = {}
    for name, place in places.items():
        index, beside = (0, place.tensor) if together else (place.tensor, 0)
        cache = _view_layer(
            name, place, config.num_blocks, plans.get(name), buffers[index], beside
        )
        own[name] = replace(cache, buffer=index)
    for tensor in config.kv_cache_tensors:
        _check_same_bytes([own[name] for name in tensor.shared_by])
    shared = {
        name: own[target]
        for group in config.kv_cache_groups
        for name, target in group.kv_sharing_targets.items()
    }
    return KVTensors(config.num_blocks, buffers, own | shared, sizes_of_groups)


def as_tensor(buffer: torch.Tensor, view: View) -> torch.Tensor:
    """A view of a buffer of bytes; both share the storage."""
    layout, itemsize = view.tensor, view.tensor.itemsize
    return buffer.view(getattr(torch, layout.dtype)).as_strided(
        layout.shape,
        tuple(stride // itemsize for stride in layout.strides),
        (buffer.storage_offset() + view.offset) // itemsize,
    )


def _view_layer(
    name: str,
    place: Place,
    num_blocks: int,
    plan: AttentionPlan | None,
    buffer: torch.Tensor,
    beside: int,
) -> LayerCache:
    """Args: `beside` is how many layers come before this one in each block."""
    views: tuple[View, ...] = ()
    if plan is not None:
        views = (attention_view(plan, beside),)
    elif isinstance(place.spec, MambaSpec):
        views = state_views(name, place.spec, num_blocks)
    tensors = tuple(as_tensor(buffer, view) for view in views)
    return LayerCache(name, place.group, place.spec, num_blocks, views, tensors, plan)


def _kernel_block_sizes(
    config: KVCacheConfig, given: Sequence[int] | None
) -> tuple[int, ...]:
    """One a group."""
    groups = config.kv_cache_groups
    if given is None:
        given = [group.kv_cache_spec.block_size for group in groups]
    if len(given) != len(groups):
        raise ConfigError(f"{len(given)} kernel block sizes for {len(groups)} groups")
    return tuple(given)


def _plans(
    config: KVCacheConfig,
    places: Mapping[str, Place],
    backends: Mapping[str, BackendLayout],
    layout: str,
    kernel_block_sizes: Sequence[int],
) -> dict[str, AttentionPlan]:
    """Of attention layers."""
    plans = {}
    for name, place in places.items():
        if not isinstance(place.spec, AttentionSpec):
            continue
        if name not in backends:
            raise ConfigError(
                f"layer {name!r}: no attention backend is given for it. {place.spec}"
            )
        plan = plans[name] = AttentionPlan(
            layer=name,
            spec=place.spec,
            backend=backends[name],
            layout=layout,
            num_blocks=config.num_blocks,
            block_size=kernel_block_sizes[place.group],
        )
        plan.check()
    # Unpadded pages of keys before all values agree with their like only.
    alike = len(plans) == len(places) and all(
        plan.keys_first and not plan.padded for plan in plans.values()
    )
    return {
        name: replace(plan, block_major=plan.keys_first and not alike)
        for name, plan in plans.items()
    }


def _cross_layer_plans(
    config: KVCacheConfig, plans: Mapping[str, AttentionPlan], layout: str
) -> dict[str, AttentionPlan]:
    """The plans for one buffer that all layers share, block by block."""
    kinds = {(plan.spec, plan.backend.name) for plan in plans.values()}
    tensors = len(config.kv_cache_tensors)
    if len(config.kv_cache_groups) != 1 or len(kinds) != 1 or len(plans) != tensors:
        raise ConfigError(
            f"KV cache layout {layout} puts the layers of a block together, which "
            "needs one group of attention layers with one spec and one backend. There "
            f"are {len(config.kv_cache_groups)} groups and these attention layers: "
            f"{'; '.join(f'{spec} on {name}' for spec, name in kinds) or 'none'}. Use "
            "a layout that begins with L (NHD, HND)."
        )
    return {name: replace(p, num_layers=len(plans)) for name, p in plans.items()}


def _check_same_bytes(caches: Sequence[LayerCache]) -> None:
    """Block b is the same bytes in all views of a buffer."""
    if len(caches) > 1 and len({_spots(cache) for cache in caches}) > 1:
        views = "; ".join(
            f"{cache.layer!r} ({_backend_name(cache)}, {cache.spec}): {cache.views}"
            for cache in caches
        )
        raise ConfigError(
            "layers that share a KV cache tensor would not find a block in the same "
            f"bytes: choose a layout whose blocks are one run (NHD, HND). {views}"
        )


def _spots(cache: LayerCache) -> tuple[Run, ...]:
    """The runs of a block; none where they are all inside its own page."""
    runs, page = sorted(cache.runs()), cache.spec.page_size_bytes
    inside = all(r.stride == page and r.offset + r.nbytes <= page for r in runs)
    return () if inside else tuple(runs)


def _backend_name(cache: LayerCache) -> str:
    return "states" if cache.plan is None else f"backend {cache.plan.backend.name}"
