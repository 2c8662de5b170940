"""What a cache that never evicts hits, and how much room one needs."""

from collections.abc import Sequence
from math import lcm

from kvplugin.replay.cache import Served
from kvplugin.replay.groups import ServedGroups
from kvplugin.replay.requests import TraceRequest
from kvplugin.replay.result import Counts
from kvplugin.replay.run import Tally


def count_seen(
    served: ServedGroups, requests: Sequence[TraceRequest], first_counted: int
) -> Counts:
    """Hits of the unbounded cache where all groups are attention, without a pool.

    Whoever computes a block gives it a key in every group, so a prompt hits the longest
    prefix that came up before, in whole blocks of all groups.
    """
    size = served.hash_block_size
    unit = lcm(*served.block_sizes) // size
    tally = Tally(size)
    seen: set[bytes] = set()
    for i, request in enumerate(requests):
        hashes, hits = request.block_hashes, 0
        while hits < request.lookup_blocks and hashes[hits] in seen:
            hits += 1
        if i >= first_counted:
            tally.add(request, Served(hits // unit * unit, 0))
        seen.update(hashes)
    return tally.counts(evictions=0)


def room_for_keys(served: ServedGroups, requests: Sequence[TraceRequest]) -> int:
    """Blocks that suffice for never evicting a key, if prompts hit all they can.

    A block of an answer is not looked up: where an equal one is cached, there are two.
    """
    blocks = 0
    for size in served.block_sizes:
        step = size // served.hash_block_size
        seen: set[bytes] = set()
        twice = 0
        for request in requests:
            names = request.block_hashes[step - 1 :: step]
            twice += sum(map(seen.__contains__, names[request.lookup_blocks // step :]))
            seen.update(names)
        blocks += len(seen) + twice
    largest = max(len(request.block_hashes) for request in requests)
    return max(blocks + (0 if served.is_dense else served.most_blocks(largest)), 1)


def room_for_all(served: ServedGroups, requests: Sequence[TraceRequest]) -> int:
    """Blocks that suffice for never evicting a key, whatever is hit: more change
    nothing."""
    if served.is_dense:
        return room_for_keys(served, requests)
    return sum(served.most_blocks(len(request.block_hashes)) for request in requests)
