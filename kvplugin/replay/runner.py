"""All runs of a replay: the policies that are asked for, and what they are held
against."""

from collections.abc import Mapping
from time import perf_counter
from typing import Final

from kvplugin.errors import ConfigError
from kvplugin.hooks import EvictionPolicyContext, Hooks, get_hooks, hookimpl
from kvplugin.policies.eviction import EvictionPolicy
from kvplugin.policies.eviction.belady import Belady, Future
from kvplugin.replay.cache import ReplayCache
from kvplugin.replay.ceiling import count_seen, room_for_all, room_for_keys
from kvplugin.replay.flat_runs import replay_flat
from kvplugin.replay.groups import ServedGroups, served_groups
from kvplugin.replay.host import HostTier
from kvplugin.replay.policies import refuse_unknown_policies
from kvplugin.replay.requests import make_requests
from kvplugin.replay.result import Counts, ReplayResult, Run, with_runs
from kvplugin.replay.rules import rules_of
from kvplugin.replay.run import Queue, Tick, run_requests
from kvplugin.replay.settings import BELADY, LRU, Progress, ReplaySettings
from kvplugin.replay.trace import Trace

CEILING: Final = "unbounded"

_REPORT_EVERY: Final = 256


class Replay:
    """A trace, ready to be run as often as wanted.

    Args:
        trace: the requests.
        settings: the rules.
        hooks: the plugins to ask; those installed if None.
        progress: told how far it is.

    Raises:
        ConfigError: the rules do not go with the trace.
        PluginError: a plugin fails.
    """

    def __init__(
        self,
        trace: Trace,
        settings: ReplaySettings,
        *,
        hooks: Hooks | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.trace = trace
        self.settings = settings
        self.hooks = get_hooks() if hooks is None else hooks
        self.served = served_groups(trace, settings, self.hooks)
        self.requests = make_requests(
            trace, self.served.hash_block_size, settings.partial
        )
        self._room = room_for_all(self.served, self.requests)
        """Blocks beyond which more change nothing: pools are made no larger."""
        self._progress = progress
        _refuse_host_tier(self.served, settings)
        refuse_unknown_policies(settings, self.hooks)

    @property
    def first_counted(self) -> int:
        """Index of the first request that counts."""
        return int(len(self.requests) * self.settings.warmup)

    def run(self, policy: str, capacity: int) -> Run:
        """One policy at one capacity; ``belady`` knows the trace.

        Raises:
            ConfigError: there is no such policy, or not with these options.
            PluginError: a plugin or the policy fails.
        """
        started = perf_counter()
        if policy == BELADY:
            counts = self._run_belady(capacity)
        else:
            options = self.settings.policy_options.get(policy, {})
            cache = self._cache(policy, capacity, options, self.hooks)
            counts = self._count(cache, f"{policy} {capacity}")
        return Run(policy, capacity, counts, perf_counter() - started)

    def ceiling(self) -> Counts:
        """The cache that never evicts, under the same rules."""
        if self.served.is_attention:
            return count_seen(self.served, self.requests, self.first_counted)
        # States are kept at some boundaries only, so that blocks of other groups are
        # computed again; how many is seen when the first of them evicts another.
        capacity = room_for_keys(self.served, self.requests)
        while True:
            cache = self._cache(LRU, capacity, {}, self.hooks, host=False)
            counts = self._count(cache, CEILING)
            if not cache.evictions or capacity >= self._room:
                return counts
            capacity *= 2

    def _run_belady(self, capacity: int) -> Counts:
        keys_of = self.served.pool_keys
        future = Future([keys_of(request.block_hashes) for request in self.requests])
        cache = self._cache(BELADY, capacity, {}, Hooks.of(_Oracle(future)))
        return self._count(cache, f"{BELADY} {capacity}", future.advance)

    def _cache(
        self,
        policy: str,
        capacity: int,
        options: Mapping[str, object],
        hooks: Hooks,
        *,
        host: bool = True,
    ) -> ReplayCache:
        settings = self.settings
        tier = None
        if host and settings.host_capacity:
            tier = HostTier(
                min(settings.host_capacity, self._room),
                settings.host_policy or LRU,
                self.served.hash_block_size,
                self.hooks,
            )
        return ReplayCache(
            self.served,
            min(capacity, self._room),
            policy,
            options,
            hooks,
            running=settings.running,
            host=tier,
        )

    def _count(self, cache: ReplayCache, what: str, *ticks: Tick) -> Counts:
        all_ticks = list(ticks)
        told = [pool for pool in cache.pools if pool.wants_steps]
        if told:
            queue = Queue(self.served, self.requests, self.settings.lookahead)
            all_ticks.append(lambda i: queue.tell(i, told))
        if self._progress is not None:
            all_ticks.append(self._reporter(what))
        return run_requests(
            cache,
            self.requests,
            block_size=self.served.hash_block_size,
            first_counted=self.first_counted,
            ticks=all_ticks,
        )

    def _reporter(self, what: str) -> Tick:
        progress, total = self._progress, len(self.requests)

        def tick(i: int) -> None:
            if progress is not None and i % _REPORT_EVERY == 0:
                progress(what, i, total)

        return tick


class _Oracle:
    """A plugin whose policy knows the trace."""

    def __init__(self, future: Future) -> None:
        self._future = future

    @hookimpl
    def kvp_register_eviction_policies(self) -> Mapping[str, str]:
        """Its one policy."""
        return {BELADY: "knows what will be wanted"}

    @hookimpl
    def kvp_make_eviction_policy(
        self, ctx: EvictionPolicyContext
    ) -> EvictionPolicy | None:
        """The policy, for the pool that asks by its name."""
        return Belady(self._future) if ctx.name == BELADY else None


def replay(
    trace: Trace,
    settings: ReplaySettings,
    *,
    hooks: Hooks | None = None,
    progress: Progress | None = None,
) -> ReplayResult:
    """Run all policies at all capacities, and what they are held against.

    Args:
        trace: the requests.
        settings: the rules.
        hooks: the plugins to ask; those installed if None.
        progress: told how far it is.

    Raises:
        ConfigError: the rules do not go with the trace, or there is no such policy.
        PluginError: a plugin fails; `RunFailedError`, with the runs before, where a
            policy does.
    """
    if settings.semantics == "flat":
        return replay_flat(trace, settings, hooks=hooks, progress=progress)
    runner = Replay(trace, settings, hooks=hooks, progress=progress)
    result = ReplayResult(
        trace=trace.source,
        format=trace.format,
        block_size=runner.served.hash_block_size,
        rules=rules_of(trace, settings, runner.served, runner.first_counted),
        ceiling=runner.ceiling() if settings.references != "none" else None,
    )
    return with_runs(result, settings, runner.run)


def _refuse_host_tier(served: ServedGroups, settings: ReplaySettings) -> None:
    """A host tier of one dense group only: hits of other groups are no plain prefix.

    Raises:
        ConfigError: it is wanted for other groups.
    """
    if settings.host_capacity and not served.is_dense:
        raise ConfigError(
            f"host_capacity works with models of one full-attention group, and "
            f"{settings.model} has others: leave out host_capacity or model"
        )
