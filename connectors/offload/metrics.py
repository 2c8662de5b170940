"""The metrics of offload: one table drives counting, exposition, docs and tests."""

from typing import Final

from kvplugin.connectors.metrics import Kind, Metric

_COPY_SECONDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_PREFILL_SECONDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)

METRICS: Final = (
    Metric("stored_blocks", Kind.COUNTER, "Engine blocks copied to host memory."),
    Metric("stored_bytes", Kind.COUNTER, "Bytes copied to host memory, all ranks."),
    Metric(
        "store_seconds",
        Kind.HISTOGRAM,
        "Seconds of copying to host memory, a store, summed over ranks.",
        _COPY_SECONDS,
    ),
    Metric("failed_stores", Kind.COUNTER, "Stores that failed; nothing of them kept."),
    Metric("skipped_blocks", Kind.COUNTER, "Blocks not stored: host memory in use."),
    Metric("refused_blocks", Kind.COUNTER, "Blocks that the offload policy refused."),
    Metric("lookups", Kind.COUNTER, "Admissions of requests that asked for a hit."),
    Metric("hits", Kind.COUNTER, "Those for which a load began."),
    Metric("hit_tokens", Kind.COUNTER, "Tokens of these loads, whatever came of them."),
    Metric("loaded_blocks", Kind.COUNTER, "Engine blocks filled from host memory."),
    Metric("loaded_tokens", Kind.COUNTER, "Tokens whose KV came from host memory."),
    Metric("loaded_bytes", Kind.COUNTER, "Bytes loaded from host memory, all ranks."),
    Metric(
        "load_seconds",
        Kind.HISTOGRAM,
        "Seconds a request waited for its load.",
        _COPY_SECONDS,
    ),
    Metric(
        "failed_loads",
        Kind.COUNTER,
        "Loads whose requests were told that they failed, each counted once.",
    ),
    Metric(
        "given_up_loads",
        Kind.COUNTER,
        "Those of them that did not end in time, however they end later.",
    ),
    Metric(
        "recompute_seconds_saved",
        Kind.HISTOGRAM,
        "Estimated seconds that computing a load's tokens would have taken.",
        _PREFILL_SECONDS,
    ),
    Metric("evicted_blocks", Kind.COUNTER, "Engine blocks evicted from host memory."),
    Metric("host_blocks", Kind.GAUGE, "Engine blocks that host memory can hold."),
    Metric("host_blocks_stored", Kind.GAUGE, "Engine blocks in host memory."),
    Metric("pending_jobs", Kind.GAUGE, "Stores and loads under way."),
    Metric(
        "overdue_blocks",
        Kind.GAUGE,
        "Engine blocks that transfers past their deadline keep.",
    ),
    Metric(
        "policy_failures",
        Kind.GAUGE,
        "Eviction and offload policies that failed and were replaced.",
    ),
)
