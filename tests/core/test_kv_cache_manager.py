"""KVCacheManager: what its arguments mean, and what it says of itself."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvplugin.coordinator import KVCacheCoordinator
from kvplugin.errors import ConfigError, IntegrityError
from kvplugin.hashing.own import kv_sha256
from kvplugin.manager import KVCacheManager
from kvplugin.managers.base import ALWAYS
from kvplugin.parity import Parity
from kvplugin.request import Request, RequestError
from kvplugin.spec import (
    EngineLimits,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
)
from tests.core import vllm_drives as drives
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
from tests.core.manager_steps import cache, compute
from tests.oracles.drive import Setup as Drive


def test_tokens_to_compute_or_to_load_are_needed() -> None:
    setup = Setup((full(),))
    kv = setup.manager()
    request = setup.request("a", range(9))
    with pytest.raises(ValueError, match="num_new_tokens"):
        kv.allocate_slots(request, 0)
    assert compute(kv, request)
    with pytest.raises(ValueError, match="num_new_tokens"):
        kv.allocate_slots(request, 0)
    assert kv.allocate_slots(setup.request("b", range(9)), 0, 0, None, 0, 8) is not None


def test_hits_cannot_be_adopted_twice() -> None:
    setup = Setup((full(),))
    kv = setup.manager()
    cache(kv, setup.request("a", range(9)))
    request = setup.request("b", range(9))
    blocks, hit = kv.get_computed_blocks(request)
    assert kv.allocate_slots(request, 1, hit, blocks) is not None
    with pytest.raises(IntegrityError, match="admitted before"):
        kv.allocate_slots(request, 1, hit, blocks)


def test_model_length_bounds_slots() -> None:
    setup = Setup((full(),), max_model_len=10)
    kv = setup.manager()
    request = setup.request("a", range(10))
    assert kv.allocate_slots(request, 10, num_lookahead_tokens=30) is not None
    assert len(kv.get_block_ids("a")[0]) == 3
    with pytest.raises(ConfigError, match="max_model_len"):
        replace(setup, max_model_len=0).manager()


def test_failed_allocation_takes_nothing_but_gives_back_what_is_not_read() -> None:
    setup = Setup((window(5),), 6)
    kv = setup.manager()
    request = setup.request("a", range(60))
    assert compute(kv, request, upto=16)
    assert kv.allocate_slots(request, 40) is None
    assert [bool(block) for block in kv.get_block_ids("a")[0]] == [False] * 3 + [True]
    assert kv.block_pool.get_num_free_blocks() == 4
    assert kv.allocate_slots(request, 16) is not None


def test_last_token_is_never_a_hit_and_whole_blocks_are() -> None:
    setup = Setup((full(),))
    kv = setup.manager()
    cache(kv, setup.request("a", range(12)))
    for length, hit in ((12, 8), (13, 12), (11, 8), (4, 0), (5, 4)):
        assert kv.get_computed_blocks(setup.request("b", range(length)))[1] == hit


def test_request_may_refuse_to_read_the_cache() -> None:
    setup = Setup((full(),))
    kv = setup.manager(log_stats=True)
    cache(kv, setup.request("a", range(9)))
    kv.make_prefix_cache_stats()
    request = setup.request("b", range(9), skip_reading_prefix_cache=True)
    assert kv.get_computed_blocks(request) == (kv.empty_kv_cache_blocks, 0)
    stats = kv.make_prefix_cache_stats()
    assert stats is not None
    assert stats.requests == 0


def test_without_caching_nothing_is_hit_or_keyed() -> None:
    setup = Setup((full(), window(6)))
    kv = setup.manager(enable_caching=False, enable_kv_cache_events=True)
    cache(kv, setup.request("a", range(30)), budget=8)
    assert kv.get_computed_blocks(setup.request("a", range(30)))[1] == 0
    assert kv.block_pool.num_keyed_blocks == 0
    assert kv.take_events() == []
    assert kv.usage == 0


def test_statistics_count_lookups_and_preempted_ones_apart() -> None:
    setup = Setup((full(),))
    kv = setup.manager(log_stats=True)
    assert setup.manager().make_prefix_cache_stats() is None
    request = cache(kv, setup.request("a", range(13)))
    kv.get_computed_blocks(setup.request("b", range(9)))
    request.num_preemptions = 1
    kv.get_computed_blocks(request)
    stats = kv.make_prefix_cache_stats()
    assert stats is not None
    assert (stats.requests, stats.queries, stats.hits) == (2, 22, 8)
    assert stats.preempted_requests == 1
    assert (stats.preempted_queries, stats.preempted_hits) == (13, 12)
    assert not stats.reset
    assert kv.reset_prefix_cache()
    stats = kv.make_prefix_cache_stats()
    assert stats is not None
    assert (stats.reset, stats.queries) == (True, 0)


def test_reset_waits_for_the_last_block() -> None:
    setup = Setup((full(), sink(8)))
    kv = setup.manager()
    request = setup.request("a", range(9))
    assert compute(kv, request)
    assert not kv.reset_prefix_cache()
    kv.free(request)
    assert kv.get_computed_blocks(setup.request("b", range(9)))[1] == 8
    assert kv.reset_prefix_cache()
    assert kv.get_computed_blocks(setup.request("b", range(9)))[1] == 0
    assert kv.usage == 0


def test_sink_blocks_are_nobodys() -> None:
    kv = Setup((sink(8),), 10).manager()
    assert kv.block_pool.num_usable_blocks == 7
    assert len(kv.block_pool.reserved_blocks) == 2


# -- blocks of other tokens than the request's ---------------------------------------


def test_encoder_tokens_size_cross_attention() -> None:
    setup = Setup((full(), cross()), 20)
    kv = setup.manager(enable_caching=False)
    request = setup.request("a", range(9))
    assert not kv.can_fit_full_sequence(request, num_encoder_tokens=100)
    assert kv.allocate_slots(request, 9, num_encoder_tokens=100) is None
    assert kv.allocate_slots(request, 9, num_encoder_tokens=10) is not None
    request.num_computed_tokens = 9
    assert list(map(len, kv.get_block_ids("a"))) == [3, 3]
    assert kv.allocate_slots(request, 4) is not None
    assert list(map(len, kv.get_block_ids("a"))) == [4, 3]
    kv.free(request)
    assert kv.usage == 0
    with pytest.raises(ConfigError, match="enable_caching"):
        setup.manager()


# -- blocks to zero ------------------------------------------------------------------


def test_blocks_to_zero_are_told_once_where_it_matters() -> None:
    setup = Setup((full(), mamba("all")))
    kv = setup.manager()
    request = setup.request("a", range(9))
    assert compute(kv, request)
    rows = kv.get_block_ids("a")
    assert kv.take_new_block_ids() == [block for row in rows for block in row]
    assert kv.take_new_block_ids() == []
    assert kv.allocate_slots(request, 1) is not None
    assert kv.take_new_block_ids() == []
    plain = Setup((full(), window(6)))
    kv = plain.manager()
    assert compute(kv, plain.request("a", range(9)))
    assert kv.take_new_block_ids() == []
    kv = plain.manager(parity=Parity(zeroes_full_attention_only=True))
    assert compute(kv, plain.request("a", range(9)))
    assert kv.take_new_block_ids() == kv.get_block_ids("a")[0]


def test_groups_of_two_dtypes_are_zeroed() -> None:
    other = FullAttentionSpec(block_size=4, **HEADS | {"dtype": "float32"})
    setup = Setup((full(), other))
    kv = setup.manager()
    assert compute(kv, setup.request("a", range(9)))
    assert len(kv.take_new_block_ids()) == 6


# -- common prefix -------------------------------------------------------------------


def test_common_prefix_is_what_all_holders_share() -> None:
    setup = Setup((full(), window(6)), 60)
    kv = setup.manager()
    for i, name in enumerate("ab"):
        assert compute(kv, setup.request(name, [*range(12), 50 + i]))
    assert kv.get_num_common_prefix_blocks("a") == [3, 0]
    third = setup.request("c", range(20, 30))
    assert compute(kv, third)
    assert kv.get_num_common_prefix_blocks("a") == [0, 0]
    kv.free(third)
    assert kv.get_num_common_prefix_blocks("b") == [3, 0]


# -- eviction and going back ---------------------------------------------------------


@pytest.mark.parametrize("back", [0, 4, 5, 8])
@pytest.mark.parametrize("twin", [False, True])
def test_rewritten_blocks_get_their_key_again(back: int, twin: bool) -> None:
    setup = Setup((full(),))
    kv = setup.manager(enable_kv_cache_events=True)
    first, request = setup.request("a", range(17)), setup.request("b", range(17))
    if twin:
        assert kv.allocate_slots(first, 17) is not None
    assert kv.allocate_slots(request, 17) is not None
    row = kv.get_block_ids("b")[0]
    before = [kv.block_pool.key_of(block) for block in row]
    kv.evict_blocks(row[2:])
    assert [kv.block_pool.key_of(block) for block in row[2:]] == [None] * 3
    request.num_computed_tokens = back
    assert kv.allocate_slots(request, 17 - back) is not None
    assert [kv.block_pool.key_of(block) for block in row] == before
    kv.check()
    kv.free(request)
    kv.check()
    assert kv.get_computed_blocks(setup.request("c", range(17)))[1] == 16


def test_evicted_blocks_stay_evicted_without_going_back() -> None:
    setup = Setup((full(),))
    kv = setup.manager()
    request = setup.request("a", range(21))
    assert compute(kv, request, upto=12)
    row = kv.get_block_ids("a")[0]
    kv.evict_blocks(row[1:])
    assert kv.allocate_slots(request, 9) is not None
    keyed = [kv.block_pool.key_of(b) is not None for b in kv.get_block_ids("a")[0]]
    assert keyed == [True, False, False, True, True, False]


# -- running requests that need nothing ----------------------------------------------


@pytest.mark.parametrize("mix", range(len(drives.MIXES)))
def test_the_short_way_changes_no_answer(
    mix: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = drives.MIXES[mix]
    setup = Drive(groups, 120, 4, 7, lookahead=2, drafts=0, evictions=True, events=True)
    unit = max(fields["block_size"] for _, fields in groups)
    setup = replace(setup, chunk_multiple=unit)
    answers = drives.transcript(setup, "vllm032_sha256_cbor", Parity())
    monkeypatch.setattr(KVCacheCoordinator, "quiet_until", lambda *args: ALWAYS)
    assert answers == drives.transcript(setup, "vllm032_sha256_cbor", Parity())


def test_tokens_in_flight_keep_their_window_and_no_longer() -> None:
    setup = Setup((window(8),), 20)
    kv = setup.manager()
    request = setup.request("a", range(18))
    assert compute(kv, request, upto=16)
    request.num_in_flight_tokens = 4
    assert kv.allocate_slots(request, 1) is not None
    assert [bool(block) for block in kv.get_block_ids("a")[0][:3]] == [0, 1, 1]
    request.num_computed_tokens, request.num_in_flight_tokens = 17, 0
    assert kv.allocate_slots(request, 1) is not None
    assert [bool(block) for block in kv.get_block_ids("a")[0][:3]] == [0, 0, 1]


# -- external tokens -----------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: window(6), lambda: chunk(8), full, mla])
def test_external_room_evicts_no_hit_of_another_group(
    make: Callable[[], KVCacheSpec],
) -> None:
    """The pool is so small that the room must come from cached blocks."""
    setup = Setup((full(), make()), 17)
    kv = setup.manager()
    cache(kv, setup.request("other", range(100, 109)))
    cache(kv, setup.request("a", range(9)))
    request = setup.request("b", [*range(8), *range(50, 74)])
    blocks, hit = kv.get_computed_blocks(request)
    assert hit == 8
    hits = blocks.get_block_ids()
    external = 16
    assert (
        kv.allocate_slots(
            request,
            0,
            hit,
            blocks,
            num_external_computed_tokens=external,
            delay_cache_blocks=True,
        )
        is not None
    )
    kv.check()
    rows = kv.get_block_ids("b")
    for row, had in zip(rows, hits, strict=True):
        assert len(row) == 6
        kept = [(b, h) for b, h in zip(row, had, strict=False) if b]
        assert all(block == hit_block for block, hit_block in kept)
        new = [block for block in row[2:] if block]
        assert len(set(new)) == len(new)
        assert not set(new) & {b for group in hits for b in group}
    assert rows[0][:2] == hits[0]


def test_delayed_blocks_are_hit_once_they_are_there() -> None:
    setup = Setup((full(),))
    kv: KVCacheManager = setup.manager()
    request = setup.request("a", range(17))
    asked = kv.allocate_slots(
        request, 0, num_external_computed_tokens=16, delay_cache_blocks=True
    )
    assert asked is not None
    request.num_computed_tokens = 16
    other = setup.request("b", range(17))
    assert kv.get_computed_blocks(other)[1] == 0
    kv.cache_blocks(request, 8)
    assert kv.get_computed_blocks(other)[1] == 8
    kv.cache_blocks(request, 16)
    assert kv.get_computed_blocks(other)[1] == 16


# -- requests that do not fit the manager ----------------------------------------------


def test_hashes_of_shorter_blocks_are_refused_at_the_lookup() -> None:
    kv = Setup((full(),)).manager()
    request = Request("a", range(32), hash_format=kv_sha256(), hash_block_size=2)
    with pytest.raises(RequestError, match="hash it with blocks of 4 tokens"):
        kv.get_computed_blocks(request)


def test_a_request_does_not_go_back_behind_its_window() -> None:
    setup = Setup((full(), window(6)), 40)
    kv = setup.manager()
    request = setup.request("a", range(24))
    assert compute(kv, request, upto=16)
    assert kv.allocate_slots(request, 4) is not None
    kv.evict_blocks([kv.get_block_ids("a")[0][1]])
    request.num_computed_tokens = 4
    before = kv.get_block_ids("a"), kv.block_pool.get_num_free_blocks()
    with pytest.raises(RequestError, match="free the request and admit it again"):
        kv.allocate_slots(request, 8)
    assert (kv.get_block_ids("a"), kv.block_pool.get_num_free_blocks()) == before
    kv.check()


def test_limits_of_another_length_are_refused() -> None:
    group = KVCacheGroupSpec(("a",), full())
    with pytest.raises(ConfigError, match="max_model_len is 64, in limits it is 65"):
        KVCacheManager(
            KVCacheConfig(4, (), (group,)),
            64,
            4,
            limits=EngineLimits(max_model_len=65),
        )
