"""Whatever is cached and whoever asks: losses add up, and asking changes nothing."""

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplugin.explain import LookupExplanation, LostHit
from kvplugin.manager import KVCacheManager
from kvplugin.parity import Parity
from kvplugin.policies.eviction import LRU
from kvplugin.request import Request
from kvplugin.spec import ChunkedLocalAttentionSpec, KVCacheSpec
from tests.core.explain_helpers import (
    BLOCK,
    check_sums,
    chunked,
    full,
    make_manager,
    make_request,
    mamba,
    run,
    window,
)

SIZES = st.sampled_from([BLOCK, 2 * BLOCK, 3 * BLOCK])
SPECS = st.one_of(
    SIZES.map(full),
    st.builds(window, st.sampled_from([1, 2, 17, 40, 100]), SIZES),
    SIZES.map(lambda size: mamba("all", size)),
)
UNIFORM_SPECS = st.one_of(
    st.just(full()),
    st.builds(window, st.sampled_from([16, 40])),
    st.builds(chunked, st.sampled_from([8, 32, 50])),
    st.just(mamba()),
)
"""Chunked groups want one block size for all, and no draft model."""

PROMPTS = st.tuples(
    st.sampled_from([0, 0, 0, 1000]),
    st.sampled_from([0, 48, 96, 144, 192]),
    st.integers(1, 50),
)
"""Prefix, how many of its tokens, and how many of another's after them."""


@st.composite
def managers(draw: st.DrawFn) -> KVCacheManager:
    specs: list[KVCacheSpec] = draw(
        st.lists(SPECS, min_size=1, max_size=3)
        | st.lists(UNIFORM_SPECS, min_size=1, max_size=3)
    )
    has_chunks = any(isinstance(spec, ChunkedLocalAttentionSpec) for spec in specs)
    return make_manager(
        *specs,
        num_blocks=draw(st.sampled_from([60, 200])),
        history=draw(st.sampled_from([0, 0, 3, 500])),
        use_eagle=not has_chunks and draw(st.booleans()),
        parity=Parity(draft_drop_per_lookup=draw(st.booleans())),
    )


@st.composite
def requests(draw: st.DrawFn) -> Request:
    first, shared, rest = draw(PROMPTS)
    return make_request(
        [*range(first, first + shared), *range(5000 + first, 5000 + first + rest)],
        "asks",
        cache_salt=draw(st.sampled_from([None, None, None, "x"])),
        skip_reading_prefix_cache=draw(st.sampled_from([None, None, None, True])),
    )


def compute(manager: KVCacheManager, request: Request, data: Any) -> None:
    left = request.num_tokens - manager.get_computed_blocks(request)[1]
    first_step = data.draw(st.integers(0, left - 1))
    rows = run(manager, request, [first_step] if first_step else [])
    ids = sorted({block for row in rows for block in row if block})
    chance = data.draw(st.randoms(use_true_random=False))
    manager.evict_blocks(chance.sample(ids, min(len(ids), chance.randrange(5))))


def state_of(manager: KVCacheManager) -> Any:
    """With the order in which free blocks would be used."""
    pool, history = manager.block_pool, manager.lookup_history
    return (
        [pool.ref_count(block) for block in range(pool.num_blocks)],
        [pool.key_of(block) for block in range(pool.num_blocks)],
        [dict(pool.cached_blocks(i)) for i in range(manager.num_kv_cache_groups)],
        deepcopy(pool).get_new_blocks(pool.get_num_free_blocks()),
        vars(manager.prefix_cache_stats).copy(),
        history
        and (
            list(history._cached.items()),
            list(history._lost.items()),
            {key: list(same) for key, same in history._by_tokens.items()},
        ),
    )


def check_blame(manager: KVCacheManager, explained: LookupExplanation) -> None:
    """Every lost token is somebody's own, and only those who had it blame others."""
    assert all(loss.reason is not LostHit.OTHER_GROUP for loss in explained.losses)
    for group in explained.groups:
        assert group.alone_tokens >= explained.hit_tokens
        for loss in group.losses:
            assert loss.group == (
                None if loss.reason is LostHit.SKIPPED else group.group
            )
            if loss.reason is LostHit.OTHER_GROUP:
                assert len(explained.groups) > 1
                # 0.19.1 takes a block from whatever was found, from "alone" too.
                if not manager.parity.draft_drop_per_lookup:
                    assert loss.stop <= group.alone_tokens


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    manager=managers(),
    earlier=st.lists(requests(), min_size=1, max_size=4),
    asks=requests(),
    data=st.data(),
)
def test_losses_add_up_and_asking_changes_nothing(
    manager: KVCacheManager, earlier: list[Request], asks: Request, data: Any
) -> None:
    for request in earlier:
        compute(manager, request, data)
    before = state_of(manager)
    explained = manager.explain_lookup(asks)
    assert state_of(manager) == before
    check_sums(explained)
    check_blame(manager, explained)
    assert explained.hit_tokens == manager.get_computed_blocks(asks)[1]
    assert str(explained)
    manager.check()


def test_asking_calls_no_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager(full(), window(), mamba(), history=10, use_eagle=True)
    run(manager, make_request(range(100), "first"))
    for name in ("insert", "hit", "pin", "release", "forget", "victims", "step"):
        monkeypatch.setattr(LRU, name, lambda *_: pytest.fail("the policy was called"))
    check_sums(manager.explain_lookup(make_request(range(90))))
