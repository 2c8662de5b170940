"""A pool of window and full blocks before a smaller one, the host's, in any order of
events, and the sums that must hold after each of them.

The host keeps copies of what ended requests had in the engine's pool. A load locks the
copies that it reads; a copy that nobody reads makes room for the next one.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvplugin.block import NULL_BLOCK
from kvplugin.block_pool import BlockPool
from kvplugin.contract import CopyJob, Lookup
from kvplugin.manager import KVCacheManager
from kvplugin.spec import cdiv
from kvplugin.testing import ContentModel, ContentTier, RemoteKV
from tests.core.manager_setups import full, window
from tests.testing.lab import Lab

BLOCK, WINDOW = 4, 6
FULL_GROUP, WINDOW_GROUP = 0, 1
ENGINE_BLOCKS, HOST_BLOCKS = 20, 12


class HostKV(RemoteKV):
    """The scheduler half: its offers are what the host's pool has."""

    def __init__(self, kv: KVCacheManager, memory: ContentModel) -> None:
        super().__init__()
        self.kv = kv
        self.pool = BlockPool(1 + HOST_BLOCKS)
        self.tier = ContentTier(memory)
        self.locks: dict[int, list[int]] = {}
        """Copies that a job reads, one entry a reference."""

    def execute(self, memory: ContentModel) -> Callable[[CopyJob], int]:
        """Moves the copies, wherever the job's entries say they go."""

        def move(job: CopyJob) -> int:
            sources = iter(self.locks[job.id])
            parts = [
                (group, ids, [next(sources) for _ in ids])
                for group, ids, _ in job.parts
            ]
            return self.tier.execute(job._replace(parts=parts))

        return move

    def lookup(self, request: Any, num_local_tokens: int) -> Lookup:
        self.offers[request.request_id] = self._prefix(request, num_local_tokens)
        return super().lookup(request, num_local_tokens)

    def _prefix(self, request: Any, num_local_tokens: int) -> int:
        """Tokens up to which the host can go on from what the engine has."""
        dense, sparse = map(self.pool.cached_blocks, (FULL_GROUP, WINDOW_GROUP))
        hashes, start = request.block_hashes, num_local_tokens // BLOCK
        stop = start
        while stop < len(hashes) and hashes[stop] in dense:
            stop += 1
        for n in range(stop, start, -1):
            first = max((n * BLOCK - WINDOW + 1) // BLOCK, start)
            if all(hashes[i] in sparse for i in range(first, n)):
                return n * BLOCK
        return 0

    def allocated(
        self, request: Any, block_ids: tuple[Sequence[int], ...], num_external: int
    ) -> None:
        super().allocated(request, block_ids, num_external)
        if not num_external:
            return
        job = len(self.loads)
        copies = [
            self.pool.cached_blocks(group)[request.block_hashes[i]]
            for group, _, entries in self.loads[job].parts(self.tier.memory.groups)
            for i in entries
        ]
        self.pool.touch(copies)
        self.locks[job] = copies

    def unlock(self, ended: Iterable[int]) -> None:
        """These jobs have ended, however often that is said."""
        for job in ended:
            self.pool.free_blocks(self.locks.pop(job, []))

    def finished(self, request: Any) -> bool:
        """Keeps what is final of the request's blocks, as far as there is room.

        What it hit may be under way still, unless it has gone further since.
        """
        if not request.num_output_tokens or request.num_preemptions:
            return super().finished(request)
        final = request.num_computed_tokens - request.num_in_flight_tokens
        for group, row in enumerate(self.kv.get_block_ids(request.request_id)):
            for block in reversed(row[: final // BLOCK]):  # the last one goes first
                self._keep(group, block)
        return super().finished(request)

    def _keep(self, group: int, block: int) -> None:
        key = self.kv.block_pool.key_of(block)
        if key is None or self.pool.get(key) is not None:
            return
        if self.pool.get_num_free_blocks():
            (copy,) = self.pool.get_new_blocks(1)
            self.pool.insert([copy], [key])
            self.tier.execute(CopyJob(0, True, [(group, [block], [copy])]))
            self.pool.free_blocks([copy])


class TwoPools(Lab):
    """A laboratory whose connector is a host."""

    remote: HostKV

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            (full(BLOCK), window(WINDOW, BLOCK)), ENGINE_BLOCKS, **settings
        )

    def make_remote(self) -> HostKV:
        return HostKV(self.kv, self.memory)

    def land(self) -> None:
        super().land()
        self.remote.unlock(self.transport.ended)

    def check(self) -> None:
        """What must hold after every event."""
        super().check()
        self.remote.pool.check()
        rows = [row for id_ in self.requests for row in self.kv.get_block_ids(id_)]
        held = self.scheduler.state()["held"]
        assert_conserved(self.kv.block_pool, ENGINE_BLOCKS, *rows, held)
        assert_conserved(self.remote.pool, HOST_BLOCKS, *self.remote.locks.values())
        self._check_windows()

    def _check_windows(self) -> None:
        """No request holds a block of a window that it has left, nor lacks one that
        it will read."""
        for id_, entry in self.scheduler.requests.items():
            request = entry.request
            row = self.kv.get_block_ids(id_)[WINDOW_GROUP]
            settled = request.num_computed_tokens - request.num_in_flight_tokens
            first = max(settled - WINDOW + 1, 0) // BLOCK
            assert NULL_BLOCK not in row[first : cdiv(settled, BLOCK)], (id_, row)


def assert_conserved(pool: BlockPool, total: int, *owners: Iterable[int]) -> None:
    """free + evictable + locked + uncached == total, and locks are those of owners.

    Args:
        pool: says how many blocks are free, how many have a key.
        total: usable blocks.
        owners: blocks of each, one entry a lock.
    """
    locks = Counter(block for row in owners for block in row if block != NULL_BLOCK)
    locked = sum(pool.key_of(block) is not None for block in locks)
    uncached = len(locks) - locked
    evictable = pool.num_keyed_blocks - locked
    free = pool.get_num_free_blocks() - evictable
    sums = {"free": free, "evictable": evictable}
    sums |= {"locked": locked, "uncached": uncached}
    assert min(sums.values()) >= 0, sums
    assert sum(sums.values()) == total, sums
    for block in range(1, 1 + total):
        assert pool.ref_count(block) == locks[block] >= 0, f"block {block}: {locks}"


class TwoPoolsMachine(RuleBasedStateMachine):
    """Insert, evict, overlap, abort, in any order."""

    happened: ClassVar[Counter[str]]

    @initialize(drafts=st.sampled_from([0, 2]), depth=st.sampled_from([1, 2]))
    def begin(self, drafts: int, depth: int) -> None:
        """The host has a prefix, and a request that wants it."""
        self.lab = TwoPools(drafts=drafts, lookahead=drafts, depth=depth)
        self.lab.add([*range(25)], 1)
        while self.lab.scheduler.requests:
            self.lab.step()
        self.insert(shared=24, own=2, n=2, cold=True)

    @rule(
        shared=st.sampled_from([24, 17, 12, 8]),
        own=st.integers(1, 4),
        n=st.integers(1, 4),
        cold=st.booleans(),
    )
    def insert(self, shared: int, own: int, n: int, cold: bool) -> None:
        """A request that overlaps with others; if cold, then only the host has what
        nobody uses."""
        if cold:
            self.evict_all_idle()
        first = 100 + 10 * len(self.lab.requests)
        self.lab.add([*range(shared), *range(first, first + own)], n)

    @rule(n=st.integers(2, 9))
    def steps(self, n: int) -> None:
        for _ in range(n):
            self.lab.step()

    @precondition(lambda self: self.lab.scheduler.requests)
    @rule(which=st.integers(0, 9))
    def abort(self, which: int) -> None:
        ids = list(self.lab.scheduler.requests)
        self.lab.scheduler.abort_request(ids[which % len(ids)])

    @rule()
    def evict_all_idle(self) -> None:
        """Blocks in use lose their keys only when their bytes are wrong."""
        pool = self.lab.kv.block_pool
        blocks = range(1, 1 + ENGINE_BLOCKS)
        self.lab.kv.evict_blocks([b for b in blocks if not pool.ref_count(b)])

    @rule(block=st.integers(1, HOST_BLOCKS))
    def evict_a_copy(self, block: int) -> None:
        """Whether it is being read or not."""
        self.lab.remote.pool.evict_blocks([block])

    @precondition(lambda self: self.lab.transport.pending)
    @rule(which=st.integers(0, 9), how=st.sampled_from(["complete", "fail", "move"]))
    def end_a_load(self, which: int, how: str) -> None:
        pending = self.lab.transport.pending
        getattr(self.lab.transport, how)(pending[which % len(pending)].id)

    @precondition(lambda self: self.lab.transport.ended)
    @rule()
    def report_again(self) -> None:
        """Of a request that has ended: of another its id may name the next load."""
        job = self.lab.transport.ended[-1]
        if self.lab.remote.loads[job].request_id not in self.lab.scheduler.requests:
            self.lab.transport.repeat(job)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.lab.check()

    def teardown(self) -> None:
        """Everything ends, and all blocks of both pools can be had."""
        lab = self.lab
        lab.drain()
        lab.remote.unlock(lab.transport.ended)
        lab.check()
        assert not lab.remote.locks
        assert len(lab.remote.pool.get_new_blocks(HOST_BLOCKS)) == HOST_BLOCKS
        self.happened.update(lab.reasons.values())
        self.happened["loads"] += len(lab.remote.loads)
        self.happened["preemptions"] += sum(
            request.num_preemptions for request in lab.requests.values()
        )


def run_two_pools(max_examples: int, *phases: Phase) -> Counter[str]:
    """Many orders of events, the same ones at each call; what happened in them."""

    class Machine(TwoPoolsMachine):
        happened: ClassVar[Counter[str]] = Counter()

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=40,
            deadline=None,
            database=None,
            derandomize=True,
            report_multiple_bugs=False,
            phases=(Phase.generate, *phases),
        ),
    )
    return Machine.happened
