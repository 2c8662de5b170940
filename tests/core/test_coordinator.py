"""Coordinators: one answer for all groups."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplugin.coordinator import (
    HybridKVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
)
from kvplugin.errors import IntegrityError
from kvplugin.parity import Parity
from kvplugin.spec import KVCacheSpec
from tests.core.manager_setups import Setup, full, mamba, window
from tests.core.manager_steps import cache, compute, evict


@pytest.mark.parametrize(
    ("specs", "caching", "kind"),
    [
        ((), True, KVCacheCoordinatorNoPrefixCache),
        ((full(), window(6)), False, KVCacheCoordinatorNoPrefixCache),
        ((window(6),), True, UnitaryKVCacheCoordinator),
        ((full(), full()), True, HybridKVCacheCoordinator),
    ],
)
def test_coordinator_for_these_groups(
    specs: tuple[KVCacheSpec, ...], caching: bool, kind: type
) -> None:
    kv = Setup(specs).manager(enable_caching=caching)
    assert type(kv.coordinator) is kind


def test_no_groups_need_no_blocks() -> None:
    setup = Setup((), 1)
    kv = setup.manager()
    request = setup.request("a", range(9))
    assert kv.get_computed_blocks(request) == (kv.empty_kv_cache_blocks, 0)
    assert kv.can_fit_full_sequence(request)
    assert kv.allocate_slots(request, 9) is kv.empty_kv_cache_blocks
    assert (kv.get_block_ids("a"), kv.usage) == ((), 0)


def hits(specs: tuple[KVCacheSpec, ...], keep: dict[KVCacheSpec, set[int]]) -> object:
    """What a prompt of ten blocks hits if only these blocks of each group are left."""
    setup = Setup(specs, 80, min(spec.block_size for spec in specs), 80)
    kv = setup.manager()
    first = cache(kv, setup.request("a", range(41)))
    for group, spec in enumerate(specs):
        if spec in keep:
            evict(kv, first, keep[spec], group)
    blocks, hit = kv.get_computed_blocks(setup.request("b", range(41)))
    rows = blocks.get_block_ids()
    shapes = ["".join(".x"[block > 0] for block in row) for row in rows]
    return hit, dict(zip(specs, shapes, strict=True))


@pytest.mark.parametrize("order", permutations(range(3)))
def test_hit_does_not_depend_on_the_order_of_groups(order: tuple[int, ...]) -> None:
    """Each group refuses the length that the others agree on, until one is left."""
    dense, short, states = full(4), window(6), mamba("all")
    specs = tuple((dense, short, states)[i] for i in order)
    keep = {
        dense: set(range(9)),
        short: {1, 2, 6, 7, 8},
        states: {2, 5, 9},
    }
    assert hits(specs, keep) == (
        12,
        {dense: "xxx", short: ".xx", states: "..x"},
    )


def test_groups_of_one_spec_hit_together() -> None:
    setup = Setup((full(), window(6), window(6)), 80)
    kv = setup.manager()
    first = cache(kv, setup.request("a", range(41)))
    evict(kv, first, {0, 1, 2, 3, 4, 5}, group=1)
    evict(kv, first, {2, 3, 6, 7}, group=2)
    blocks, hit = kv.get_computed_blocks(setup.request("b", range(41)))
    assert hit == 16
    rows = blocks.get_block_ids()
    assert [len(row) for row in rows] == [4, 4, 4]
    groups = [{kv.block_pool.key_of(b)[-1] for b in row if b} for row in rows]  # type: ignore[index]
    assert groups == [{0}, {1}, {2}]


@given(st.permutations([2, 4, 8]), st.integers(1, 60))
def test_hits_are_multiples_of_every_block_size(sizes: list[int], length: int) -> None:
    setup = Setup((full(sizes[0]), window(6, sizes[1]), window(9, sizes[2])), 99, 2)
    kv = setup.manager()
    cache(kv, setup.request("a", range(length)))
    blocks, hit = kv.get_computed_blocks(setup.request("b", range(length)))
    assert hit == (length - 1) // 8 * 8
    assert [len(row) * size for row, size in zip(blocks.ids, sizes, strict=True)] == [
        hit
    ] * 3


# -- where 0.19.1 is weaker, and the way back ----------------------------------------


@pytest.mark.parametrize(
    ("specs", "ours", "theirs"),
    [
        ((full(),), 36, 36),
        ((full(), window(8)), 36, 32),
        ((full(), window(8), window(16)), 36, 0),
    ],
)
def test_draft_drop(specs: tuple[KVCacheSpec, ...], ours: int, theirs: int) -> None:
    setup = Setup(specs, 80, drafts=True)
    for parity, hit in ((Parity(), ours), (Parity(draft_drop_per_lookup=True), theirs)):
        kv = setup.manager(parity=parity)
        cache(kv, setup.request("a", range(41)))
        assert kv.get_computed_blocks(setup.request("b", range(41)))[1] == hit


@pytest.mark.parametrize("by_group", [False, True])
def test_external_blocks_come_after_all_hits(by_group: bool) -> None:
    """By group, those of the first take cached blocks that the second has hit."""
    setup = Setup((full(), window(30)), 9)
    kv = setup.manager(parity=Parity(external_blocks_by_group=by_group))
    cache(kv, setup.request("a", range(8)))
    cache(kv, setup.request("other", range(100, 108)))
    request = setup.request("b", range(17))
    blocks, hit = kv.get_computed_blocks(request)
    assert hit == 8
    done = kv.allocate_slots(request, 0, hit, blocks, num_external_computed_tokens=8)
    assert done is not None
    dense, sparse = kv.get_block_ids("b")
    assert [dense[:2], sparse[:2]] == list(blocks.get_block_ids())
    assert bool(set(dense) & set(sparse)) is by_group


def test_admission_may_ignore_that_windows_recycle() -> None:
    setup = Setup((window(8),), 8, max_model_len=256, budget=8)
    request = setup.request("a", range(200))
    assert setup.manager().can_fit_full_sequence(request)
    old = setup.manager(parity=Parity(admission_ignores_recycling=True))
    assert not old.can_fit_full_sequence(request)


# -- check() -------------------------------------------------------------------------


def test_check_finds_lost_and_foreign_references() -> None:
    setup = Setup((full(),))
    kv = setup.manager()
    request = setup.request("a", range(9))
    assert compute(kv, request)
    row = kv.get_block_ids("a")[0]
    kv.block_pool.touch(row[:1])
    with pytest.raises(IntegrityError, match=f"block {row[0]} has 2 references"):
        kv.check()
    kv.check(pinned=row[:1])
    kv.block_pool.free_blocks([row[0], row[0]])
    with pytest.raises(IntegrityError, match="free block"):
        kv.check()


def test_a_prompt_that_is_cached_to_its_end_loses_nothing_to_drafts() -> None:
    setup = Setup((full(),), drafts=True)
    kv = setup.manager()
    cached = setup.request("a", range(16))
    kv.allocate_slots(cached, 16)
    assert kv.get_computed_blocks(setup.request("same", range(16)))[1] == 12
    assert kv.get_computed_blocks(setup.request("longer", range(18)))[1] == 12
