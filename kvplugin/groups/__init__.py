"""Layers -> groups that share a block table -> the KVCacheConfig of each worker.

`get_kv_cache_groups` decides which layers share a block table, and
`get_kv_cache_configs` checks memory and lays out tensors. Every function is pure. After
vLLM 0.19.1 `v1/core/kv_cache_utils.py`, from which the names come.
"""

from kvplugin.groups.capacity import (
    Capacity,
    get_capacity,
    min_blocks_per_request,
    vllm019_token_count,
)
from kvplugin.groups.config import GroupingConfig
from kvplugin.groups.mamba import (
    KERNEL_ALIGNMENT,
    MambaAlignment,
    MambaPages,
    align_mamba_page,
    align_mamba_specs,
)
from kvplugin.groups.memory import (
    auto_fit_max_model_len,
    blocks_per_request,
    bytes_per_block,
    check_enough_memory,
    estimate_max_model_len,
    max_memory_usage_bytes,
    reserved_blocks,
    usable_bytes,
)
from kvplugin.groups.sharing import add_sharing_layers, mark_draft_group
from kvplugin.groups.split import check_groups, get_kv_cache_groups, group_size
from kvplugin.groups.tensors import (
    ResolvedKVCache,
    generate_scheduler_kv_cache_config,
    get_kv_cache_config_from_groups,
    get_kv_cache_configs,
    merge_worker_specs,
    project_groups_to_worker,
)
from kvplugin.groups.unify import (
    is_kv_cache_spec_uniform,
    unify_hybrid_kv_cache_specs,
    unify_kv_cache_spec_page_size,
)

__all__ = [
    "KERNEL_ALIGNMENT",
    "Capacity",
    "GroupingConfig",
    "MambaAlignment",
    "MambaPages",
    "ResolvedKVCache",
    "add_sharing_layers",
    "align_mamba_page",
    "align_mamba_specs",
    "auto_fit_max_model_len",
    "blocks_per_request",
    "bytes_per_block",
    "check_enough_memory",
    "check_groups",
    "estimate_max_model_len",
    "generate_scheduler_kv_cache_config",
    "get_capacity",
    "get_kv_cache_config_from_groups",
    "get_kv_cache_configs",
    "get_kv_cache_groups",
    "group_size",
    "is_kv_cache_spec_uniform",
    "mark_draft_group",
    "max_memory_usage_bytes",
    "merge_worker_specs",
    "min_blocks_per_request",
    "project_groups_to_worker",
    "reserved_blocks",
    "unify_hybrid_kv_cache_specs",
    "unify_kv_cache_spec_page_size",
    "usable_bytes",
    "vllm019_token_count",
]
