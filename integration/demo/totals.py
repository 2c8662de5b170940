"""vLLM's metrics as plain totals, read inside the process that runs the engine."""

from collections import Counter, defaultdict
from typing import Final

SUFFIXES: Final = {"counter": "_total", "histogram": "_sum"}
"""The kinds of metrics that add up, and the sample of each that does."""

SOURCES: Final = {
    "prompt_tokens_by_source[local_compute]": "computed",
    "prompt_tokens_by_source[local_cache_hit]": "local",
    "prompt_tokens_by_source[external_kv_transfer]": "loaded",
}
"""vLLM's own count of prompt tokens by where their KV came from; our words."""


def read_totals() -> dict[str, float]:
    """Counters and sums of histograms since the engine started.

    Names are vLLM's without `vllm:` and the suffix. Those with a label `source` are
    kept apart as `name[source]`; other labels are summed over. (`LLM.get_metrics`
    would cut a counter down to whole numbers, and seconds are not.)
    """
    from prometheus_client import REGISTRY

    totals: defaultdict[str, float] = defaultdict(float)
    for metric in REGISTRY.collect():
        suffix = SUFFIXES.get(metric.type)
        if suffix is None or not metric.name.startswith("vllm:"):
            continue
        name = metric.name.removeprefix("vllm:")
        for sample in metric.samples:
            if sample.name.endswith(suffix):
                source = sample.labels.get("source")
                totals[f"{name}[{source}]" if source else name] += sample.value
    return dict(totals)


def read_sources() -> Counter[str]:
    """Prompt tokens so far: `computed`, found `local`, or `loaded` by a connector."""
    totals = read_totals()
    return Counter({word: int(totals[name]) for name, word in SOURCES.items()})
