"""Replays where ids are independent keys, to be compared with cache simulators."""

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Final

from kvplugin.errors import PluginError
from kvplugin.hooks import Hooks, get_hooks
from kvplugin.policies.eviction import EvictionPolicy
from kvplugin.policies.eviction.belady import Belady, Future
from kvplugin.replay.flat import FlatResult, flat_keys, run_flat
from kvplugin.replay.policies import make_policy, refuse_unknown_policies
from kvplugin.replay.result import Counts, ReplayResult, Run, with_runs
from kvplugin.replay.settings import BELADY, Progress, References, ReplaySettings
from kvplugin.replay.trace import Trace

_RULES: Final = {
    "hits": "flat: every id is a key of its own, hit whatever is before it",
    "order": "all ids of the file, one after another; nothing stays in use",
    "warm-up": "none",
    "tokens": "not counted",
    "capacity": "usable blocks, one an id",
}
_REFERENCES: Final[Mapping[References, dict[str, str]]] = {
    "all": {"references": "LRU, Belady (optimal here) and the unbounded cache"},
    "lru": {"references": "LRU and the unbounded cache"},
    "none": {},
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
        PluginError: a plugin fails; `RunFailedError`, with the runs before, where a
            policy does.
    """
    known = get_hooks() if hooks is None else hooks
    refuse_unknown_policies(settings, known)
    accesses = [block for entry in trace.entries for block in entry.ids]
    unique = len(set(accesses))
    requests = len(trace.entries)

    def run(policy: str, capacity: int) -> Run:
        started, room = perf_counter(), max(min(capacity, unique), 1)
        if progress is not None:
            progress(f"{policy} {capacity}", 0, requests)
        if policy == BELADY:
            future = Future([[key] for key in flat_keys(accesses)])
            found = run_flat(Belady(future), accesses, room, future.advance)
        else:
            options = settings.policy_options.get(policy, {})
            made = make_policy(known, policy, options, room)
            found = _run_guarded(policy, made, accesses, room)
        kept = min(capacity, unique)
        evictions = found.accesses - found.hits - kept
        counts = _counts(requests, len(accesses), found.hits, evictions)
        return Run(policy, capacity, counts, perf_counter() - started)

    rules = {**_RULES, **_REFERENCES[settings.references]}
    if trace.notes:
        rules["trace"] = "; ".join(trace.notes)
    ceiling = _counts(requests, len(accesses), len(accesses) - unique, 0)
    result = ReplayResult(
        trace=trace.source,
        format=trace.format,
        block_size=trace.block_size,
        rules=rules,
        ceiling=None if settings.references == "none" else ceiling,
    )
    return with_runs(result, settings, run)


def _run_guarded(
    name: str, policy: EvictionPolicy, accesses: Sequence[int | str], capacity: int
) -> FlatResult:
    """Nothing stands between these accesses and a plugin's policy."""
    try:
        return run_flat(policy, accesses, capacity)
    except Exception as error:
        raise PluginError(f"eviction policy {name!r} failed: {error!r}") from error


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
