"""Rules of offload for several groups, broken on purpose, and runs that notice.

As `tests/scheduler/mutations.py`: `watch` passes as things are, and must fail with the
breakage.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from msgspec import structs

from kvplugin.connectors.coverage import Recent
from kvplugin.connectors.load_book import LoadBook
from kvplugin.connectors.offload import stores
from kvplugin.connectors.offload.admissions import Admission
from kvplugin.connectors.offload.boundary import Boundaries
from kvplugin.connectors.offload.chunks import Chunking
from kvplugin.connectors.offload.holding import Holding
from kvplugin.connectors.offload.host_tier import HostTier
from kvplugin.connectors.offload.jobs import Job, LoadJob
from kvplugin.connectors.offload.leavings import left_by
from kvplugin.connectors.offload.messages import Completion
from kvplugin.connectors.offload.scheduler import OffloadScheduler
from kvplugin.request import Request
from tests.core.manager_setups import FORMAT
from tests.offload import test_hybrid_boundaries as boundaries
from tests.offload import test_hybrid_deadlines as deadlines
from tests.offload import test_hybrid_hits as hits
from tests.offload import test_hybrid_scenarios as scenarios
from tests.offload import test_store_room as room
from tests.offload.hybrid_lab import HybridLab
from tests.offload.hybrid_mixes import MIXES
from tests.scheduler.mutations import Mutation, around, method

# -- breakages -------------------------------------------------------------------------


def a_block_later(right: Any, self: Recent, local: int, boundary: int) -> int:
    first: int = right(self, local, boundary)
    return min(first + 1, boundary // self.block_size)


def a_block_earlier(right: Any, self: Recent, local: int, boundary: int) -> int:
    return max(int(right(self, local, boundary)) - 1, local // self.block_size)


def states_too_new(
    step: Any, admission: Admission, cut: Chunking, end: int
) -> dict[int, int]:
    found = left_by(step, admission, cut, end)
    return {max(number - 1, 0): block for number, block in found.items()}


def nulls_too(
    step: Any, admission: Admission, cut: Chunking, end: int
) -> dict[int, int]:
    found = left_by(step, admission, cut, end)
    return {n: admission.block(cut, n) for n in range(end // cut.tokens)} | found


def dense_groups_alone(right: Any, self: Boundaries, cuts: Sequence[Any]) -> None:
    right(self, cuts)
    self._sparse = []


def the_end_is_told_at_once(right: Any, self: LoadBook, order: Any) -> None:
    right(self, order)
    self._end(self._loads[order.id], Completion(order.id, "", 0, 0.0))


def the_deadline_lets_go(right: Any, self: OffloadScheduler) -> list[int]:
    given_up: list[int] = right(self)
    for job in self._jobs.of_kind(LoadJob):
        if job.order.id in given_up:
            self._stores.engine_blocks().release(job.engine_ids[::-1])
            self._jobs.overdue_blocks -= len(job.engine_ids)
            job.order = structs.replace(job.order, parts=[])
    return given_up


def keys_of_tokens_alone(right: Any, self: Chunking, request: Any, number: int) -> Any:
    tokens = getattr(request, "_request", request).all_token_ids
    size = self.hash_block_size
    twin = Request("twin", tokens, hash_format=FORMAT, hash_block_size=size)
    return right(self, twin, number)


def tails_give_way(
    self: Holding, ends: Sequence[int], group: int, slots: Sequence[int], needed: range
) -> None:
    self._tier.release(group, slots)


def forget_what_is_readable(self: HostTier) -> None:
    for pool in self._pools:
        pool.evict_blocks(range(1, pool.num_blocks))


def one_rank_is_enough(right: Any, self: Job, done: Any) -> None:
    self.ranks.clear()
    right(self, done)


# -- who must notice -------------------------------------------------------------------


def a_local_hit_of_what_host_memory_has_lost(name: str) -> None:
    """The row of the request begins with null blocks, and all is to be stored."""
    lab = HybridLab(MIXES[name])
    lab.serve(scenarios.DOCUMENT)
    lab.half.reset()
    lab.serve([*scenarios.DOCUMENT, *scenarios.TAIL], 2)
    lab.drain()


MUTATIONS = [
    Mutation(
        "a window begins a block too late",
        around(Recent, "first", a_block_later),
        partial(boundaries.test_known_models_find_some, "full+window"),
    ),
    Mutation(
        "a window begins a block too early",
        around(Recent, "first", a_block_earlier),
        partial(boundaries.test_known_models_find_some, "full+window"),
    ),
    Mutation(
        "a state is kept as the one a block before",
        method(stores, "left_by", states_too_new),
        partial(hits.test_what_was_offered_is_loaded_and_right, "full+states"),
    ),
    Mutation(
        "null blocks are stored",
        method(stores, "left_by", nulls_too),
        partial(a_local_hit_of_what_host_memory_has_lost, "full+window"),
    ),
    Mutation(
        "null blocks are stored as states",
        method(stores, "left_by", nulls_too),
        partial(a_local_hit_of_what_host_memory_has_lost, "full+aligned states"),
    ),
    Mutation(
        "what is missing of windows and states does not matter",
        around(Boundaries, "__init__", dense_groups_alone),
        partial(
            hits.test_a_document_is_offered_as_far_as_every_group_can_go_on,
            "full+aligned states",
        ),
    ),
    Mutation(
        "a load is said to have ended when it begins",
        around(LoadBook, "begin", the_end_is_told_at_once),
        partial(deadlines.test_a_request_computes_what_does_not_come, "full+window", 1),
    ),
    Mutation(
        "blocks of an overdue load are free at the deadline",
        around(OffloadScheduler, "_overdue", the_deadline_lets_go),
        partial(deadlines.test_a_request_computes_what_does_not_come, "full+window", 1),
    ),
    Mutation(
        "the first rank's report ends a job",
        around(Job, "count", one_rank_is_enough),
        partial(deadlines.test_a_request_computes_what_does_not_come, "full+window", 2),
    ),
    Mutation(
        "adapters and tenants share what they store",
        around(Chunking, "key", keys_of_tokens_alone),
        partial(
            scenarios.test_nothing_of_another_adapter_or_tenant_is_found,
            {"cache_salt": "a"},
        ),
    ),
    Mutation(
        "windows give way to the dense blocks that need them",
        method(Holding, "take_tail", tails_give_way),
        partial(room.test_a_window_gets_its_share_of_what_is_too_small, 150, 2, 90),
    ),
    Mutation(
        "stores under way survive a reset",
        method(HostTier, "clear", forget_what_is_readable),
        partial(scenarios.test_a_store_that_ends_after_a_reset_is_not_kept, "full"),
    ),
]
