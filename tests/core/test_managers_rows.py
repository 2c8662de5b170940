"""What each attention type hits, gives back and counts."""

from dataclasses import replace

import pytest

from kvplugin.block_pool import BlockPool
from kvplugin.errors import ConfigError, IntegrityError
from kvplugin.managers import ManagerSettings, make_manager
from kvplugin.request import RequestError
from kvplugin.spec import EncoderOnlyAttentionSpec, KVCacheSpec
from tests.core.manager_setups import (
    HEADS,
    Setup,
    chunk,
    cross,
    full,
    mamba,
    mla,
    sink,
    window,
)
from tests.core.manager_steps import cache, compute, evict

ALL = range(10)


@pytest.mark.parametrize(
    ("spec", "cached", "row"),
    [
        (full(), {0, 1, 2, 5}, "xxx"),
        (mla(), {0, 1, 2, 5}, "xxx"),
        (sink(8), {0, 1}, "xx"),
        (full(), {1, 2}, ""),
        (window(5), {6}, "......x"),
        (window(6), {6}, ""),
        (window(6), {5, 6}, ".....xx"),
        (window(9), {2, 3, 8}, "..xx"),
        (window(30), {0, 1, 4}, "xx"),
        (chunk(16), ALL, "........xx"),
        (chunk(16), {8}, "........x"),
        (chunk(16), {0, 9}, "........"),
        (chunk(100), {0, 1, 9}, "xx"),
        (chunk(6), ALL, ".........x"),
        (chunk(6), {0, 1}, "." * 9),
        (chunk(10), {0, 2}, "." * 10),
        (mamba("all"), {2, 5}, ".....x"),
        (mamba("all"), set(), ""),
        (mamba("align"), {9}, ".........x"),
    ],
)
def test_hit_of_a_prompt_of_ten_blocks(
    spec: KVCacheSpec, cached: set[int], row: str
) -> None:
    setup = Setup((spec,), 40, max_model_len=80)
    kv = setup.manager()
    evict(kv, cache(kv, setup.request("a", range(41)), budget=4), set(cached))
    blocks, hit = kv.get_computed_blocks(setup.request("b", range(41)))
    (ids,) = blocks.get_block_ids()
    assert "".join(".x"[block > 0] for block in ids) == row
    assert hit == 4 * len(row)


@pytest.mark.parametrize(
    ("reach", "length", "hit"),
    [(6, 7, 0), (6, 5, 0), (6, 13, 12), (10, 11, 0), (10, 21, 20), (10, 19, 0)],
)
def test_chunk_that_begins_within_a_block_needs_that_block(
    reach: int, length: int, hit: int
) -> None:
    """A hit that ends before the chunk's first whole block is in the chunk before."""
    setup = Setup((chunk(reach),), 40)
    kv = setup.manager()
    assert kv.get_computed_blocks(setup.request("a", range(length)))[1] == hit


@pytest.mark.parametrize(
    ("spec", "computed", "nulls"),
    [
        (full(), 40, 0),
        (window(1), 40, 10),
        (window(5), 4, 0),
        (window(5), 8, 1),
        (window(5), 11, 1),
        (window(5), 12, 2),
        (chunk(16), 15, 0),
        (chunk(16), 16, 4),
        (chunk(6), 11, 1),
        (mamba("all"), 16, 3),
        (mamba("all"), 17, 4),
        (mamba("all", drafts=2), 18, 3),
        (mamba("all", drafts=2), 19, 4),
    ],
)
def test_blocks_that_nobody_reads_are_given_back(
    spec: KVCacheSpec, computed: int, nulls: int
) -> None:
    setup = Setup((spec,), 40)
    kv = setup.manager()
    request = setup.request("a", range(44))
    assert compute(kv, request, upto=computed, lookup=False)
    free = kv.block_pool.get_num_free_blocks()
    kv.remove_skipped_blocks("a", computed)
    (row,) = kv.get_block_ids("a")
    length = -(-computed // 4) + getattr(spec, "num_speculative_blocks", 0)
    assert [not block for block in row] == [i < nulls for i in range(length)]
    assert kv.block_pool.get_num_free_blocks() == free + nulls
    kv.remove_skipped_blocks("a", computed)
    kv.remove_skipped_blocks("nobody", computed)
    assert kv.block_pool.get_num_free_blocks() == free + nulls


def test_idle_hits_count_and_shared_ones_do_not() -> None:
    setup = Setup((full(),), 20)
    kv = setup.manager()
    (manager,) = kv.coordinator.single_type_managers
    cache(kv, setup.request("a", range(12)))
    request = setup.request("b", range(20))
    blocks, hit = kv.get_computed_blocks(request)
    ((*hits,),) = blocks.get_block_ids()
    count = manager.get_num_blocks_to_allocate
    assert count("b", 20, hits, hit, 20) == 5
    assert compute(kv, setup.request("c", range(9)))
    assert count("b", 20, hits, hit, 20) == 3
    assert count("b", 20, [], 0, 20) == 5
    assert kv.allocate_slots(request, 8, hit, blocks) is not None
    assert count("b", 20, [], 20, 20) == 0
    assert count("b", 25, [], 20, 25) == 2


def test_skipped_hits_are_not_adopted() -> None:
    setup = Setup((window(5),), 20)
    kv = setup.manager()
    cache(kv, setup.request("a", range(12)))
    request = setup.request("b", range(40))
    blocks, hit = kv.get_computed_blocks(request)
    assert hit == 12
    assert (
        kv.allocate_slots(request, 1, hit, blocks, num_external_computed_tokens=20)
        is not None
    )
    (row,) = kv.get_block_ids("b")
    assert [bool(block) for block in row] == [False] * 7 + [True] * 2
    assert kv.block_pool.num_used_blocks == 2


@pytest.mark.parametrize("computed", [0, 9])
@pytest.mark.parametrize(
    ("spec", "most"), [(window(9, 4), 5), (chunk(8, 4), 4), (full(), 16)]
)
def test_admission_bills_the_peak_whenever_it_is_asked(
    spec: KVCacheSpec, most: int, computed: int
) -> None:
    """Also of a request that has blocks already: those count once."""
    for num_blocks, fits in ((most + 1, True), (most, False)):
        setup = Setup((spec,), num_blocks, budget=9)
        kv = setup.manager()
        request = setup.request("a", range(64))
        assert compute(kv, request, upto=computed, lookup=False)
        assert kv.can_fit_full_sequence(request) is fits
        if fits:
            assert compute(kv, request, budget=9, lookup=False)


def test_unknown_budget_bills_all() -> None:
    setup = Setup((window(9),), 16)
    assert not setup.manager().can_fit_full_sequence(setup.request("a", range(64)))
    setup = replace(setup, num_blocks=17)
    assert setup.manager().can_fit_full_sequence(setup.request("a", range(64)))


# -- refusals ------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [window(5), chunk(8), mamba("all")])
def test_context_parallelism_is_for_full_attention(spec: KVCacheSpec) -> None:
    with pytest.raises(ConfigError, match="context parallel"):
        Setup((spec,)).manager(dcp_world_size=2)
    with pytest.raises(ConfigError, match="context parallel"):
        Setup((full(), mla(8))).manager(pcp_world_size=2)


@pytest.mark.parametrize(("dcp", "pcp"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_share_the_tokens_of_a_block(dcp: int, pcp: int) -> None:
    size = 4 * dcp * pcp
    setup = Setup((full(),), 20, hash_block_size=size)
    kv = setup.manager(dcp_world_size=dcp, pcp_world_size=pcp)
    cache(kv, setup.request("a", range(2 * size + 1)))
    request = setup.request("b", range(2 * size + 1))
    assert kv.get_computed_blocks(request)[1] == 2 * size
    assert compute(kv, request)
    assert len(kv.get_block_ids("b")[0]) == 3


def test_specs_without_manager_are_refused() -> None:
    with pytest.raises(ConfigError, match="kvp_make_manager"):
        Setup((EncoderOnlyAttentionSpec(block_size=4, **HEADS),)).manager()


def test_chunks_take_neither_drafts_nor_other_block_sizes() -> None:
    for setup in (
        Setup((chunk(8),), drafts=True),
        Setup((full(8), chunk(8)), hash_block_size=4),
    ):
        with pytest.raises(ConfigError, match="chunked local"):
            setup.manager()


def test_hash_size_divides_block_size() -> None:
    with pytest.raises(ConfigError, match="multiple"):
        Setup((full(6),), hash_block_size=4).manager()


def test_cross_attention_hits_nothing() -> None:
    pool = BlockPool(9)
    settings = ManagerSettings(group=0, enable_caching=False)
    manager = make_manager(cross(), pool, settings)
    assert manager.find_longest_cache_hit([b"x"], 4, [0, 1], 4) == ([], [])
    with pytest.raises(IntegrityError, match="cannot adopt"):
        manager.add_local_computed_blocks("a", [1], 4, 0)


def test_too_few_hashes_are_an_error() -> None:
    setup = Setup((full(),))
    kv = setup.manager()
    request = setup.request("a", range(9))
    request.block_hashes.pop()
    with pytest.raises(RequestError, match="too few block hashes"):
        kv.allocate_slots(request, 9)
