"""The metrics of P/D: one table drives counting, exposition, docs and tests."""

from typing import Final

from kvplugin.connectors.metrics import Kind, Metric

_SECONDS: Final = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_GIGABYTES_PER_SECOND: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

METRICS: Final = (
    Metric("reads", Kind.COUNTER, "Reads from other engines that succeeded."),
    Metric("read_tokens", Kind.COUNTER, "Tokens whose KV they brought."),
    Metric("read_bytes", Kind.COUNTER, "Bytes that they moved, all ranks."),
    Metric(
        "read_seconds",
        Kind.HISTOGRAM,
        "Seconds of a read on its slowest rank, verification included.",
        _SECONDS,
    ),
    Metric(
        "read_gigabytes_per_second",
        Kind.HISTOGRAM,
        "Bytes of a read on all ranks by these seconds, in 1e9 bytes a second.",
        _GIGABYTES_PER_SECOND,
    ),
    Metric(
        "wait_seconds",
        Kind.HISTOGRAM,
        "Seconds from a request's arrival until its read ended or was not offered.",
        _SECONDS,
    ),
    Metric(
        "failed_reads",
        Kind.COUNTER,
        "Reads whose requests were told that they failed, each counted once.",
    ),
    Metric(
        "discarded_reads",
        Kind.COUNTER,
        "Those of them whose bytes arrived after the producer's lease was over.",
    ),
    Metric(
        "given_up_reads",
        Kind.COUNTER,
        "Those of them that did not end in time, however they end later.",
    ),
    Metric(
        "overdue_blocks",
        Kind.GAUGE,
        "Engine blocks that reads past their deadline keep.",
    ),
    Metric(
        "missed_reads",
        Kind.COUNTER,
        "Requests that were to be read and are computed, for any reason but their "
        "parameters: the peer is dead or refused, the lease is gone, tokens differ.",
    ),
    Metric(
        "invalid_params",
        Kind.COUNTER,
        "Requests whose kv_transfer_params make no sense; the log names the field.",
    ),
    Metric("handshakes", Kind.COUNTER, "Descriptions that other engines gave us."),
    Metric(
        "refused_peers",
        Kind.GAUGE,
        "Engines whose KV cannot be read: another model, layout or protocol.",
    ),
    Metric("dead_peers", Kind.GAUGE, "Engines that did not answer lately."),
    Metric("handovers", Kind.COUNTER, "Requests whose blocks others may read."),
    Metric(
        "empty_handovers",
        Kind.COUNTER,
        "Requests that were to be handed over and had no KV to hand over.",
    ),
    Metric("leases", Kind.GAUGE, "Handed-over requests that still have their blocks."),
    Metric("leased_blocks", Kind.GAUGE, "Engine blocks that they have."),
    Metric(
        "closed_leases",
        Kind.COUNTER,
        "Leases that ended because all who opened them have closed them.",
    ),
    Metric(
        "expired_leases",
        Kind.COUNTER,
        "Leases that ran out: nobody read them, or a reader died.",
    ),
    Metric(
        "revoked_leases",
        Kind.COUNTER,
        "Leases that the engine ended itself: its cache was reset, or a block failed.",
    ),
)
