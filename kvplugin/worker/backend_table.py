"""The attention backends that are known, one entry each.

Shapes and orders follow the backend classes of vLLM 0.19.1 (`get_kv_cache_shape`,
`get_kv_cache_stride_order`) and, for names that end in ``@0.32``, the views [B, H, N,
C] of 0.32's `v1/kv_cache_interface.py` and its `supported_kv_cache_layouts`.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from kvplugin.errors import unknown_name
from kvplugin.spec import FP8_DS_MLA_BYTES, AttentionSpec
from kvplugin.worker.backends import LAYOUTS, BackendLayout
from kvplugin.worker.kernel_blocks import MultipleOf


def _orders(**orders: str) -> dict[str, tuple[str, ...]]:
    return {layout: tuple(order.split()) for layout, order in orders.items()}


def _plain_orders(
    *axes: str, layouts: Iterable[str] = tuple(LAYOUTS)
) -> dict[str, tuple[str, ...]]:
    """The layouts as they are named, without the axes that a backend lacks."""
    kept = ("layer", *axes)
    return {name: tuple(a for a in LAYOUTS[name] if a in kept) for name in layouts}


def _key(spec: AttentionSpec) -> int:
    return spec.head_size


def _key_and_value(spec: AttentionSpec) -> int:
    return spec.head_size + spec.value_size


def _ds_mla(_: AttentionSpec) -> int:
    return FP8_DS_MLA_BYTES


_PACKED: Final = "CPU attention packs keys for the machine's instruction set"
_KV_BLOCKS: Final = ("kv", "block", "token", "head", "dim")
_BLOCKS_KV: Final = ("block", "kv", "token", "head", "dim")
_FUSED: Final = ("block", "head", "token", "dim")
_LATENT: Final = ("block", "token", "dim")
_SIXTEENS: Final = (MultipleOf(16),)
_FLASHINFER_NHD: Final = _orders(
    LBNHC="layer block kv token head dim", BLNHC="block layer kv token head dim"
)
_FLASHINFER_HND: Final = _orders(
    LBHNC="layer block kv head token dim", BHLNC="block kv head layer token dim"
)
_KV_FIRST: Final = _orders(LBNHC="layer kv block token head dim")
# A latent has no heads: both names mean the same.
_LATENT_ORDERS: Final = _plain_orders(*_LATENT, layouts=("LBNHC", "LBHNC"))

_TABLE: Final = (
    BackendLayout(
        name="FLASH_ATTN",
        axes=_KV_BLOCKS,
        orders=_orders(
            LBNHC="layer kv block token head dim",
            LBHNC="layer kv block head token dim",
            BLNHC="block layer kv token head dim",
            BHLNC="block head layer kv token dim",
        ),
        row_elements=_key,
        block_sizes=_SIXTEENS,
    ),
    BackendLayout(
        name="FLASHINFER",
        axes=_BLOCKS_KV,
        orders=_FLASHINFER_NHD | _FLASHINFER_HND,
        row_elements=_key,
        block_sizes=(16, 32, 64),
    ),
    BackendLayout(
        # On compute capability 10 its kernels read head-major blocks only.
        name="FLASHINFER_SM100",
        axes=_BLOCKS_KV,
        orders=_FLASHINFER_HND,
        row_elements=_key,
        block_sizes=(16, 32, 64),
    ),
    BackendLayout(
        # vLLM 0.19.1 accepts HND here and ignores it.
        name="TRITON_ATTN",
        axes=_BLOCKS_KV,
        orders=_FLASHINFER_NHD,
        row_elements=_key,
        block_sizes=_SIXTEENS,
    ),
    BackendLayout(
        name="FLEX_ATTENTION", axes=_KV_BLOCKS, orders=_KV_FIRST, row_elements=_key
    ),
    BackendLayout(
        name="TREE_ATTN",
        axes=_KV_BLOCKS,
        orders=_KV_FIRST,
        row_elements=_key,
        block_sizes=_SIXTEENS,
    ),
    BackendLayout(
        name="ROCM_ATTN",
        axes=_KV_BLOCKS,
        orders=_KV_FIRST,
        row_elements=_key,
        block_sizes=_SIXTEENS,
        opaque="its kernels split the elements of a key over the tokens of a block",
    ),
    BackendLayout(
        name="CPU_ATTN",
        axes=("kv", "block", "head", "token", "dim"),
        orders=_orders(LBHNC="layer kv block head token dim"),
        row_elements=_key,
        opaque=_PACKED,
    ),
    BackendLayout(
        name="FLASH_ATTN_DIFFKV",
        axes=("block", "token", "head", "dim"),
        orders=_plain_orders(
            *("block", "token", "head", "dim"),
            layouts=("LBNHC", "LBHNC", "BLNHC", "BHLNC"),
        ),
        row_elements=_key_and_value,
        row_holds_key_and_value=True,
        block_sizes=_SIXTEENS,
    ),
    BackendLayout(
        name="TRITON_MLA",
        axes=_LATENT,
        orders=_LATENT_ORDERS,
        row_elements=_key,
        block_sizes=_SIXTEENS,
    ),
    BackendLayout(
        name="FLASHMLA",
        axes=_LATENT,
        orders=_LATENT_ORDERS,
        row_elements=_key,
        block_sizes=(64,),
    ),
    BackendLayout(
        name="FLASHMLA_SPARSE",
        axes=_LATENT,
        orders=_LATENT_ORDERS,
        row_elements=_key,
        block_sizes=(64,),
    ),
    BackendLayout(
        # The same backend for `cache_dtype_str` fp8_ds_mla: rows of bytes.
        name="FLASHMLA_SPARSE_FP8",
        axes=_LATENT,
        orders=_LATENT_ORDERS,
        row_elements=_ds_mla,
        block_sizes=(64,),
    ),
    BackendLayout(
        name="FLASH_ATTN@0.32",
        axes=_FUSED,
        orders=_plain_orders(*_FUSED),
        row_elements=_key_and_value,
        row_holds_key_and_value=True,
        block_sizes=_SIXTEENS,
    ),
    BackendLayout(
        name="FLASHINFER@0.32",
        axes=_FUSED,
        orders=_plain_orders(*_FUSED),
        row_elements=_key_and_value,
        row_holds_key_and_value=True,
        block_sizes=(16, 32, 64),
    ),
    BackendLayout(
        name="FLASHINFER_SM100@0.32",
        axes=_FUSED,
        orders=_plain_orders(*_FUSED, layouts=("LBHNC", "BLHNC")),
        row_elements=_key_and_value,
        row_holds_key_and_value=True,
        block_sizes=(16, 32, 64, 128),
    ),
    BackendLayout(
        name="TRITON_ATTN@0.32",
        axes=_FUSED,
        orders=_plain_orders(*_FUSED),
        row_elements=_key_and_value,
        row_holds_key_and_value=True,
        block_sizes=_SIXTEENS,
    ),
    BackendLayout(
        name="CPU_ATTN@0.32",
        axes=_FUSED,
        orders=_plain_orders(*_FUSED, layouts=("LBHNC",)),
        row_elements=_key_and_value,
        row_holds_key_and_value=True,
        block_sizes=(MultipleOf(32),),
        opaque=_PACKED,
    ),
    BackendLayout(
        name="FLASHMLA@0.32",
        axes=_FUSED,
        orders=_plain_orders(*_FUSED),
        row_elements=_key,
        block_sizes=(64,),
    ),
    BackendLayout(
        name="FLASHMLA_SPARSE_FP8@0.32",
        axes=_FUSED,
        orders=_plain_orders(*_FUSED),
        row_elements=_ds_mla,
        block_sizes=(MultipleOf(64),),
    ),
)
BACKENDS: Final[Mapping[str, BackendLayout]] = MappingProxyType(
    {backend.name: backend for backend in _TABLE}
)
"""The known backends by name; those without a version have the shapes of 0.19.1."""


def find_backend(name: str) -> BackendLayout:
    """A backend of the table.

    Raises:
        ConfigError: it is not there.
    """
    if name not in BACKENDS:
        raise unknown_name("attention backend", name, BACKENDS, "the layer's backend")
    return BACKENDS[name]
