"""The worker's side of the KV cache: what block ids mean in memory (torch).

Layers become groups (`collect.py`), groups become memory that each layer sees through
its backend's eyes (`tensors.py`, `backends.py`), requests become rows of blocks
(`batch.py`, `block_table.py`), and a step becomes slots and lengths (`metadata.py`).
"""

from kvplugin.worker.backend_table import BACKENDS, find_backend
from kvplugin.worker.backends import LAYOUTS, BackendLayout, canonical_layout
from kvplugin.worker.batch import StepBatch, WorkerBatch, WorkerRequest
from kvplugin.worker.block_table import BlockTables
from kvplugin.worker.collect import KVLayer, collect_layers, group_layers
from kvplugin.worker.context_parallel import ContextParallel
from kvplugin.worker.describe import (
    describe_cache,
    describe_caches,
    describe_tensor,
    kv_layout,
    plan_rows,
    recognise,
    regions,
)
from kvplugin.worker.drafts import (
    DraftTokens,
    NextDrafts,
    draft_tokens,
    group_queries,
    next_drafts,
    num_rejected_tokens,
    pad_queries,
    ungroup_queries,
    unpad_queries,
)
from kvplugin.worker.kernel_blocks import MultipleOf, select_kernel_block_size
from kvplugin.worker.layout_choice import (
    Decider,
    LayoutChoice,
    LayoutWish,
    choose_layout,
)
from kvplugin.worker.metadata import (
    BatchMetadata,
    GroupMetadata,
    MetadataBuilder,
    StepMetadata,
)
from kvplugin.worker.table_shape import TableShape, table_shape
from kvplugin.worker.tensors import KVTensors, LayerCache, allocate_kv_cache
from kvplugin.worker.views import AttentionPlan
from kvplugin.worker.zeroing import BlockZeroing

__all__ = [
    "BACKENDS",
    "LAYOUTS",
    "AttentionPlan",
    "BackendLayout",
    "BatchMetadata",
    "BlockTables",
    "BlockZeroing",
    "ContextParallel",
    "Decider",
    "DraftTokens",
    "GroupMetadata",
    "KVLayer",
    "KVTensors",
    "LayerCache",
    "LayoutChoice",
    "LayoutWish",
    "MetadataBuilder",
    "MultipleOf",
    "NextDrafts",
    "StepBatch",
    "StepMetadata",
    "TableShape",
    "WorkerBatch",
    "WorkerRequest",
    "allocate_kv_cache",
    "canonical_layout",
    "choose_layout",
    "collect_layers",
    "describe_cache",
    "describe_caches",
    "describe_tensor",
    "draft_tokens",
    "find_backend",
    "group_layers",
    "group_queries",
    "kv_layout",
    "next_drafts",
    "num_rejected_tokens",
    "pad_queries",
    "plan_rows",
    "recognise",
    "regions",
    "select_kernel_block_size",
    "table_shape",
    "ungroup_queries",
    "unpad_queries",
]
