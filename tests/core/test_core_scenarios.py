"""Faults that users of such managers met, and what is right instead."""

import os
import subprocess
import sys
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplugin.events import BlockRemoved, BlockStored
from kvplugin.managers import AlignedMambaManager
from kvplugin.request import Adapter, Request
from kvplugin.spec import KVCacheSpec
from tests.core.manager_setups import Setup, chunk, full, mamba, window
from tests.core.manager_steps import cache, compute, evict


def lookup(setup: Setup, kv: object, tokens: object, **identity: object) -> int:
    return kv.get_computed_blocks(setup.request("asks", tokens, **identity))[1]  # type: ignore[attr-defined]


# -- 7: who asks -------------------------------------------------------------------

IDENTITIES: list[dict[str, object]] = [
    {},
    {"cache_salt": "X"},
    {"lora_request": Adapter("X")},
    {"lora_request": Adapter("X", epoch=1)},
    {"lora_request": Adapter("X"), "cache_salt": "X"},
    {"weight_epoch": 1},
    {"cache_salt": "XX"},
]


@pytest.mark.parametrize("first", range(len(IDENTITIES)))
def test_7_nobody_hits_what_another_identity_computed(first: int) -> None:
    setup = Setup((full(16),), 9, 16)
    kv = setup.manager()
    cache(kv, setup.request("a", range(33), **IDENTITIES[first]))
    hits = [lookup(setup, kv, range(33), **identity) for identity in IDENTITIES]
    assert hits == [32 if i == first else 0 for i in range(len(IDENTITIES))]


# -- 10: drafts and the window's contiguity ----------------------------------------


@pytest.mark.parametrize(
    ("cached", "drafts", "hit", "nulls"),
    [
        ({2, 3}, False, 8, 2),
        ({2, 3}, True, 0, 0),
        ({1, 2, 3}, True, 6, 1),
        ({0, 1, 2, 3}, True, 6, 1),
        ({0, 1}, True, 2, 0),
        ({0}, False, 2, 0),
        ({0}, True, 0, 0),
        ({1, 3}, False, 0, 0),
    ],
)
def test_10_window_needs_its_blocks_also_behind_a_draft(
    cached: set[int], drafts: bool, hit: int, nulls: int
) -> None:
    setup = Setup((window(4, 2),), 9, 2, drafts=drafts)
    kv = setup.manager()
    evict(kv, cache(kv, setup.request("a", range(9))), cached)
    blocks, found = kv.get_computed_blocks(setup.request("b", range(9)))
    assert found == hit
    (row,) = blocks.get_block_ids()
    assert [not block for block in row] == [i < nulls for i in range(hit // 2)]


@given(
    reach=st.integers(2, 9),
    size=st.integers(1, 3),
    cached=st.sets(st.integers(0, 9)),
    drafts=st.booleans(),
)
def test_10_window_hits_are_the_longest_that_serve(
    reach: int, size: int, cached: set[int], drafts: bool
) -> None:
    setup = Setup((window(reach, size),), 20, size, drafts=drafts)
    kv = setup.manager()
    evict(kv, cache(kv, setup.request("a", range(10 * size + 1))), cached)

    def serves(n: int) -> bool:
        read = {p // size for p in range(max(n * size - reach + 1, 0), n * size)}
        return read | ({n} if drafts else set()) <= cached

    longest = max([n for n in range(1, 11) if serves(n)], default=0)
    assert lookup(setup, kv, range(10 * size + 1)) == longest * size


# -- 11: drafts cost one unit, once ------------------------------------------------


def test_11_draft_drop_is_one_block() -> None:
    specs = (full(16), window(32, 16), window(48, 16))
    plain, setup = Setup(specs, 40, 16, 256), Setup(specs, 40, 16, 256, drafts=True)
    for each, hit in ((plain, 128), (setup, 112)):
        kv = each.manager()
        cache(kv, each.request("a", range(133)))
        assert lookup(each, kv, range(133)) == hit


GROUPS = st.one_of(
    st.builds(full, st.sampled_from([2, 4, 8])),
    st.builds(window, st.integers(2, 20), st.sampled_from([2, 4, 8])),
    st.builds(mamba, st.just("all"), st.sampled_from([2, 4, 8])),
)


@given(specs=st.lists(GROUPS, min_size=1, max_size=5), length=st.integers(2, 60))
def test_11_drafts_cost_at_most_one_alignment_unit(
    specs: list[KVCacheSpec], length: int
) -> None:
    if len(specs) == 1:
        specs *= 2
    unit = max(spec.block_size for spec in specs)
    hits = []
    for drafts in (False, True):
        setup = Setup(tuple(specs), 200, 2, drafts=drafts)
        kv = setup.manager()
        cache(kv, setup.request("a", range(length)))
        hits.append(lookup(setup, kv, range(length)))
    assert hits[0] == (length - 1) // unit * unit
    assert hits[0] - unit <= hits[1] <= hits[0]


# -- 13, 14: states ----------------------------------------------------------------


@pytest.mark.parametrize("mode", ["all", "align"])
def test_13_attention_without_state_is_no_hit(mode: str) -> None:
    setup = Setup((full(16), mamba(mode, 16)), 20, 16, 128)
    kv = setup.manager()
    first = cache(kv, setup.request("a", range(65)), budget=16)
    assert lookup(setup, kv, range(65)) == 64
    evict(kv, first, keep={1}, group=1)
    assert lookup(setup, kv, range(65)) == 32
    evict(kv, first, keep=set(), group=1)
    blocks, hit = kv.get_computed_blocks(setup.request("b", range(65)))
    assert hit == 0
    assert blocks is kv.empty_kv_cache_blocks


@pytest.mark.parametrize("mode", ["all", "align"])
@pytest.mark.parametrize(("sizes", "hash_size"), [((4, 16), 4), ((16, 16), 8)])
def test_14_place_of_a_state_follows_its_own_block_size(
    mode: str, sizes: tuple[int, int], hash_size: int
) -> None:
    setup = Setup((full(sizes[0]), mamba(mode, sizes[1])), 60, hash_size, 128)
    kv = setup.manager()
    cache(kv, setup.request("a", range(49)), budget=16)
    request = setup.request("b", range(52))
    blocks, hit = kv.get_computed_blocks(request)
    assert hit == 48
    attention, states = blocks.get_block_ids()
    assert len(attention) == 48 // sizes[0]
    assert [bool(block) for block in states] == [False, False, True]
    assert compute(kv, request)
    assert len(kv.get_block_ids("b")[1]) == 4
    assert kv.get_block_ids("b")[1][2] == states[2]


# -- 49: counters ------------------------------------------------------------------


def test_49_usage_stays_a_share_over_a_thousand_requests() -> None:
    random, setup = Random(1), Setup((full(), window(9)), 40, max_model_len=64)
    kv = setup.manager()
    running: list[Request] = []
    for i in range(1000):
        tokens = [random.randrange(2) for _ in range(random.randrange(1, 50))]
        request = setup.request(f"r{i}", tokens)
        blocks, hit = kv.get_computed_blocks(request)
        if kv.allocate_slots(request, len(tokens) - hit, hit, blocks) is not None:
            request.num_computed_tokens = len(tokens)
            running.append(request)
        while running and random.random() < 0.5:
            kv.free(running.pop(random.randrange(len(running))))
        assert 0 <= kv.usage <= 1
    for request in running:
        kv.free(request)
    assert kv.usage == 0
    kv.check()


# -- 60: events of sparse groups ---------------------------------------------------


def test_60_sparse_group_says_what_it_is() -> None:
    setup = Setup((full(16), window(32, 16)), 40, 16, 128)
    kv = setup.manager(enable_kv_cache_events=True)
    request = setup.request("a", range(66))
    assert kv.allocate_slots(request, 64, delay_cache_blocks=True) is not None
    request.num_computed_tokens = 64
    assert kv.allocate_slots(request, 2) is not None
    dense, sparse = kv.take_events()
    assert isinstance(dense, BlockStored)
    assert isinstance(sparse, BlockStored)
    assert (dense.group_idx, dense.kv_cache_spec_kind) == (0, "full_attention")
    assert dense.kv_cache_spec_sliding_window is None
    assert len(dense.block_hashes) == 4
    assert (sparse.group_idx, sparse.kv_cache_spec_kind) == (1, "sliding_window")
    assert sparse.kv_cache_spec_sliding_window == 32
    assert len(sparse.token_ids) == 64
    assert sparse.block_hashes == dense.block_hashes[2:]
    kv.evict_blocks(kv.get_block_ids("a")[1])
    removed = kv.take_events()
    assert {(type(event), event.group_idx) for event in removed} == {(BlockRemoved, 1)}  # type: ignore[attr-defined]


def test_60_state_group_names_the_state_that_it_keeps() -> None:
    setup = Setup((mamba("align", 16),), 9, 16, 128)
    kv = setup.manager(enable_kv_cache_events=True)
    request = setup.request("a", range(66))
    assert compute(kv, request, upto=64)
    (event,) = kv.take_events()
    assert isinstance(event, BlockStored)
    assert (event.kv_cache_spec_kind, len(event.block_hashes)) == ("mamba", 1)
    assert len(event.token_ids) == 64


# -- 63: checkpoints ---------------------------------------------------------------


@pytest.mark.parametrize(("shared", "hit"), [(64, 64), (48, 0)])
@pytest.mark.parametrize("kept", [[48], [48, 64]])
def test_63_checkpoint_at_the_junction_serves_the_third(
    shared: int, hit: int, kept: list[int]
) -> None:
    setup = Setup((full(16), mamba("align", 16)), 60, 16, 128)
    kv = setup.manager()
    states = kv.coordinator.single_type_managers[1]
    assert isinstance(states, AlignedMambaManager)
    prompts = [
        [*range(shared), *range(start, start + 66 - shared)]
        for start in (100, 200, 300)
    ]
    first = setup.request("first", prompts[0])
    assert compute(kv, first, upto=64)
    kv.free(first)
    second = setup.request("second", prompts[1])
    assert kv.get_computed_blocks(second)[1] == hit
    if hit:
        return
    states.set_checkpoints("second", kept)
    assert compute(kv, second, upto=48)
    for n in (16, 2):
        assert kv.allocate_slots(second, n) is not None
        second.num_computed_tokens += n
    kv.free(second)
    kv.new_step_starts()
    assert lookup(setup, kv, prompts[2]) == 48
    assert lookup(setup, kv, prompts[1]) == max(kept)


# -- 64: what goes first -----------------------------------------------------------


@pytest.mark.parametrize("lookahead", [0, 20])
def test_64_blocks_that_nobody_can_hit_go_first(lookahead: int) -> None:
    setup = Setup((full(16),), 6, 16, 128)
    kv = setup.manager()
    others = cache(kv, setup.request("b", range(100, 132)))
    request = setup.request("a", range(20))
    assert kv.allocate_slots(request, 20, num_lookahead_tokens=lookahead) is not None
    (row,) = kv.get_block_ids("a")
    kv.free(request)
    new = kv.allocate_slots(setup.request("c", range(200, 210)), 10)
    assert new is not None
    assert new.get_block_ids()[0][0] in row[1:]
    assert lookup(setup, kv, range(20)) == 16
    assert lookup(setup, kv, [*others.all_token_ids, 1]) == 32


@pytest.mark.parametrize("drafts", [False, True])
def test_64_drafts_and_coarse_blocks_lose_one_unit(drafts: bool) -> None:
    setup = Setup((full(64), window(32, 16)), 40, 16, 512, drafts=drafts)
    kv = setup.manager()
    cache(kv, setup.request("a", range(200)))
    assert lookup(setup, kv, range(200)) == (128 if drafts else 192)


# -- 66: what fits -----------------------------------------------------------------


@pytest.mark.parametrize(
    "specs",
    [
        (full(16),),
        (window(32, 16),),
        (chunk(32, 16),),
        (full(16), window(32, 16)),
        (full(16), mamba("align", 16)),
    ],
)
@pytest.mark.parametrize("length", [1, 16, 100, 160])
def test_66_what_is_admitted_completes(
    specs: tuple[KVCacheSpec, ...], length: int
) -> None:
    setup = Setup(specs, 32, 16, 160, budget=32)
    kv = setup.manager()
    admitted = []
    while True:
        start = 1000 * len(admitted)
        request = setup.request(f"r{start}", range(start, start + length))
        if not kv.can_fit_full_sequence(request):
            break
        assert compute(kv, request, budget=32)
        admitted.append(request)
    assert admitted
    if len(specs) == 1 and specs[0] == full(16):
        assert len(admitted) == 31 // -(-length // 16)
        assert not compute(kv, request, budget=32)
    kv.free(request)
    for request in admitted:
        kv.free(request)
    assert kv.usage == 0


@pytest.mark.parametrize(
    ("other", "num_blocks"),
    [(window(32, 16), 16), (chunk(32, 16), 15), (mamba("align", 16), 13)],
)
@pytest.mark.parametrize("shared", range(16, 160, 16))
def test_66_idle_pool_admits_what_an_empty_one_does(
    other: KVCacheSpec, num_blocks: int, shared: int
) -> None:
    setup = Setup((full(16), other), num_blocks, 16, 160, budget=32)
    kv = setup.manager()
    assert kv.can_fit_full_sequence(setup.request("a", range(160)))
    cache(kv, setup.request("a", range(shared + 1)), budget=16)
    second = setup.request("b", [*range(shared), *range(1000, 1160 - shared)])
    blocks, hit = kv.get_computed_blocks(second)
    assert hit or shared > 112
    assert kv.can_fit_full_sequence(second, hit, blocks)
    assert compute(kv, second, budget=32)


def test_66_what_can_never_fit_is_refused_by_an_empty_pool() -> None:
    setup = Setup((full(16), window(32, 16)), 15, 16, 160, budget=32)
    assert not setup.manager().can_fit_full_sequence(setup.request("a", range(160)))


# -- keys of other processes -------------------------------------------------------

_KEYS = """
from tests.core.manager_setups import Setup, full
from tests.core.manager_steps import compute
setup = Setup((full(),), 9)
kv = setup.manager()
assert compute(kv, setup.request("a", range(9), cache_salt="s"))
print([kv.block_pool.key_of(block).hex() for block in kv.get_block_ids("a")[0][:2]])
"""


def test_keys_are_the_same_in_every_process() -> None:
    answers = {
        subprocess.run(
            [sys.executable, "-c", _KEYS],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert len(answers) == 1
