"""A connector's counters on vLLM's own metric endpoint and in its log line."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Final

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvplugin.connectors.metrics import Kind, Metric
from kvplugin.contract import Stats

_FAMILIES: Final = {
    Kind.COUNTER: Counter,
    Kind.GAUGE: Gauge,
    Kind.HISTOGRAM: Histogram,
}

_registered: dict[str, Any] = {}
"""Families of this process by name."""


class VllmStats(KVConnectorStats):
    """One interval's changes; travels from the engine to the front end as `data`,
    a dict with the fields of `kvplugin.contract.Stats`."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or asdict(Stats()))

    def reset(self) -> None:
        self.data: dict[str, Any] = asdict(Stats())

    def aggregate(self, other: KVConnectorStats) -> "VllmStats":
        counters, observations = self.data["counters"], self.data["observations"]
        for name, value in other.data["counters"].items():
            counters[name] = counters.get(name, 0) + value
        for name, values in other.data["observations"].items():
            observations[name] = [*observations.get(name, ()), *values]
        self.data["gauges"].update(other.data["gauges"])
        return self

    def reduce(self) -> dict[str, int | float]:
        sums = {name: sum(v) for name, v in self.data["observations"].items()}
        merged = {**self.data["counters"], **sums, **self.data["gauges"]}
        return {name: round(value, 3) for name, value in merged.items()}

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def __getitem__(self, name: str) -> Any:
        """A field, as on the wire: 0.19's MultiConnector reads it so even where the
        engine is in the same process."""
        return getattr(self, name)


class VllmPromMetrics(KVConnectorPromMetrics):
    """Registers a table of metrics and feeds it.

    `table` and `prefix` are set by the subclass of each connector.
    """

    table: ClassVar[Sequence[Metric]]
    prefix: ClassVar[str]

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            metric.name: self._per_engine(metric, metric_types) for metric in self.table
        }

    def _per_engine(self, metric: Metric, metric_types: dict[Any, Any]) -> Any:
        options: dict[str, Any] = {}
        if metric.kind is Kind.GAUGE:
            options["multiprocess_mode"] = "mostrecent"
        elif metric.kind is Kind.HISTOGRAM:
            options["buckets"] = metric.buckets
        name = f"{self.prefix}{metric.name}"
        try:
            family = metric_types[_FAMILIES[metric.kind]](
                name=name,
                documentation=metric.help,
                labelnames=self._labelnames,
                **options,
            )
        except ValueError:
            # 0.19's MultiConnector asks once for each connector, also for two of one
            # class: it tells their numbers under the name of the class.
            if name not in _registered:
                raise
            family = _registered[name]
        _registered[name] = family
        return {
            engine: family.labels(*values)
            for engine, values in self.per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, amount in transfer_stats_data["counters"].items():
            self._metrics[name][engine_idx].inc(amount)
        for name, value in transfer_stats_data["gauges"].items():
            self._metrics[name][engine_idx].set(value)
        for name, values in transfer_stats_data["observations"].items():
            for value in values:
                self._metrics[name][engine_idx].observe(value)
