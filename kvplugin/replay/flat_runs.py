"""Replays where ids are independent keys, to be compared with cache simulators."""

from time import perf_counter
from typing import Final

from kvplugin.hooks import Hooks, get_hooks
from kvplugin.policies.eviction.belady import Belady, Future
from kvplugin.replay.flat import flat_keys, run_flat
from kvplugin.replay.policies import make_policy, refuse_unknown_policies
from kvplugin.replay.result import Counts, ReplayResult, Run, all_runs
from kvplugin.replay.settings import BELADY, Progress, ReplaySettings
from kvplugin.replay.trace import Trace

_RULES: Final = {
    "hits": "flat: every id is a key of its own, hit whatever is before it",
    "order": "all ids of the file, one after another; nothing stays in use",
    "warm-up": "none",
    "references": "LRU, Belady (optimal here) and the unbounded cache",
}


def replay_flat(
    trace: Trace,
    settings: ReplaySettings,
    *,
    hooks: Hooks | None = None,
    progress: Progress | None = None,
) -> ReplayResult:
    """`kvplugin.replay.replay` with independent keys; tokens are not counted.

    Raises:
        ConfigError: there is no such policy, or not with these options.
        PluginError: a plugin fails.
    """
    known = get_hooks() if hooks is None else hooks
    refuse_unknown_policies(settings, known)
    accesses = [block for entry in trace.entries for block in entry.ids]
    unique = len(set(accesses))
    requests = len(trace.entries)

    def run(policy: str, capacity: int) -> Run:
        started = perf_counter()
        if progress is not None:
            progress(f"{policy} {capacity}", 0, requests)
        if policy == BELADY:
            future = Future([[key] for key in flat_keys(accesses)])
            found = run_flat(Belady(future), accesses, capacity, future.advance)
        else:
            options = settings.policy_options.get(policy, {})
            made = make_policy(known, policy, options, capacity)
            found = run_flat(made, accesses, capacity)
        kept = min(capacity, unique)
        evictions = found.accesses - found.hits - kept
        counts = _counts(requests, len(accesses), found.hits, evictions)
        return Run(policy, capacity, counts, perf_counter() - started)

    hits = len(accesses) - unique
    return ReplayResult(
        trace=trace.source,
        format=trace.format,
        block_size=trace.block_size,
        rules={**_RULES, **({"trace": "; ".join(trace.notes)} if trace.notes else {})},
        ceiling=(
            _counts(requests, len(accesses), hits, 0) if settings.references else None
        ),
        runs=all_runs(settings, run),
    )


def _counts(requests: int, accesses: int, hits: int, evictions: int) -> Counts:
    return Counts(
        requests=requests,
        skipped=0,
        blocks=accesses,
        device_blocks=hits,
        host_blocks=0,
        tokens=0,
        device_tokens=0,
        host_tokens=0,
        evictions=evictions,
    )
