"""The operations on KV memory that the engine needs; the only place that names them."""

from kvplugin.kernels.dispatch import (
    block_zeroer,
    slot_mappings,
    write_ds_mla,
    write_kv,
    write_latent,
)
from kvplugin.kernels.records import unpack_ds_mla

__all__ = [
    "block_zeroer",
    "slot_mappings",
    "unpack_ds_mla",
    "write_ds_mla",
    "write_kv",
    "write_latent",
]
