"""Metrics of connectors: definitions in tables, numbers in `Counters`."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from kvplugin.contract import Stats


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric by its name without the engine's prefix."""

    name: str
    kind: Kind
    help: str
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, in the metric's unit."""


class Counters:
    """Numbers since the last `take`; only names of the table exist."""

    def __init__(self, table: Iterable[Metric]) -> None:
        self._kinds = {metric.name: metric.kind for metric in table}
        self._counters: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._observations: dict[str, list[float]] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Count up.

        Raises:
            KeyError: the table has no such counter.
        """
        self._require(name, Kind.COUNTER)
        self._counters[name] = self._counters.get(name, 0) + amount

    def set(self, name: str, value: float) -> None:
        """The present value of a gauge.

        Raises:
            KeyError: the table has no such gauge.
        """
        self._require(name, Kind.GAUGE)
        self._gauges[name] = value

    def observe(self, name: str, value: float) -> None:
        """One more value of a histogram.

        Raises:
            KeyError: the table has no such histogram.
        """
        self._require(name, Kind.HISTOGRAM)
        self._observations.setdefault(name, []).append(value)

    def take(self) -> Stats | None:
        """What changed since the last call, None if nothing did."""
        stats = Stats(self._counters, self._gauges, self._observations)
        if not stats:
            return None
        self._counters, self._gauges, self._observations = {}, {}, {}
        return stats

    def _require(self, name: str, kind: Kind) -> None:
        if self._kinds[name] is not kind:
            raise KeyError(f"{name} is not a {kind}")
