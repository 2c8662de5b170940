"""One run: a policy at a capacity, over all requests of a trace in their order."""

from collections.abc import Callable, Iterable, Sequence

from kvplugin.block_pool import BlockPool
from kvplugin.demand import Demand
from kvplugin.replay.cache import ReplayCache, Served
from kvplugin.replay.groups import ServedGroups
from kvplugin.replay.requests import TraceRequest
from kvplugin.replay.result import Counts

Tick = Callable[[int], None]
"""Told the index of the request that begins."""


def run_requests(
    cache: ReplayCache,
    requests: Sequence[TraceRequest],
    *,
    block_size: int,
    first_counted: int = 0,
    ticks: Sequence[Tick] = (),
) -> Counts:
    """Serve all requests and count hits of those from `first_counted` on.

    Raises:
        PluginError: the policy failed.
    """
    tally = Tally(block_size)
    evictions = 0
    for i, request in enumerate(requests):
        if i == first_counted:
            evictions = cache.evictions
        for tick in ticks:
            tick(i)
        served = cache.serve(request)
        cache.check_policies()
        if i >= first_counted:
            tally.add(request, served)
    cache.check()
    return tally.counts(cache.evictions - evictions)


class Tally:
    """Adds up what requests found.

    Args:
        block_size: tokens of a block.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._requests = self._skipped = 0
        self._blocks = self._device = self._host = 0
        self._tokens = self._device_tokens = self._hit_tokens = 0

    def add(self, request: TraceRequest, served: Served | None) -> None:
        """A request ran, or did not fit (None)."""
        self._requests += 1
        self._blocks += request.lookup_blocks
        self._tokens += request.prompt_tokens
        if served is None:
            self._skipped += 1
            return
        device, host = served
        if device + host:
            size = self._size
            self._device += device
            self._host += host
            self._device_tokens += request.tokens_of(device, size)
            self._hit_tokens += request.tokens_of(device + host, size)

    def counts(self, evictions: int) -> Counts:
        """The sums."""
        return Counts(
            requests=self._requests,
            skipped=self._skipped,
            blocks=self._blocks,
            device_blocks=self._device,
            host_blocks=self._host,
            tokens=self._tokens,
            device_tokens=self._device_tokens,
            host_tokens=self._hit_tokens - self._device_tokens,
            evictions=evictions,
        )


class Queue:
    """What an engine would tell its pool of each step: the clock, and how what waiting
    requests want has changed. A request leaves the queue as it begins.

    Args:
        served: the groups, which say under which keys blocks lie.
        requests: all requests.
        lookahead: how many of them wait.
    """

    def __init__(
        self, served: ServedGroups, requests: Sequence[TraceRequest], lookahead: int
    ) -> None:
        self._requests = requests
        self._lookahead = lookahead
        self._now = 0.0
        self._arrived = 0
        self._demand = Demand(served.wanted_keys)

    def advance(self, i: int) -> tuple[float, list[bytes], dict[bytes, int]]:
        """Request `i` begins.

        Returns:
            Arguments of `EvictionPolicy.step`.
        """
        requests, until = self._requests, i + 1 + self._lookahead
        self._now = max(self._now, requests[i].arrival_time)
        self._demand.remove(requests[i])
        for request in requests[max(self._arrived, i + 1) : until]:
            self._demand.add(request)
        self._arrived = max(self._arrived, until)
        return (self._now, *self._demand.take())

    def tell(self, i: int, pools: Iterable[BlockPool]) -> None:
        """Tell these pools that request `i` begins."""
        step = self.advance(i)
        for pool in pools:
            pool.step(*step)
