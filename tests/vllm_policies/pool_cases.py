"""vLLM's block pool and manager with a policy behind them, beside vLLM's own.

Run by `test_policy_pool.py` under each supported vLLM.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import vllm
from hypothesis import given, settings
from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager

from kvplugin.hashing import make_key
from kvplugin.integration.vllm.policy_manager import policy_classes
from kvplugin.policies.eviction import LRU, NO_CONTEXT, BlockContext, EvictionPolicy
from tests.core.eviction_faults import (
    FAULTY_POLICIES,
    Faulty,
    FaultyCall,
    RandomPolicy,
    Recorder,
)
from tests.core.eviction_faults import NUM_BLOCKS as FAULTY_BLOCKS
from tests.oracles import V032, vllm_core
from tests.vllm_policies.pool_helpers import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Drive,
    Op,
    Strict,
    ops,
)

IS_032 = vllm.__version__ == V032
WHO = BlockContext(priority=3, session="s")
FULL = (
    "FullAttentionSpec",
    {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": "bfloat16"},
)
WINDOW = ("SlidingWindowSpec", FULL[1] | {"sliding_window": 8})

only_032 = pytest.mark.skipif(not IS_032, reason="vLLM 0.19 has nothing like it")


def ranked(make: Callable[[], EvictionPolicy], num_blocks: int = NUM_BLOCKS) -> Any:
    """A pool as a manager leaves it."""
    pool_class, _ = policy_classes(BlockPool, KVCacheManager, lambda _: make())
    pool = pool_class(num_blocks, True, BLOCK_SIZE, enable_kv_cache_events=True)
    pool.rank_by(lambda _: make())
    return pool


def request(*words: int, ctx: BlockContext | None = None, tail: int = 0) -> Any:
    """One block a word, and a few tokens more."""
    tokens = [word for word in words for _ in range(BLOCK_SIZE)] + [9] * tail
    made = vllm_core.request("-".join(map(str, tokens)), tokens, HASHER)
    if ctx is not None:
        made.block_context = ctx
    return made


HASHER = vllm_core.hasher(BLOCK_SIZE)


def cached(pool: Any, *words: int, ctx: BlockContext | None = None) -> list[Any]:
    """Blocks that nobody uses; the last one is the first to go."""
    blocks = pool.get_new_blocks(len(words))
    cache(pool, request(*words, ctx=ctx), blocks)
    pool.free_blocks(reversed(blocks))
    return blocks


def cache(pool: Any, req: Any, blocks: list[Any], first: int = 0, **more: Any) -> None:
    """Give blocks from `first` on the keys of the request's blocks."""
    pool.cache_full_blocks(
        request=req,
        blocks=blocks,
        num_cached_blocks=first,
        num_full_blocks=len(blocks),
        block_size=BLOCK_SIZE,
        kv_cache_group_id=0,
        **more,
    )


def ids(blocks: Sequence[Any]) -> list[int]:
    return [block.block_id for block in blocks]


# -- random runs -------------------------------------------------------------------


@pytest.mark.skipif(not IS_032, reason="0.19 keeps one list; ours is 0.32's order")
@given(ops("evict free"))
@settings(max_examples=200, deadline=None)
def test_lru_gives_the_blocks_and_events_of_vllm(steps: list[Op]) -> None:
    pool = ranked(LRU)
    own = BlockPool(NUM_BLOCKS, True, BLOCK_SIZE, enable_kv_cache_events=True)
    assert Drive(pool).run(steps) == Drive(own).run(steps)
    assert pool.kvp.failures == 0


@pytest.mark.parametrize("make", [LRU, RandomPolicy, Strict])
@given(steps=ops())
@settings(max_examples=60, deadline=None)
def test_policy_hears_what_the_protocol_says_and_no_block_is_lost(
    make: Callable[[], EvictionPolicy], steps: list[Op]
) -> None:
    pool = ranked(make)
    drive = Drive(pool)
    drive.run(steps)
    drive.finish_all()
    assert pool.reset_prefix_cache()
    pool.kvp.check()
    assert pool.kvp.failures == 0
    assert len(pool.kvp.get_all_free_blocks()) == NUM_BLOCKS - 1
    assert len(set(ids(pool.get_new_blocks(NUM_BLOCKS - 1)))) == NUM_BLOCKS - 1


@given(steps=ops("evict free"))
@settings(max_examples=60, deadline=None)
def test_a_policy_that_fails_at_once_leaves_the_run_to_lru(steps: list[Op]) -> None:
    pool = ranked(lambda: FaultyCall("release", works_first=False))
    assert Drive(pool).run(steps) == Drive(ranked(LRU)).run(steps)


# -- what the policy hears ---------------------------------------------------------


def test_policy_hears_who_inserts_and_what_goes_first() -> None:
    policy = Recorder()
    pool = ranked(lambda: policy)
    blocks = cached(pool, 1, 2, 3, ctx=WHO)
    assert policy.calls == [
        ("insert", ids(blocks), WHO),
        ("release", ids(blocks)[::-1]),
    ]


def test_victims_are_not_forgotten_as_well() -> None:
    policy = Recorder()
    pool = ranked(lambda: policy, 4)
    _, b, c = ids(cached(pool, 1, 2, 3))
    policy.calls.clear()
    assert ids(pool.get_new_blocks(2)) == [c, b]
    assert policy.calls == [("victims", [c, b])]


def test_policy_hears_of_lost_keys_in_use_or_not() -> None:
    policy = Recorder()
    pool = ranked(lambda: policy)
    a, b, c = cached(pool, 1, 2, 3)
    pool.touch([a])
    policy.calls.clear()
    pool.evict_blocks({a.block_id, b.block_id, 9})
    pool.free_blocks([a])
    assert pool.reset_prefix_cache()
    assert policy.calls == [("forget", ids([a, b])), ("forget", ids([c]))]
    assert len(policy) == 0


def test_first_a_reset_fails_then_the_order_stays() -> None:
    pool = ranked(LRU)
    a, b, c = cached(pool, 1, 2, 3)
    (held,) = pool.get_new_blocks(1)
    assert not pool.reset_prefix_cache()
    pool.kvp.check()
    pool.free_blocks([held])
    assert pool.reset_prefix_cache()
    free = ids(pool.get_new_blocks(NUM_BLOCKS - 1))
    assert free[0] == held.block_id
    assert free[-3:] == ids([c, b, a])


def test_invalid_block_is_refused_as_by_vllm() -> None:
    pool = ranked(LRU)
    with pytest.raises(AssertionError, match="Invalid block_id"):
        pool.evict_blocks({NUM_BLOCKS})


# -- through vLLM's manager --------------------------------------------------------


def manager(policy: EvictionPolicy, *groups: Any) -> Any:
    """vLLM's manager of 32 blocks, built as a scheduler of ours lets it be built."""
    pool_class, manager_class = policy_classes(
        BlockPool, KVCacheManager, lambda _: policy
    )
    known = inspect.signature(KVCacheManager).parameters
    options = {"scheduler_block_size": 8, "enable_caching": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache_coordinator, "BlockPool", pool_class)
        return manager_class(
            vllm_core.config(32, [*groups]),
            256,
            hash_block_size=BLOCK_SIZE,
            **{name: value for name, value in options.items() if name in known},
        )


def admit(manager: Any, req: Any) -> Any:
    """The request's blocks by group."""
    blocks, hit = manager.get_computed_blocks(req)[:2]
    assert manager.allocate_slots(req, req.num_tokens - hit, hit, blocks)
    req.num_computed_tokens = req.num_tokens
    manager.block_pool.kvp.check()
    return manager.get_blocks(req.request_id).blocks


def preempt(manager: Any, req: Any) -> None:
    manager.free(req)
    req.num_computed_tokens = 0
    req.num_preemptions += 1


def test_a_hit_is_one_of_a_first_admission() -> None:
    class Hears(Recorder):
        needs_hits = True

    policy = Hears()
    kept = manager(policy, FULL)
    pool = kept.block_pool
    first = request(1, 2, 3, tail=1, ctx=WHO)
    second = request(1, 2, 4, tail=1, ctx=WHO)
    (row,) = admit(kept, first)
    a, b = ids(row)[:2]
    policy.calls.clear()
    admit(kept, second)  # live blocks are hit as well
    assert policy.calls[0] == ("hit", [a, b], WHO)

    kept.free(second)
    preempt(kept, first)
    policy.calls.clear()
    admit(kept, first)
    pool.touch([pool.blocks[a]])
    pool.free_blocks([pool.blocks[a]])
    assert [call[0] for call in policy.calls] == ["pin"]

    preempt(kept, first)
    policy.calls.clear()
    admit(kept, request(1, 2, 5, tail=1))
    assert policy.calls[:2] == [("pin", [a, b]), ("hit", [a, b], NO_CONTEXT)]


def test_policy_that_does_not_want_hits_costs_running_requests_nothing() -> None:
    kept = manager(LRU(), FULL)
    assert kept.allocate_slots.__func__ is KVCacheManager.allocate_slots


def test_info_tells_key_parent_group_and_depth_of_hybrid_models() -> None:
    policy = Strict()
    kept = manager(policy, FULL, WINDOW)
    req = request(1, 2, 3, 4, 5, 6, tail=1)
    rows = admit(kept, req)
    for group, row in enumerate(rows):
        for depth, block in enumerate(row[:6]):
            if block.block_id not in policy.keyed:
                assert block.is_null or not block.block_hash
                continue
            assert policy.info(block.block_id) == (
                make_key(req.block_hashes[depth], group),
                make_key(req.block_hashes[depth - 1], group) if depth else None,
                group,
                depth,
            )
    assert {info.group for info in policy.keyed.values()} == {0, 1}
    kept.free(req)
    assert kept.reset_prefix_cache()
    assert len(policy) == 0
    assert not policy.keyed
    assert kept.block_pool.kvp.failures == 0


def test_info_of_blocks_larger_than_the_hashes() -> None:
    policy = Strict()
    pool = ranked(lambda: policy)
    req = request(1, 2, 3, 4, 5, 6)
    blocks = pool.get_new_blocks(3)
    for first, last in ((0, 1), (1, 3)):
        pool.cache_full_blocks(
            request=req,
            blocks=blocks,
            num_cached_blocks=first,
            num_full_blocks=last,
            block_size=2 * BLOCK_SIZE,
            kv_cache_group_id=1,
        )
    infos = [policy.info(block) for block in ids(blocks)]
    assert [info.key for info in infos] == [block.block_hash for block in blocks]
    assert [info.parent_key for info in infos] == [None, *[i.key for i in infos[:2]]]
    assert [info.depth for info in infos] == [0, 1, 2]


def test_pools_that_nobody_ranks_are_as_vllm_made_them() -> None:
    pool_class, _ = policy_classes(BlockPool, KVCacheManager, lambda _: LRU())
    pool = pool_class(4, True, BLOCK_SIZE)
    assert pool.kvp is None
    a, b, _ = cached(pool, 1, 2, 3)
    pool.touch([a])
    pool.evict_blocks({b.block_id})
    pool.free_blocks([a])
    assert pool.reset_prefix_cache()
    assert type(pool.free_block_queue).__module__.startswith("vllm.")


def test_steps_reach_a_policy_that_wants_them() -> None:
    class Clock(LRU):
        needs_steps = True
        now = 0.0

        def step(self, now: float, soon: Any, dropped: Any) -> None:
            self.now = now

    policy = Clock()
    pool = ranked(lambda: policy)
    assert pool.kvp.wants_steps
    pool.kvp.step(7.0, [], {})
    assert policy.now == 7.0
    assert not ranked(LRU).kvp.wants_steps


# -- several keys a block, blocks of last resort (0.32) ----------------------------


@only_032
def test_a_block_is_keyed_while_it_has_any_key() -> None:
    policy = Recorder()
    pool = ranked(lambda: policy)
    req = request(1, 2, 3)
    (block,) = pool.get_new_blocks(1)
    partial = {"kv_cache_group_id": 0, "block_size": 2 * BLOCK_SIZE}
    pool.cache_partial_block(req, block, 2 * BLOCK_SIZE, **partial)
    first = policy.calls[:]
    pool.cache_partial_block(req, block, BLOCK_SIZE, **partial)
    assert pool.cached_block_hashes_by_block
    assert policy.calls == first == [("insert", [block.block_id], NO_CONTEXT)]
    pool.evict_blocks({block.block_id})
    assert policy.calls[1:] == [("forget", [block.block_id])]
    pool.free_blocks([block])
    pool.kvp.check()


@only_032
def test_a_partial_block_that_becomes_full_has_another_key() -> None:
    policy = Strict()
    pool = ranked(lambda: policy)
    req = request(1, 2, 3, 4)
    blocks = pool.get_new_blocks(2)
    sizes = {"kv_cache_group_id": 0, "block_size": 2 * BLOCK_SIZE}
    pool.cache_partial_block(req, blocks[1], 3 * BLOCK_SIZE, **sizes)
    tail = blocks[1].block_id
    assert policy.info(tail).key == make_key(req.block_hashes[2], 0)
    assert policy.info(tail).depth == 1
    pool.cache_full_blocks(req, blocks, 0, 2, **sizes)
    assert policy.info(tail).key == make_key(req.block_hashes[3], 0)
    assert policy.info(tail).parent_key == make_key(req.block_hashes[1], 0)
    pool.free_blocks(blocks)
    assert pool.kvp.failures == 0


@only_032
def test_keys_that_move_are_lost_here_and_given_there() -> None:
    policy = Strict()
    pool = ranked(lambda: policy)
    req = request(1, 2)
    source, target = pool.get_new_blocks(2)
    cache(pool, req, [source])
    before = policy.info(source.block_id)
    pool.move_block_hashes(source, target)
    assert policy.keyed == {target.block_id: before}
    pool.free_blocks([source, target])
    pool.kvp.check()
    assert pool.kvp.failures == 0


@only_032
def test_masked_blocks_are_not_told_of() -> None:
    policy = Recorder()
    pool = ranked(lambda: policy)
    blocks = pool.get_new_blocks(3)
    cache(pool, request(1, 2, 3), blocks, block_mask=[True, False, True])
    assert policy.calls == [("insert", ids(blocks[::2]), NO_CONTEXT)]


@only_032
def test_blocks_that_are_read_until_reuse_go_last() -> None:
    pool = ranked(LRU)
    read, again = pool.get_new_blocks(2)
    (kept,) = cached(pool, 1)
    reused: list[Any] = []
    pool.unpin_blocks([read, again], reused.append)
    pool.touch([again])  # read by a request once more
    pool.kvp.check()
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    assert ids(taken)[-2:] == ids([kept, read])
    assert reused == [read]
    pool.free_blocks([*taken, again])
    pool.kvp.check()


def test_a_key_given_behind_the_pools_back_is_told_at_the_release() -> None:
    policy = Strict()
    pool = ranked(lambda: policy)
    block, other = pool.get_new_blocks(2)
    block._block_hash = make_key(b"h" * 32, 2)
    pool.free_blocks([other, block])
    assert policy.info(block.block_id) == (block._block_hash, None, 2, 0)
    pool.kvp.check()
    assert pool.kvp.failures == 0


def test_a_key_lost_behind_the_pools_back_is_forgotten_at_the_release() -> None:
    policy = Strict()
    pool = ranked(lambda: policy)
    blocks = pool.get_new_blocks(2)
    cache(pool, request(1, 2), blocks)
    pool._maybe_evict_cached_block(blocks[0])
    pool.free_blocks(blocks)
    assert [*policy.keyed] == [blocks[1].block_id]
    assert pool.kvp.failures == 0


# -- when the policy fails ---------------------------------------------------------


@pytest.fixture
def errors() -> Iterator[list[logging.LogRecord]]:
    """vLLM's logger keeps its records to itself."""
    handler = logging.Handler(logging.ERROR)
    records: list[logging.LogRecord] = []
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("vllm").addHandler(handler)
    yield records
    logging.getLogger("vllm").removeHandler(handler)


def provoke(pool: Any) -> list[int]:
    """Use each method of the policy; the victims of a last call, which empties it."""
    a, b, _, d, *_ = cached(pool, 1, 2, 3, 4, 5, 6)
    pool.admitting = request(9)
    pool.touch([b, a])
    pool.admitting = None
    pool.evict_blocks({d.block_id})
    pool.free_blocks([a])
    victims = pool.get_new_blocks(pool.get_num_free_blocks())
    assert len(victims) == FAULTY_BLOCKS - 2
    return ids(victims)


@pytest.mark.parametrize("name", FAULTY_POLICIES)
def test_lru_takes_over_from_a_policy_that_fails(
    name: str, errors: list[logging.LogRecord]
) -> None:
    policy: Faulty = FAULTY_POLICIES[name]()
    pool = ranked(lambda: policy, FAULTY_BLOCKS)
    assert provoke(pool) == provoke(ranked(LRU, FAULTY_BLOCKS))
    assert pool.kvp.failures == policy.faults == 1
    (record,) = errors
    assert record.name.startswith("vllm.kvplugin.")
    assert type(policy).__name__ in record.getMessage()
    assert pool.kvp.policy_name == "LRU"
    pool.kvp.check()


def test_policy_that_spoils_its_lists_spoils_nothing_else() -> None:
    class Spoils(LRU):
        def insert(self, ids: Sequence[int], ctx: BlockContext) -> None:
            ids.clear()  # type: ignore[attr-defined]

        def release(self, ids: Sequence[int]) -> None:
            super().release(ids)
            ids.clear()  # type: ignore[attr-defined]

    pool = ranked(Spoils)
    blocks = cached(pool, 1, 2, 3)
    pool.kvp.check()
    pool.touch(blocks)
    pool.free_blocks(blocks)
    pool.kvp.check()
    assert pool.kvp.failures == 0
