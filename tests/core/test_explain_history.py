"""A history is bounded, forgets the oldest, and costs nobody who has none."""

import pytest

from kvplugin.errors import ConfigError
from kvplugin.explain import LookupHistory
from kvplugin.explain.history import block_identity, fingerprints
from kvplugin.manager import KVCacheManager
from tests.core.explain_helpers import (
    evict,
    full,
    lost,
    make_manager,
    make_request,
    run,
    window,
)


def history_of(manager: KVCacheManager) -> LookupHistory:
    assert manager.lookup_history is not None
    return manager.lookup_history


def test_a_capacity_is_positive() -> None:
    with pytest.raises(ConfigError, match="capacity must be positive, got 0"):
        LookupHistory(0)


def test_it_never_holds_more_than_its_capacity() -> None:
    manager = make_manager(full(), window(), num_blocks=20, history=6)
    history = history_of(manager)
    for i in range(40):
        run(manager, make_request(range(i * 7, i * 7 + 60), cache_salt=str(i % 3)))
        assert len(history._cached) <= 6
        assert len(history._lost) <= 6
        assert sum(map(len, history._by_tokens.values())) == len(history._cached)
    assert len(history) == 12
    assert manager.reset_prefix_cache()
    assert len(history) == 6
    assert not history._by_tokens


def test_one_prompt_under_many_salts_is_bounded_too() -> None:
    manager = make_manager(full(), history=5)
    for i in range(30):
        run(manager, make_request(range(20), cache_salt=str(i)))
    assert len(history_of(manager)) == 5
    assert [len(same) for same in history_of(manager)._by_tokens.values()] == [5]


def test_the_oldest_eviction_is_forgotten_first() -> None:
    manager = make_manager(full(), history=2)
    first = make_request(range(48), "first")
    run(manager, first)
    for block in (0, 1, 2):
        evict(manager, first, 0, block)
    explained = manager.explain_lookup(make_request(range(50)))
    assert lost(explained) == {"NEVER_CACHED": 16, "EVICTED": 32, "PARTIAL_BLOCK": 2}


def test_a_key_with_another_block_left_is_not_lost() -> None:
    manager = make_manager(full(), history=5)
    requests = [make_request(range(20), name) for name in "ab"]
    for request in requests:  # both compute the same block, side by side
        assert manager.allocate_slots(request, 20)
    (block,) = manager.get_block_ids("a")[0][:1]
    manager.evict_blocks([block])
    assert history_of(manager).how_lost(0, requests[0].block_hashes[0]) is None
    manager.evict_blocks(manager.get_block_ids("b")[0])
    assert history_of(manager).how_lost(0, requests[0].block_hashes[0]) == ""


def test_fingerprints_know_tokens_only() -> None:
    plain, salted = make_request(range(40)), make_request(range(40), cache_salt="x")
    assert plain.block_hashes != salted.block_hashes
    assert fingerprints(plain, 16, 2) == fingerprints(salted, 16, 2)
    assert fingerprints(make_request(range(1, 41)), 16, 2) != fingerprints(plain, 16, 2)


def test_fingerprints_continue_those_that_are_known() -> None:
    request = make_request(range(80))
    prints = fingerprints(request, 16, 5)
    assert fingerprints(request, 16, 5, [b"", b"", prints[2]])[3:] == prints[3:]
    assert fingerprints(request, 16, 2, prints[:2]) == prints[:2]


def test_prompt_embeddings_are_content() -> None:
    numpy = pytest.importorskip("numpy")
    requests = [
        make_request([0] * 20, prompt_embeds=numpy.full((20, 2), value))
        for value in (1.0, 2.0)
    ]
    one, other = (fingerprints(request, 16, 1) for request in requests)
    assert one != other
    assert block_identity(requests[0], 16) == block_identity(requests[1], 16)


def test_a_pool_without_a_history_has_no_listener() -> None:
    assert make_manager(full()).block_pool.listener is None


def test_generated_tokens_are_followed() -> None:
    manager = make_manager(full(), history=10)
    request = make_request(range(30), "first")
    assert manager.allocate_slots(request, 30)
    for token in range(30, 70):
        request.num_computed_tokens = request.num_tokens
        request.append_output_token_ids(token)
        assert manager.allocate_slots(request, 1) is not None
    manager.free(request)
    explained = manager.explain_lookup(make_request(range(70), cache_salt="x"))
    assert lost(explained) == {"OTHER_IDENTITY": 64, "PARTIAL_BLOCK": 6}
