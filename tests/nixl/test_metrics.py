"""The table of metrics is one that Prometheus takes."""

import re
from pathlib import Path

from kvplugin.connectors.metrics import Kind
from kvplugin.connectors.nixl.metrics import METRICS

CODE = Path(__file__).parents[2] / "connectors" / "nixl"


def test_names_and_buckets() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"[a-z_]+", metric.name)
        assert metric.help.endswith(".")
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
        assert list(metric.buckets) == sorted(set(metric.buckets))


def test_every_metric_is_counted_somewhere_and_in_its_way() -> None:
    code = "\n".join(path.read_text() for path in CODE.glob("*.py"))
    verbs = {Kind.COUNTER: "add", Kind.GAUGE: "set", Kind.HISTOGRAM: "observe"}
    used = set(re.findall(r"counters\.(add|set|observe)\(\s*\"(\w+)\"", code))
    assert used == {(verbs[metric.kind], metric.name) for metric in METRICS}
