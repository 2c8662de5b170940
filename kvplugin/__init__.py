"""kvplugin: a KV cache that vLLM-style LLM engines can steer.

This package is the core: pure Python that imports neither torch nor an engine.
`kvplugin.kernels`, `kvplugin.connectors` and `kvplugin.integration` are the layers
above it.
"""

from kvplugin.block_pool import NULL_BLOCK, BlockPool
from kvplugin.errors import (
    CapacityError,
    ConfigError,
    IntegrityError,
    KVPluginError,
    LayoutMismatchError,
    PluginError,
    TransferError,
)
from kvplugin.hooks import hookimpl

__all__ = [
    "NULL_BLOCK",
    "BlockPool",
    "CapacityError",
    "ConfigError",
    "IntegrityError",
    "KVPluginError",
    "LayoutMismatchError",
    "PluginError",
    "TransferError",
    "hookimpl",
]
