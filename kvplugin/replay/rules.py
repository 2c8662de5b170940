"""The rules of a replay in words: a hit rate says nothing without them."""

from collections import Counter
from typing import Final

from kvplugin.replay.groups import STEP_TOKENS, ServedGroups
from kvplugin.replay.settings import LRU, Partial, References, ReplaySettings
from kvplugin.replay.trace import Trace

_HITS: Final = (
    "prefix-chained: a block hits only behind hits; all blocks of a prompt may hit"
)
_PARTIAL: Final[dict[Partial, str]] = {
    "count": "the partial block at the end of a prompt is a block like any other",
    "drop": "the partial block at the end of a prompt is no block",
}
_REFERENCES: Final[dict[References, str]] = {
    "all": "LRU, Belady block by block with the trace known (a reference, not a "
    "bound) and the unbounded cache, under the same rules",
    "lru": "LRU and the unbounded cache, under the same rules",
}


def rules_of(
    trace: Trace, settings: ReplaySettings, served: ServedGroups, first_counted: int
) -> dict[str, str]:
    """Subject -> rule, for one trace and its settings."""
    rules = {
        "requests": f"{len(trace.entries)} in the trace's order, one after another",
        "warm-up": f"the first {first_counted} requests run and are not counted",
        "blocks": _blocks(trace, served),
        "hits": _HITS,
        "partial blocks": _partial(trace, settings),
        "answers": _answers(trace),
        "life": _life(settings),
        "capacity": "usable blocks, the null block not among them",
        "too long": "a request that does not fit alone, into an empty pool, is skipped "
        "and counts as missed",
    }
    if settings.model is not None:
        rules["model"] = _model(settings, served)
    if settings.lookahead:
        rules["queue"] = f"the next {settings.lookahead} requests are known to policies"
    if settings.host_capacity:
        policy = settings.host_policy or LRU
        rules["host tier"] = (
            f"{settings.host_capacity} blocks, {policy}; what a request computed is "
            f"stored after it ran, hits go on where the device's end"
        )
    if settings.references != "none":
        rules["references"] = _REFERENCES[settings.references]
    if trace.notes:
        rules["trace"] = "; ".join(trace.notes)
    return rules


def _blocks(trace: Trace, served: ServedGroups) -> str:
    size = served.hash_block_size
    if size == trace.block_size:
        return f"{size} tokens, the trace's ids"
    return f"{size} tokens, {trace.block_size // size} of each id of the trace"


def _partial(trace: Trace, settings: ReplaySettings) -> str:
    if trace.full_blocks_only:
        return "the trace names full blocks only"
    return _PARTIAL[settings.partial]


def _answers(trace: Trace) -> str:
    if trace.full_blocks_only:
        return "blocks that an answer fills are cached with the prompt's, as named"
    return "tokens of answers take no blocks: the trace does not name them"


def _life(settings: ReplaySettings) -> str:
    kept = "at once" if not settings.running else f"{settings.running} requests later"
    return (
        f"lookup, allocation, keys; blocks are freed {kept}, the tail first"
        + (", or earlier if a request needs them" if settings.running else "")
    )  # fmt: skip


def _model(settings: ReplaySettings, served: ServedGroups) -> str:
    groups = Counter(
        f"{type(group.kv_cache_spec).__name__} of {len(group.layer_names)} layers, "
        f"{group.kv_cache_spec.block_size} tokens a block"
        for group in served.groups
    )
    kinds = "; ".join(f"{count} x {kind}" for kind, count in groups.items())
    steps = "" if served.is_dense else f"; prefill in steps of {STEP_TOKENS} tokens"
    return f"{settings.model} ({kinds}) in one pool{steps}"
