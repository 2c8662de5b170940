"""Each reason for a lost hit, in the smallest situation that shows it."""

import json
from dataclasses import replace

import pytest

from kvplugin.explain import LookupExplanation
from kvplugin.hashing import get_hash_format
from kvplugin.manager import KVCacheManager
from kvplugin.parity import Parity
from kvplugin.request import Adapter, MediaItem, MediaRange, Request
from tests.core.explain_helpers import (
    BLOCK,
    check_sums,
    chunked,
    evict,
    full,
    lost,
    make_manager,
    make_request,
    mamba,
    run,
    window,
)

UNKNOWN = "NEVER_CACHED_OR_EVICTED"


def explain(manager: KVCacheManager, request: Request) -> LookupExplanation:
    explained = manager.explain_lookup(request)
    check_sums(explained)
    assert explained.hit_tokens == manager.get_computed_blocks(request)[1]
    return explained


def cached(manager: KVCacheManager, num_tokens: int, **options: object) -> Request:
    """Compute a prompt of 0, 1, 2, ..."""
    request = make_request(range(num_tokens), "first", **options)
    run(manager, request)
    return request


# -- one group -------------------------------------------------------------------------


def test_a_new_prompt_was_never_cached() -> None:
    explained = explain(make_manager(full(), history=10), make_request(range(40)))
    assert lost(explained) == {"NEVER_CACHED": 32, "PARTIAL_BLOCK": 8}
    assert lost(explained.groups[0]) == lost(explained)


def test_without_a_history_it_may_have_been_evicted() -> None:
    explained = explain(make_manager(full()), make_request(range(40)))
    assert lost(explained) == {UNKNOWN: 32, "PARTIAL_BLOCK": 8}
    assert "attach a LookupHistory" in str(explained)


def test_the_last_token_costs_its_block() -> None:
    manager = make_manager(full())
    cached(manager, 48)
    explained = explain(manager, make_request(range(48)))
    assert explained.hit_tokens == 32
    assert lost(explained) == {"LAST_TOKEN": 16}


def test_a_tail_that_fills_no_block() -> None:
    manager = make_manager(full())
    cached(manager, 50)
    explained = explain(manager, make_request(range(50)))
    assert lost(explained) == {"PARTIAL_BLOCK": 2}


def test_an_evicted_block_takes_those_behind_it_along() -> None:
    manager = make_manager(full(), history=10)
    evict(manager, cached(manager, 64), 0, 1)
    explained = explain(manager, make_request([*range(64), *range(90, 110)]))
    assert explained.hit_tokens == 16
    assert lost(explained) == {"EVICTED": 48, "NEVER_CACHED": 16, "PARTIAL_BLOCK": 4}
    assert [loss.detail for loss in explained.losses] == [
        "",
        "tokens [16, 32) are missing",
        "",
        "",
    ]


def test_blocks_evicted_for_others() -> None:
    manager = make_manager(full(), num_blocks=5, history=10)
    cached(manager, 48)
    run(manager, make_request(range(100, 132), "other"))
    explained = explain(manager, make_request(range(60)))
    assert lost(explained) == {"EVICTED": 16, "PARTIAL_BLOCK": 12}


def test_a_reset_says_so() -> None:
    manager = make_manager(full(), history=10)
    cached(manager, 40)
    assert manager.reset_prefix_cache()
    explained = explain(manager, make_request(range(40)))
    assert lost(explained) == {"EVICTED": 32, "PARTIAL_BLOCK": 8}
    assert explained.losses[0].detail == "the cache was reset"


def test_a_block_that_came_back_is_not_evicted() -> None:
    manager = make_manager(full(), history=10)
    for _ in range(2):
        evict(manager, cached(manager, 32), 0, 1)
    cached(manager, 32)
    assert lost(explain(manager, make_request(range(40)))) == {"PARTIAL_BLOCK": 8}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"cache_salt": "mine"}, "salt"),
        ({"lora_request": Adapter("mine")}, "adapter"),
        ({"weight_epoch": 1}, "weight epoch"),
        ({"mm_features": (MediaItem("mine", MediaRange(4, 8)),)}, "media"),
        ({"cache_salt": "mine", "weight_epoch": 1}, "weight epoch and salt"),
    ],
)
def test_the_same_tokens_of_somebody_else(
    options: dict[str, object], field: str
) -> None:
    manager = make_manager(full(), history=10)
    cached(manager, 40)
    explained = explain(manager, make_request(range(40), **options))
    assert lost(explained) == {"OTHER_IDENTITY": 32, "PARTIAL_BLOCK": 8}
    assert explained.losses[0].detail == f"differs in {field}"


def test_of_several_identities_the_nearest_is_named() -> None:
    manager = make_manager(full(), history=10)
    cached(manager, 40, cache_salt="a", weight_epoch=1)
    cached(manager, 40, cache_salt="b")
    explained = explain(manager, make_request(range(40), cache_salt="c"))
    assert explained.losses[0].detail == "differs in salt"


def test_somebody_elses_blocks_that_are_gone_help_nobody() -> None:
    manager = make_manager(full(), history=10)
    evict(manager, cached(manager, 40), 0, 1)
    explained = explain(manager, make_request(range(40), cache_salt="mine"))
    assert [loss.reason.name for loss in explained.losses[:2]] == [
        "OTHER_IDENTITY",
        "NEVER_CACHED",
    ]


def test_a_media_item_changes_identity_from_its_block_on() -> None:
    manager = make_manager(full(), history=10)
    cached(manager, 60, mm_features=(MediaItem("a", MediaRange(20, 8)),))
    other = make_request(range(60), mm_features=(MediaItem("b", MediaRange(20, 8)),))
    explained = explain(manager, other)
    assert explained.hit_tokens == 16
    assert lost(explained) == {"OTHER_IDENTITY": 32, "PARTIAL_BLOCK": 12}


def test_a_request_that_skips_the_cache() -> None:
    manager = make_manager(full())
    cached(manager, 40)
    explained = explain(
        manager, make_request(range(50), skip_reading_prefix_cache=True)
    )
    assert lost(explained) == {"SKIPPED": 32, UNKNOWN: 16, "PARTIAL_BLOCK": 2}
    assert explained.groups[0].alone_tokens == 32


def test_caching_off() -> None:
    manager = make_manager(full(), mamba("none", 10_000), enable_caching=False)
    explained = explain(manager, make_request(range(50)))
    assert lost(explained) == {"DISABLED": 50}
    assert [lost(group) for group in explained.groups] == [{"DISABLED": 50}] * 2


def test_no_groups_no_cache() -> None:
    assert lost(explain(make_manager(), make_request(range(5)))) == {"DISABLED": 5}


def test_a_request_without_hashes() -> None:
    explained = explain(make_manager(full()), make_request(range(40), hash_format=None))
    assert lost(explained) == {"UNHASHED": 32, "PARTIAL_BLOCK": 8}


def test_a_draft_model_needs_the_block_behind() -> None:
    manager = make_manager(full(), use_eagle=True)
    cached(manager, 48)
    explained = explain(manager, make_request(range(80)))
    assert explained.hit_tokens == 32
    assert explained.groups[0].alone_tokens == 32
    assert lost(explained) == {"DRAFT_DROP": 16, UNKNOWN: 16, "LAST_TOKEN": 16}


def test_a_window_that_lost_a_block() -> None:
    manager = make_manager(window(32))
    evict(manager, cached(manager, 96), 0, 4)
    explained = explain(manager, make_request(range(100)))
    # Up to 64 tokens block 4 is not read; 96 needs block 5 and 4, 80 needs 4 and 3.
    assert explained.hit_tokens == 64
    assert lost(explained) == {"WINDOW_GAP": 32, "PARTIAL_BLOCK": 4}
    assert explained.losses[1].detail == "tokens [64, 80) are missing"


def test_a_window_whose_block_was_seen_to_be_evicted() -> None:
    manager = make_manager(window(32), history=10)
    evict(manager, cached(manager, 96), 0, 4)
    explained = explain(manager, make_request(range(100)))
    assert lost(explained) == {"EVICTED": 32, "PARTIAL_BLOCK": 4}


def test_a_window_of_one_token() -> None:
    explained = explain(make_manager(window(1), history=1), make_request(range(40)))
    assert lost(explained) == {"NEVER_CACHED": 32, "PARTIAL_BLOCK": 8}


def test_a_chunk_is_read_from_its_start() -> None:
    manager = make_manager(chunked(48))
    evict(manager, cached(manager, 96), 0, 3)
    explained = explain(manager, make_request(range(95)))
    assert explained.hit_tokens == 48
    assert lost(explained) == {"WINDOW_GAP": 32, "PARTIAL_BLOCK": 15}


def test_a_state_group_alone() -> None:
    manager = make_manager(mamba("align"), history=10)
    run(manager, make_request(range(66), "first"), [64])
    explained = explain(manager, make_request([*range(48), *range(90, 108)]))
    # Nothing says that the first 48 tokens were computed: hashes of states cover
    # their whole prefix, and those of the one checkpoint cover other tokens.
    assert lost(explained) == {"NEVER_CACHED": 64, "PARTIAL_BLOCK": 2}


# -- several groups --------------------------------------------------------------------


def test_scenario_63_tokens_lost_to_a_missing_state() -> None:
    manager = make_manager(full(), mamba("align"), history=50)
    run(manager, make_request(range(66), "first"), [64])
    request = make_request([*range(48), *range(90, 108)])
    explained = explain(manager, request)
    assert explained.hit_tokens == 0
    assert lost(explained) == {
        "MISSING_STATE": 48,
        "NEVER_CACHED": 16,
        "PARTIAL_BLOCK": 2,
    }
    dense, state = explained.groups
    assert (dense.alone_tokens, state.alone_tokens) == (48, 0)
    assert lost(dense) == {"OTHER_GROUP": 48, "NEVER_CACHED": 16, "PARTIAL_BLOCK": 2}
    assert dense.losses[0].detail == "group 1 mamba"
    assert lost(state) == lost(explained)
    assert str(explained) == (
        "request asks: 0 of 66 tokens hit; lost: 48 missing state, 16 never cached, "
        "2 partial block\n"
        "  group 0 full_attention, alone 48: 48 other group [0, 48): group 1 mamba; "
        "16 never cached [48, 64); 2 partial block [64, 66)\n"
        "  group 1 mamba, alone 0: 48 missing state [0, 48); "
        "16 never cached [48, 64); 2 partial block [64, 66)"
    )


def test_a_checkpoint_that_was_evicted() -> None:
    manager = make_manager(full(), mamba(), history=50)
    evict(manager, cached(manager, 40), 1, 1)
    explained = explain(manager, make_request(range(40)))
    assert explained.hit_tokens == 16
    assert lost(explained) == {"EVICTED": 16, "PARTIAL_BLOCK": 8}
    assert lost(explained.groups[0]) == {"OTHER_GROUP": 16, "PARTIAL_BLOCK": 8}


def test_groups_that_would_go_far_alone_but_never_to_the_same_length() -> None:
    manager = make_manager(window(17), mamba())
    first = cached(manager, 80)
    for block in (1, 3):
        evict(manager, first, 0, block)
    for block in (0, 2, 4):
        evict(manager, first, 1, block)
    explained = explain(manager, make_request(range(90)))
    assert explained.hit_tokens == 0
    assert [group.alone_tokens for group in explained.groups] == [80, 64]
    assert lost(explained) == {
        "MISSING_STATE": 48,
        "WINDOW_GAP": 32,
        "PARTIAL_BLOCK": 10,
    }
    assert lost(explained.groups[0]) == {
        "OTHER_GROUP": 48,
        "WINDOW_GAP": 32,
        "PARTIAL_BLOCK": 10,
    }


def test_rounding_to_the_larger_block() -> None:
    manager = make_manager(full(16), window(32, 64))
    cached(manager, 128)
    explained = explain(manager, make_request(range(120)))
    assert explained.hit_tokens == 64
    assert [group.alone_tokens for group in explained.groups] == [112, 64]
    assert lost(explained.groups[0]) == {"ROUNDING": 48, "PARTIAL_BLOCK": 8}
    assert lost(explained.groups[1]) == {"PARTIAL_BLOCK": 56}


def test_rounding_where_a_unit_is_cached_in_part() -> None:
    manager = make_manager(full(16), mamba("all", 64), history=50)
    evict(manager, cached(manager, 128), 0, 6)
    explained = explain(manager, make_request(range(140)))
    assert explained.hit_tokens == 64
    assert lost(explained.groups[0]) == {
        "ROUNDING": 32,
        "EVICTED": 32,
        "PARTIAL_BLOCK": 12,
    }
    assert explained.groups[0].losses[2].detail == "tokens [96, 112) are missing"
    assert lost(explained.groups[1]) == {"OTHER_GROUP": 64, "PARTIAL_BLOCK": 12}


def test_the_draft_drop_happens_once_for_all_groups() -> None:
    manager = make_manager(full(), window(32), window(64), use_eagle=True)
    cached(manager, 48)
    explained = explain(manager, make_request(range(60)))
    assert explained.hit_tokens == 32
    for part in (explained, *explained.groups):
        assert lost(part) == {"DRAFT_DROP": 16, "PARTIAL_BLOCK": 12}


def test_the_repeated_draft_drop_of_v019() -> None:
    parity = Parity(draft_drop_per_lookup=True)
    manager = make_manager(
        full(), window(32), window(64), use_eagle=True, parity=parity
    )
    cached(manager, 64)
    explained = explain(manager, make_request(range(72)))
    assert explained.hit_tokens == 0
    assert lost(explained) == {"DRAFT_DROP": 64, "PARTIAL_BLOCK": 8}


# -- a hash format that proves nothing -------------------------------------------------


def test_a_hit_of_other_tokens_is_unproven() -> None:
    pytest.importorskip("xxhash")
    weak = get_hash_format("xxh3_128")
    manager = make_manager(full(), hash_format=weak)
    run(manager, make_request(range(40), "first", hash_format=weak))
    forged = make_request([*range(16), *range(60, 84)], hash_format=weak)
    forged.block_hashes[:] = make_request(range(40), hash_format=weak).block_hashes
    explained = explain(manager, forged)
    assert explained.hit_tokens == 16
    assert lost(explained) == {"UNPROVEN": 16, "PARTIAL_BLOCK": 8}


# -- reading ---------------------------------------------------------------------------


def test_json() -> None:
    manager = make_manager(full(), mamba())
    evict(manager, cached(manager, 40), 1, 1)
    told = json.loads(json.dumps(explain(manager, make_request(range(40))).as_dict()))
    assert told["lost_tokens"] == 24
    assert told["losses"][0] == {
        "reason": "MISSING_STATE",
        "tokens": 16,
        "start": 16,
        "stop": 32,
        "group": 1,
        "detail": "",
    }
    assert [group["alone_tokens"] for group in told["groups"]] == [32, 16]


def test_nothing_lost_reads_well() -> None:
    explained = explain(make_manager(full()), make_request(range(BLOCK)))
    nothing = replace(explained, queried_tokens=0, losses=())
    assert (
        str(nothing).splitlines()[0] == "request asks: 0 of 0 tokens hit; lost: nothing"
    )
