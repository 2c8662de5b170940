"""Rules of the scheduler and the core, broken on purpose, and runs that notice.

A mutation patches one method or attribute; `watch` passes without it and must fail with
it. Runs are random ones (`test_random_runs.py`), a few seeds each, so that a harmless
change of the order of things does not make a mutation invisible.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from kvplugin.block import NULL_BLOCK
from kvplugin.block_pool import BlockPool
from kvplugin.coordinator import KVCacheCoordinator
from kvplugin.manager import KVCacheManager
from kvplugin.managers.base import SingleTypeKVCacheManager
from kvplugin.managers.mamba import MambaManager
from kvplugin.managers.sliding_window import SlidingWindowManager
from kvplugin.scheduler import Entry, Scheduler, Status, recovery
from kvplugin.scheduler.entry import InFlight
from kvplugin.scheduler.holds import Holds
from kvplugin.scheduler.loads import Load, Loads
from kvplugin.scheduler.recovery import Recovery
from kvplugin.scheduler.roster import Roster
from kvplugin.scheduler.step import StepPlan
from tests.core.manager_setups import full, window
from tests.scheduler.harness import Harness, loaded
from tests.scheduler.test_random_runs import PressedLab, run
from tests.scheduler.test_zeroing import test_blocks_to_zero_are_those_of_requests
from tests.scheduler.two_pools import run_two_pools


@dataclass(frozen=True)
class Mutation:
    """One rule, broken."""

    name: str
    breaks: Callable[[pytest.MonkeyPatch], None]
    watch: Callable[[], object]
    """Passes as things are."""


def seeds(name: str, *, n: int = 8, **how: Any) -> Callable[[], None]:
    """Random runs of one kind."""

    def watch() -> None:
        for seed in range(n):
            run(name, seed, **({"depth": 1, "synchronous": False} | how))

    return watch


def method(owner: Any, name: str, broken: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Breakage by another method."""
    return lambda patch: patch.setattr(owner, name, broken)


def around(owner: type, name: str, broken: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Breakage by a method that gets the right one first."""
    right = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return broken(right, self, *args, **kwargs)

    return lambda patch: patch.setattr(owner, name, method)


def stuck_at(value: Any) -> property:
    """An attribute that keeps one value, whatever is assigned."""
    return property(lambda self: value, lambda self, new: None)


# -- breakages -------------------------------------------------------------------------


def withdraw_keeps_keys(self: Roster, entry: Entry, step: StepPlan) -> None:
    step.withdraw(entry)


def cache_all_of_a_failed_load(self: Recovery, load: Load) -> None:
    roster, request = self._roster, load.entry.request
    roster.manager.cache_blocks(request, request.num_computed_tokens)
    if load.failed_blocks:
        self._do_without(load.entry)
    else:
        roster.load_is_in(load.entry)


def believe_a_failed_load(self: Recovery, load: Load) -> None:
    roster, request = self._roster, load.entry.request
    roster.manager.cache_blocks(request, request.num_computed_tokens)
    roster.load_is_in(load.entry)


def abandon_without_hold(self: Loads, entry: Entry) -> None:
    self._loads[entry.id].abandoned = True


def first_report_ends_it(right: Any, self: Loads, rank: int, request_id: str) -> Any:
    if load := self._loads.get(request_id):
        load.waiting_for &= {rank}
    return right(self, rank, request_id)


def skip_a_block_more(right: Any, self: SlidingWindowManager, computed: int) -> int:
    skipped = right(self, computed)
    return min(skipped + self.block_size, computed) if skipped else 0


def leave_skipped_blocks_in_the_row(
    self: SlidingWindowManager, request_id: str, computed: int
) -> None:
    row = self.req_to_blocks.get(request_id, [])
    self.block_pool.free_blocks(row[: self._num_skipped_blocks(computed)])


def lose_skipped_blocks(
    self: SlidingWindowManager, request_id: str, computed: int
) -> None:
    row = self.req_to_blocks.get(request_id, [])
    skipped = min(self._num_skipped_blocks(computed), len(row))
    row[:skipped] = [NULL_BLOCK] * skipped


def free_without_dropping(self: SingleTypeKVCacheManager, request_id: str) -> None:
    self.num_cached_block.pop(request_id, None)
    self.req_to_blocks.pop(request_id, None)


def free_twice(right: Any, self: SingleTypeKVCacheManager, request_id: str) -> None:
    row = list(self.req_to_blocks.get(request_id, ()))
    right(self, request_id)
    self.block_pool.free_blocks(row)


def spread_not_at_all(bad: Iterable[int], *args: Any) -> set[int]:
    return set(bad)


def cache_drafts_too(
    right: Any, self: KVCacheManager, request: Any, new: int, *args: Any, **kw: Any
) -> Any:
    blocks = right(self, request, new, *args, **kw)
    if blocks is not None and not args:
        self.coordinator.cache_blocks(request, request.num_computed_tokens + new)
    return blocks


def keys_before_bytes(
    right: Any, self: KVCacheManager, *args: Any, **kwargs: Any
) -> Any:
    return right(self, *args, **(kwargs | {"delay_cache_blocks": False}))


def adopt_one_group_after_the_other(
    self: KVCacheCoordinator,
    request_id: str,
    hits: Iterable[Any],
    local: int,
    external: int,
    *_: Any,
) -> None:
    for manager, row in zip(self.single_type_managers, hits, strict=True):
        manager.add_local_computed_blocks(request_id, row, local, external)
        if external:
            manager.allocate_external_computed_blocks(request_id, local + external)


def keep_rejected_drafts(right: Any, self: Entry) -> InFlight:
    return right(self)._replace(drafts=0)


def settle_at_once(self: Entry) -> None:
    self.request.num_in_flight_tokens = 0


def keep_progress(self: Entry) -> None:
    if self.in_flight:
        self.discard_until = self.in_flight[-1].step
    self._count()


def touch_without_pinning(self: BlockPool, ids: Iterable[int]) -> None:
    for block in ids:
        if block:
            self._refs[block] += 1


# -- who must notice -------------------------------------------------------------------


def what_was_computed_on_a_failed_load() -> None:
    """Its first blocks are computed anew by one request, and another goes on from
    there."""
    lab = PressedLab((full(),), 40, synchronous=True, max_num_batched_tokens=40)
    lab.worker.fails.add("r0")
    prompt = [*range(24)]
    lab.add(prompt, 4, remote_tokens=8)
    lab.step()
    lab.scheduler.abort_request("r0")
    lab.add(prompt[:8], 1)
    lab.step()
    lab.add([*prompt, 7, 8], 4)
    lab.drain()


def a_share_that_is_taken_back() -> None:
    """The request that is served first in a step loses its new blocks to another one,
    which needs but one of them."""
    lab = PressedLab((full(),), 13, policy="priority", long_prefill_token_threshold=8)
    lab.add([*range(40)], 1)
    lab.requests["r0"].priority = 9
    lab.step()
    lab.add([*range(100, 124)], 1)
    lab.drain()
    assert lab.requests["r0"].num_preemptions


def a_pool_of_cached_blocks() -> None:
    """Room for external tokens must come of other blocks than the request's hits,
    which are the ones that were used least recently."""
    lab = PressedLab((full(), window(14)), 10)
    for prompt in (range(8), *(range(k, k + 4) for k in (100, 200, 300))):
        lab.add([*prompt], 1)
        lab.step()
    lab.add(range(17), 1, remote_tokens=16)
    lab.drain()


def two_ranks_report() -> None:
    engine = Harness(connects=True, ranks=2)
    engine.add("a", range(20))
    engine.connector.offers["a"] = 16
    engine.step()
    engine.step(loaded("a"), loaded())
    assert engine.scheduler.requests["a"].status is Status.LOADING
    engine.step(loaded(), loaded("a"))
    engine.run()
    assert engine.is_idle()


def two_pools() -> None:
    run_two_pools(40)


MUTATIONS = [
    Mutation(
        "blocks of a step in flight are not held",
        method(Holds, "hold", lambda self, reason, rows: None),
        seeds("full", depth=2),
    ),
    Mutation(
        "an abandoned load's blocks are free at once",
        method(Loads, "abandon", abandon_without_hold),
        seeds("full"),
    ),
    Mutation(
        "the first rank's report ends a load",
        around(Loads, "reported", first_report_ends_it),
        two_ranks_report,
    ),
    Mutation(
        "blocks of a share that was taken back keep their keys",
        method(Roster, "_withdraw", withdraw_keeps_keys),
        a_share_that_is_taken_back,
    ),
    Mutation(
        "all of a failed load is cached",
        method(Recovery, "load_ended", cache_all_of_a_failed_load),
        seeds("full+window"),
    ),
    Mutation(
        "a failed load is believed",
        method(Recovery, "load_ended", believe_a_failed_load),
        seeds("full"),
    ),
    Mutation(
        "parked requests' blocks have keys before their bytes are in",
        around(KVCacheManager, "allocate_slots", keys_before_bytes),
        seeds("full"),
    ),
    Mutation(
        "a failed load is tried again",
        method(Entry, "skips_external", stuck_at(False)),
        seeds("full", synchronous=True),
    ),
    Mutation(
        "only the blocks of a failed load are distrusted",
        method(recovery, "spread", spread_not_at_all),
        what_was_computed_on_a_failed_load,
    ),
    Mutation(
        "outputs of steps that a request did not survive count",
        method(Entry, "discard_until", stuck_at(0)),
        seeds("full", synchronous=True),
    ),
    Mutation(
        "a preempted request keeps its count of computed tokens",
        method(Entry, "lose_progress", keep_progress),
        seeds("full"),
    ),
    Mutation(
        "windows give back what is not settled",
        method(Entry, "_count", settle_at_once),
        seeds("full+window", depth=2),
    ),
    Mutation(
        "rejected drafts stay computed",
        around(Entry, "land", keep_rejected_drafts),
        seeds("full", drafts=2),
    ),
    Mutation(
        "drafts are cached",
        around(KVCacheManager, "allocate_slots", cache_drafts_too),
        seeds("full", drafts=2),
    ),
    Mutation(
        "a window gives back one block too many",
        around(SlidingWindowManager, "get_num_skipped_tokens", skip_a_block_more),
        seeds("window"),
    ),
    Mutation(
        "a window gives back one block too many, in front of a host",
        around(SlidingWindowManager, "get_num_skipped_tokens", skip_a_block_more),
        two_pools,
    ),
    Mutation(
        "blocks that a window gave back stay in the row, to be freed again",
        method(
            SlidingWindowManager,
            "remove_skipped_blocks",
            leave_skipped_blocks_in_the_row,
        ),
        two_pools,
    ),
    Mutation(
        "blocks that left a window are not given back",
        method(SlidingWindowManager, "remove_skipped_blocks", lose_skipped_blocks),
        two_pools,
    ),
    Mutation(
        "a state is copied in the step that computes it",
        method(MambaManager, "get_num_blocks_to_allocate", MambaManager._count),
        seeds("full+states"),
    ),
    Mutation(
        "room for external tokens is found before later groups' hits are in use",
        method(
            KVCacheCoordinator,
            "allocate_new_computed_blocks",
            adopt_one_group_after_the_other,
        ),
        a_pool_of_cached_blocks,
    ),
    Mutation(
        "freed blocks keep their references",
        method(SingleTypeKVCacheManager, "free", free_without_dropping),
        seeds("full"),
    ),
    Mutation(
        "freed blocks lose two references",
        around(SingleTypeKVCacheManager, "free", free_twice),
        seeds("full"),
    ),
    Mutation(
        "adopted blocks stay evictable",
        method(BlockPool, "touch", touch_without_pinning),
        seeds("full"),
    ),
    Mutation(
        "evicted blocks keep their keys",
        method(BlockPool, "_drop_keys", lambda self, ids: None),
        seeds("full"),
    ),
    Mutation(
        "blocks of a share that was taken back are zeroed all the same",
        method(StepPlan, "took_back", stuck_at(False)),
        partial(test_blocks_to_zero_are_those_of_requests, 1),
    ),
    Mutation(
        "the last ends are told to nobody",
        method(Scheduler, "has_work", lambda self: bool(self.requests)),
        seeds("full"),
    ),
]
