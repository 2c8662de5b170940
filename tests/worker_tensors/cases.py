"""Configurations, and contents that say where they belong."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

import numpy as np
import torch

from kvplugin.layout import Conversion
from kvplugin.spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MLAAttentionSpec,
)
from kvplugin.worker.backend_table import BACKENDS
from kvplugin.worker.backends import BackendLayout
from kvplugin.worker.kernel_blocks import MultipleOf
from kvplugin.worker.tensors import KVTensors, LayerCache, allocate_kv_cache

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def any_block_size(backend: str) -> BackendLayout:
    """The backend for blocks of any size, so that tests can be small."""
    return replace(BACKENDS[backend], block_sizes=(MultipleOf(1),))


def attention(**fields: object) -> FullAttentionSpec:
    return FullAttentionSpec(
        **{
            "block_size": 4,
            "num_kv_heads": 2,
            "head_size": 3,
            "dtype": "bfloat16",
            **fields,
        }
    )


def spec_for(
    backend: BackendLayout, block_size: int, heads: int, dtype: str
) -> FullAttentionSpec:
    """A spec of the kind that the backend is for."""
    if backend.name.startswith("FLASHMLA_SPARSE_FP8"):
        return MLAAttentionSpec(
            block_size=block_size,
            num_kv_heads=1,
            head_size=576,
            dtype="uint8",
            cache_dtype_str="fp8_ds_mla",
        )
    if "MLA" in backend.name:
        return MLAAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=5, dtype=dtype
        )
    return attention(block_size=block_size, num_kv_heads=heads, dtype=dtype)


def config_of(
    groups: Sequence[tuple[KVCacheSpec, Sequence[str]]], num_blocks: int
) -> KVCacheConfig:
    """Tensor i is shared by the i-th layers of all groups."""
    page = groups[0][0].page_size_bytes
    most = max(len(names) for _, names in groups)
    return KVCacheConfig(
        num_blocks,
        tuple(
            KVCacheTensor(
                page * num_blocks,
                tuple(names[i] for _, names in groups if i < len(names)),
            )
            for i in range(most)
        ),
        tuple(KVCacheGroupSpec(tuple(names), spec) for spec, names in groups),
    )


def one_layer(
    backend: BackendLayout,
    layout: str,
    spec: FullAttentionSpec,
    num_blocks: int,
    ratio: int = 1,
) -> KVTensors:
    """A worker with the layer ``x``, its blocks split into `ratio` kernel blocks;
    between two others where layers lie together."""
    names = ["w", "x", "y"] if not layout.startswith("L") else ["x"]
    return allocate_kv_cache(
        config_of([(spec, names)], num_blocks),
        dict.fromkeys(names, backend),
        layout,
        kernel_block_sizes=[spec.block_size // ratio],
    )


def logical(cache: LayerCache) -> dict[str, torch.Tensor]:
    """Keys and values (or latents) as attention reads them, [blocks, tokens, heads,
    elements], by axes and nothing else."""
    backend = cache.plan.backend
    axes, view = list(backend.axes), cache.tensors[0]
    if "head" not in axes:
        view, axes = view.unsqueeze(-2), [*axes[:-1], "head", axes[-1]]
    order = [axes.index(axis) for axis in ("block", "token", "head", "dim")]
    if "kv" in axes:
        view = view.permute(axes.index("kv"), *order)
        return {"k": view[0], "v": view[1]}
    view = view.permute(order)
    if backend.row_holds_key_and_value:
        size = cache.spec.head_size
        return {"k": view[..., :size], "v": view[..., size:]}
    return {"kv": view}


def codes(shape: Sequence[int], start: int = 0) -> np.ndarray:
    """A number of its own for each place: (layer,) block, token, head, element."""
    return (np.arange(prod(shape), dtype=np.int64) + start).reshape(shape)


def digits(numbers: int, itemsize: int) -> Iterator[int]:
    """Shifts that bring every part of so many numbers into an element once."""
    return iter(range(0, max(numbers.bit_length(), 1), 8 * itemsize))


def write(view: torch.Tensor, numbers: np.ndarray, shift: int) -> None:
    """Elements get the bits of the numbers from `shift` on."""
    integers = view.view(_INTEGERS[view.element_size()])
    integers.copy_(torch.from_numpy(numbers >> shift).to(integers.dtype))


def read(view: torch.Tensor) -> np.ndarray:
    return view.view(_INTEGERS[view.element_size()]).contiguous().numpy()


def expected(view: torch.Tensor, numbers: np.ndarray, shift: int) -> np.ndarray:
    integers = _INTEGERS[view.element_size()]
    return torch.from_numpy(numbers >> shift).to(integers).numpy()


def memory_from(cache: LayerCache, tensors: KVTensors) -> np.ndarray:
    """Bytes of the buffer from the view's first element on."""
    buffer = tensors.buffers[cache.buffer]
    return buffer.numpy().view(np.uint8)[cache.views[0].offset :]


def convert(
    plan: Conversion,
    source: np.ndarray,
    target: np.ndarray,
    source_ids: Sequence[int],
    target_ids: Sequence[int],
    num_tokens: int | None = None,
) -> None:
    """Execute a conversion run by run."""
    for chunks in zip(
        *plan.pair_chunks(source_ids, target_ids, num_tokens), strict=True
    ):
        for here, there, nbytes in plan.runs(*chunks):
            target[there : there + nbytes] = source[here : here + nbytes]
