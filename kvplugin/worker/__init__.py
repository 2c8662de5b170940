"""The worker's side of the KV cache: what block ids mean in memory (torch).

Layers become groups (`collect.py`), groups become memory that each layer sees through
its backend's eyes (`tensors.py`, `backends.py`), requests become rows of blocks
(`batch.py`, `block_table.py`), and a step becomes slots and lengths (`metadata.py`).
"""

from kvplugin.worker.backend_table import BACKENDS
from kvplugin.worker.backends import BackendLayout
from kvplugin.worker.batch import StepBatch, WorkerBatch, WorkerRequest
from kvplugin.worker.block_table import BlockTables
from kvplugin.worker.collect import KVLayer, collect_layers, group_layers
from kvplugin.worker.kernel_blocks import MultipleOf, select_kernel_block_size
from kvplugin.worker.layout_choice import LayoutChoice, LayoutWish, choose_layout
from kvplugin.worker.metadata import (
    BatchMetadata,
    GroupMetadata,
    MetadataBuilder,
    StepMetadata,
)
from kvplugin.worker.tensors import KVTensors, LayerCache, allocate_kv_cache
from kvplugin.worker.zeroing import BlockZeroing

__all__ = [
    "BACKENDS",
    "BackendLayout",
    "BatchMetadata",
    "BlockTables",
    "BlockZeroing",
    "GroupMetadata",
    "KVLayer",
    "KVTensors",
    "LayerCache",
    "LayoutChoice",
    "LayoutWish",
    "MetadataBuilder",
    "MultipleOf",
    "StepBatch",
    "StepMetadata",
    "WorkerBatch",
    "WorkerRequest",
    "allocate_kv_cache",
    "choose_layout",
    "collect_layers",
    "group_layers",
    "select_kernel_block_size",
]
