"""What the core uses of the objects that plugins make, by name.

`tests/core/test_hooks_needs.py` compares these lists with the code of the core.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Needs:
    """Names that an object must have."""

    methods: tuple[str, ...]
    attributes: tuple[str, ...] = ()


EVICTION_POLICY: Final = Needs(
    (
        "bind",
        "insert",
        "hit",
        "pin",
        "release",
        "forget",
        "victims",
        "step",
        "order",
        "check",
        "__len__",
    )
)
OFFLOAD_POLICY: Final = Needs(("admit",))
BLOCK_POOL: Final = Needs(
    (
        "get_num_free_blocks",
        "get_new_blocks",
        "touch",
        "adopt",
        "free_blocks",
        "evict_blocks",
        "reserve",
        "cache_run",
        "cached_blocks",
        "get_cached_block",
        "num_evictable",
        "ref_count",
        "key_of",
        "block",
        "get_usage",
        "reset_prefix_cache",
        "report",
        "take_events",
        "step",
        "check",
    ),
    (
        "num_blocks",
        "num_usable_blocks",
        "num_keyed_blocks",
        "reserved_blocks",
        "events_enabled",
        "medium",
        "wants_steps",
        "wants_demand",
        "listener",
    ),
)
COORDINATOR: Final = Needs(
    (
        "find_longest_cache_hit",
        "get_num_blocks_to_allocate",
        "allocate_new_computed_blocks",
        "allocate_new_blocks",
        "cache_blocks",
        "rewind",
        "remove_skipped_blocks",
        "quiet_until",
        "free",
        "get_blocks",
        "get_num_common_prefix_blocks",
        "new_step_starts",
        "check",
    ),
    ("single_type_managers", "parity", "use_eagle"),
)
MANAGER: Final = Needs(
    (
        "find_longest_cache_hit",
        "coarse_hashes",
        "get_num_blocks_to_allocate",
        "get_num_skipped_tokens",
        "quiet_until",
        "add_local_computed_blocks",
        "allocate_external_computed_blocks",
        "allocate_new_blocks",
        "cache_blocks",
        "rewind",
        "remove_skipped_blocks",
        "free",
        "get_num_common_prefix_blocks",
        "new_step_starts",
        "take_new_block_ids",
        "check",
    ),
    (
        "kind",
        "block_pool",
        "block_size",
        "kv_cache_spec",
        "kv_cache_group_id",
        "settings",
        "hits_are_downward_closed",
        "sized_by_encoder_tokens",
        "req_to_blocks",
        "num_cached_block",
    ),
)
KV_CACHE_GROUP: Final = Needs(
    (), ("layer_names", "kv_cache_spec", "kv_sharing_targets")
)
