"""The engine's own ways to lay out a cache, beside those of the worker's table.

They read blocks of any size. Rows hold a key and then its value, so that values of
another size than keys fit too.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

from kvplugin.errors import unknown_name
from kvplugin.spec import FP8_DS_MLA_BYTES, AttentionSpec
from kvplugin.worker.backend_table import BACKENDS
from kvplugin.worker.backends import BackendLayout
from kvplugin.worker.tensors import LayerCache

_LATENT_ORDERS: Final = {
    "LBNHC": ("layer", "block", "token", "dim"),
    "LBHNC": ("layer", "block", "token", "dim"),
    "BLNHC": ("block", "layer", "token", "dim"),
}


def _key_and_value(spec: AttentionSpec) -> int:
    return spec.head_size + spec.value_size


def _latent(spec: AttentionSpec) -> int:
    return spec.head_size


def _record(_: AttentionSpec) -> int:
    return FP8_DS_MLA_BYTES


_OWN: Final = (
    BackendLayout(
        name="REFERENCE",
        axes=("block", "token", "head", "dim"),
        orders={
            "LBNHC": ("layer", "block", "token", "head", "dim"),
            "LBHNC": ("layer", "block", "head", "token", "dim"),
            "BLNHC": ("block", "layer", "token", "head", "dim"),
            "BHLNC": ("block", "head", "layer", "token", "dim"),
        },
        row_elements=_key_and_value,
        row_holds_key_and_value=True,
    ),
    BackendLayout(
        name="REFERENCE_MLA",
        axes=("block", "token", "dim"),
        orders=_LATENT_ORDERS,
        row_elements=_latent,
    ),
    BackendLayout(
        name="REFERENCE_RECORDS",
        axes=("block", "token", "dim"),
        orders=_LATENT_ORDERS,
        row_elements=_record,
    ),
)
KNOWN: Final[Mapping[str, BackendLayout]] = MappingProxyType(
    {**BACKENDS, **{backend.name: backend for backend in _OWN}}
)
"""All backends by name."""


def find_backend(name: str, key: str) -> BackendLayout:
    """A backend by name.

    Raises:
        ConfigError: there is none; `key` is the setting.
    """
    if name not in KNOWN:
        raise unknown_name("attention backend", name, KNOWN, f"EngineConfig.{key}")
    return KNOWN[name]


def row_views(cache: LayerCache) -> tuple[torch.Tensor, ...]:
    """Views [blocks, tokens, heads, dim] of a layer's rows: keys and values, or what
    the layer keeps in their place.

    Blocks are kernel blocks. A backend's axes say where rows lie, and this engine
    computes with them as they are, also where the real kernels pack a page otherwise.
    """
    if cache.plan is None:
        raise ValueError(f"layer {cache.layer!r} keeps states, which have no rows")
    backend, tensor = cache.plan.backend, cache.tensors[0]
    axes = list(backend.axes)
    if "kv" in axes:
        parts = tensor.unbind(axes.index("kv"))
        axes.remove("kv")
    elif backend.row_holds_key_and_value:
        spec = cache.plan.spec
        parts = tensor.split([spec.head_size, spec.value_size], dim=axes.index("dim"))
    else:
        parts = (tensor,)
    return tuple(_in_order(part, axes) for part in parts)


def _in_order(tensor: torch.Tensor, axes: list[str]) -> torch.Tensor:
    if "head" not in axes:
        tensor, axes = tensor.unsqueeze(-2), [*axes[:-1], "head", axes[-1]]
    return tensor.permute([axes.index(a) for a in ("block", "token", "head", "dim")])
