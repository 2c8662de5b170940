"""Which layers share a block table, and which tensor holds them."""

import logging
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplugin.errors import CapacityError, ConfigError
from kvplugin.groups import (
    GroupingConfig,
    check_groups,
    generate_scheduler_kv_cache_config,
    get_kv_cache_config_from_groups,
    get_kv_cache_configs,
    get_kv_cache_groups,
    group_size,
    unify_kv_cache_spec_page_size,
)
from kvplugin.spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

HEADS: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 2,
    "head_size": 64,
    "dtype": "bfloat16",
}
PAGE = 2 * 16 * 2 * 64 * 2
FULL = FullAttentionSpec(**HEADS)
WINDOW = SlidingWindowSpec(**HEADS, sliding_window=64)
CHUNK = ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=64)
MAMBA = MambaSpec(16, ((PAGE,),), ("int8",))
CONFIG = GroupingConfig(max_model_len=1000, max_num_batched_tokens=100)


def config(**changes: Any) -> GroupingConfig:
    base = {"max_model_len": 1000, "max_num_batched_tokens": 100}
    return GroupingConfig(**base | changes)


def layers(**counts: tuple[int, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """`full=(2, FULL)` -> full.0, full.1."""
    return {
        f"{kind}.{i}": spec
        for kind, (count, spec) in counts.items()
        for i in range(count)
    }


def names_of(groups: list[KVCacheGroupSpec]) -> list[tuple[str, ...]]:
    return [group.layer_names for group in groups]


# -- the seed's examples -------------------------------------------------------------


def test_ten_full_and_twenty_window_layers_are_three_groups_in_ten_tensors() -> None:
    specs = layers(full=(10, FULL), sw=(20, WINDOW))
    found = get_kv_cache_configs([specs], CONFIG, [1 << 24]).configs[0]
    groups = found.kv_cache_groups
    assert groups[0].layer_names == tuple(f"full.{i}" for i in range(10))
    assert groups[1].layer_names == tuple(f"sw.{i}" for i in range(0, 20, 2))
    assert groups[2].layer_names == tuple(f"sw.{i}" for i in range(1, 20, 2))
    assert [group.kv_cache_spec for group in groups] == [FULL, WINDOW, WINDOW]
    tensors = found.kv_cache_tensors
    assert [tensor.shared_by for tensor in tensors] == [
        (f"full.{i}", f"sw.{2 * i}", f"sw.{2 * i + 1}") for i in range(10)
    ]
    assert found.num_blocks == (1 << 24) // (10 * PAGE)
    assert {tensor.size for tensor in tensors} == {found.num_blocks * PAGE}


@pytest.mark.parametrize(
    ("counts", "size"),
    [((10, 20), 10), ((12, 13), 13), ((10, 52), 10), ((2, 3), 2), ((3,), 3)],
)
def test_layers_of_a_group(counts: tuple[int, ...], size: int) -> None:
    assert group_size(counts) == size


def test_padding_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    specs = layers(full=(10, FULL), sw=(52, WINDOW))
    with caplog.at_level(logging.WARNING, "vllm.kvplugin"):
        groups = get_kv_cache_groups(specs, CONFIG)
    assert [len(group.layer_names) for group in groups] == [10, 9, 9, 9, 9, 8, 8]
    assert (
        "Add 8 padding layers, may waste at most 15.38% KV cache memory" in caplog.text
    )


def test_no_layers_no_groups_and_one_block() -> None:
    assert get_kv_cache_groups({}, CONFIG) == []
    found = get_kv_cache_configs([{}], CONFIG, [0]).configs
    assert found == (KVCacheConfig(1, (), ()),)


def test_one_kind_of_several_shapes_has_a_tensor_a_layer() -> None:
    wide = FullAttentionSpec(**HEADS | {"num_kv_heads": 4})
    specs: dict[str, KVCacheSpec] = {"a": FULL, "b": wide}
    found = get_kv_cache_configs([specs], CONFIG, [1 << 21]).configs[0]
    (group,) = found.kv_cache_groups
    assert isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
    blocks = (1 << 21) // (3 * PAGE)
    assert [(t.size, t.shared_by) for t in found.kv_cache_tensors] == [
        (blocks * PAGE, ("a",)),
        (blocks * 2 * PAGE, ("b",)),
    ]
    scheduler = generate_scheduler_kv_cache_config([found])
    assert scheduler.kv_cache_groups[0].kv_cache_spec == FULL
    assert scheduler.kv_cache_groups[0].layer_names == ("a", "b")


# -- page sizes ----------------------------------------------------------------------


def test_smaller_pages_get_larger_blocks() -> None:
    narrow = SlidingWindowSpec(**HEADS | {"num_kv_heads": 1}, sliding_window=64)
    unified = unify_kv_cache_spec_page_size({"a": FULL, "b": narrow})
    assert unified == {"a": FULL, "b": narrow.copy_with_new_block_size(32)}


ODD = SlidingWindowSpec(**HEADS | {"head_size": 48}, sliding_window=64)
STATE = MambaSpec(16, ((100,),), ("int8",))
ODD_MLA = MLAAttentionSpec(**HEADS | {"num_kv_heads": 1, "head_size": 100})


@pytest.mark.parametrize("odd", [ODD, STATE])
def test_pages_that_do_not_divide_are_refused_or_padded(odd: KVCacheSpec) -> None:
    specs = {"a": FULL, "b": odd}
    with pytest.raises(
        ConfigError,
        match=r"not divisible by the maximum page size.*'b'.*pad_page_sizes",
    ):
        get_kv_cache_groups(specs, CONFIG)
    groups = get_kv_cache_groups(specs, config(pad_page_sizes=True))
    assert {group.kv_cache_spec.page_size_bytes for group in groups} == {PAGE}
    assert groups[1].kv_cache_spec.real_page_size_bytes == odd.real_page_size_bytes


@pytest.mark.parametrize("pad", [False, True])
def test_mla_pages_that_do_not_divide_have_no_way_out(pad: bool) -> None:
    with pytest.raises(ConfigError, match="cannot be padded"):
        get_kv_cache_groups(
            {"a": WINDOW, "b": ODD_MLA, "c": FULL}, config(pad_page_sizes=pad)
        )


# -- the hybrid manager off, for every pair of kinds (scenario 62) --------------------

KINDS: Mapping[str, KVCacheSpec] = {
    "full": FULL,
    "latent": MLAAttentionSpec(**HEADS | {"num_kv_heads": 4}),
    "window": WINDOW,
    "chunk": CHUNK,
    "recurrent": MAMBA,
    "sink": SinkFullAttentionSpec(**HEADS, sink_len=16),
    "large blocks": SlidingWindowSpec(
        **HEADS | {"block_size": 32, "num_kv_heads": 1}, sliding_window=64
    ),
}
UNIFIED = {"full", "latent", "window", "chunk"}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_every_pair_works_or_is_refused_by_name(
    first: str, second: str, disabled: bool, shared: bool
) -> None:
    specs = layers(a=(2, KINDS[first]), b=(3, KINDS[second]))
    given_specs = dict(specs)
    targets = {"user": "a.1"} if shared else {}
    choice = config(
        disable_hybrid_kv_cache_manager=disabled, kv_sharing_targets=targets
    )
    has_full = {first, second} & {"full", "latent"}
    if disabled and first != second and not ({first, second} <= UNIFIED and has_full):
        with pytest.raises(ConfigError, match=r"failed to convert.*disable_hybrid"):
            get_kv_cache_groups(specs, choice)
    else:
        groups = get_kv_cache_groups(specs, choice)
        assert sorted(sum(names_of(groups), ())) == sorted([*specs, *targets])
        if disabled:
            assert len(groups) == 1
        check_groups(groups, specs)
    assert specs == given_specs


def test_unified_layers_keep_page_and_window() -> None:
    window = SlidingWindowSpec(**HEADS, head_size_v=32, sliding_window=64)
    off = config(disable_hybrid_kv_cache_manager=True)
    (group,) = get_kv_cache_groups({"a": FULL, "b": window}, off)
    assert isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
    assert group.kv_cache_spec.kv_cache_specs["b"] == FullAttentionSpec(
        **HEADS, head_size_v=32, sliding_window=64
    )


# -- draft layers --------------------------------------------------------------------


def test_draft_layers_are_kept_together() -> None:
    specs = layers(full=(3, FULL), sw=(4, WINDOW), draft=(2, WINDOW))
    drafts = frozenset({"draft.0", "draft.1"})
    apart = get_kv_cache_groups(specs, CONFIG)
    assert sum(not drafts.isdisjoint(group.layer_names) for group in apart) == 2
    groups = get_kv_cache_groups(specs, config(draft_layers=drafts))
    assert [group.is_eagle_group for group in groups] == [False, True, False]
    assert drafts < set(groups[1].layer_names)
    assert [len(group.layer_names) for group in groups] == [3, 3, 3]
    check_groups(groups, specs)


def test_draft_layers_may_fill_a_group() -> None:
    specs = layers(full=(3, FULL), sw=(3, WINDOW), draft=(3, WINDOW))
    drafts = frozenset(f"draft.{i}" for i in range(3))
    groups = get_kv_cache_groups(specs, config(draft_layers=drafts))
    assert set(groups[1].layer_names) == drafts
    assert groups[2].layer_names == ("sw.0", "sw.1", "sw.2")


def test_draft_layers_that_are_together_stay_where_they_are() -> None:
    specs = layers(full=(2, FULL), sw=(3, WINDOW), draft=(1, WINDOW))
    groups = get_kv_cache_groups(specs, config(draft_layers=frozenset({"draft.0"})))
    assert names_of(groups) == names_of(get_kv_cache_groups(specs, CONFIG))
    assert [group.is_eagle_group for group in groups] == [False, False, True]


@pytest.mark.parametrize(
    "specs",
    [
        layers(full=(3, FULL), sw=(3, WINDOW), draft=(1, FULL)) | {"draft.1": WINDOW},
        layers(full=(2, FULL), sw=(2, WINDOW), draft=(3, WINDOW)),
    ],
)
def test_draft_layers_in_several_groups_are_refused(
    specs: dict[str, KVCacheSpec],
) -> None:
    drafts = frozenset(name for name in specs if name.startswith("draft"))
    with pytest.raises(
        ConfigError, match="All drafting layers should belong to the same kv cache gr"
    ):
        get_kv_cache_groups(specs, config(draft_layers=drafts))


def test_unknown_draft_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown layer 'draft' in draft_layers"):
        get_kv_cache_groups({"a": FULL}, config(draft_layers=frozenset({"draft"})))


# -- layers that use another's cache -------------------------------------------------


def test_sharing_layers_join_their_target_and_have_no_tensor() -> None:
    specs = layers(full=(2, FULL), sw=(2, WINDOW))
    targets = {"late.0": "sw.1", "late.1": "late.0"}
    choice = config(kv_sharing_targets=targets)
    found = get_kv_cache_configs([specs], choice, [1 << 21]).configs[0]
    plain = get_kv_cache_configs([specs], CONFIG, [1 << 21]).configs[0]
    assert found.kv_cache_tensors == plain.kv_cache_tensors
    assert found.num_blocks == plain.num_blocks
    group = found.kv_cache_groups[1]
    assert group.layer_names == ("sw.0", "sw.1", "late.0", "late.1")
    assert group.own_layer_names == ("sw.0", "sw.1")
    assert group.kv_sharing_targets == {"late.0": "sw.1", "late.1": "sw.1"}


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"x": "nowhere"}, "unknown layer 'nowhere' in kv_sharing_targets"),
        ({"x": "y", "y": "x"}, "circle: x -> y -> x"),
        ({"a": "b"}, "has a KV cache spec and stands in kv_sharing_targets"),
    ],
)
def test_sharing_that_cannot_be(targets: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_kv_cache_groups({"a": FULL, "b": FULL}, config(kv_sharing_targets=targets))


# -- several workers -----------------------------------------------------------------


def test_uneven_pipeline_ranks_share_groups_and_blocks() -> None:
    specs = layers(full=(3, FULL), sw=(3, WINDOW))
    first = {n: specs[n] for n in ("full.0", "sw.0", "sw.1", "sw.2")}
    last = {n: specs[n] for n in ("full.1", "full.2")}
    found = get_kv_cache_configs([first, last], CONFIG, [1 << 21, 1 << 21]).configs
    assert [names_of(list(c.kv_cache_groups)) for c in found] == [
        [("full.0",), ("sw.0", "sw.1", "sw.2")],
        [("full.1", "full.2"), ()],
    ]
    assert found[0].num_blocks == found[1].num_blocks == (1 << 21) // (3 * PAGE)
    assert [t.shared_by for t in found[1].kv_cache_tensors] == [
        ("full.1",),
        ("full.2",),
    ]
    assert all(
        tensor.size == each.num_blocks * PAGE
        for each in found
        for tensor in each.kv_cache_tensors
    )


@pytest.mark.parametrize(
    "other", [FULL, WINDOW, FullAttentionSpec(**HEADS | {"head_size": 32})]
)
def test_a_rank_without_layers_needs_no_memory(other: KVCacheSpec) -> None:  # fmt: skip
    specs: dict[str, KVCacheSpec] = {"a": FULL, "b": other}
    found = get_kv_cache_configs([specs, {}], CONFIG, [1 << 21, 0]).configs
    assert found[1].num_blocks == found[0].num_blocks > 100
    assert found[1].kv_cache_tensors == ()
    assert len(found[1].kv_cache_groups) == len(found[0].kv_cache_groups)


def test_workers_that_disagree_are_refused() -> None:
    with pytest.raises(ConfigError, match="same layer are different across workers"):
        get_kv_cache_configs([{"a": FULL}, {"a": WINDOW}], CONFIG, [1, 1])


def test_every_worker_needs_its_memory() -> None:
    with pytest.raises(ConfigError, match="1 entries for 2 workers"):
        get_kv_cache_configs([{}, {}], CONFIG, [1])


# -- groups of a plugin --------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([(("a",), FULL)], "not assigned to any group.*b"),
        ([(("a", "b"), FULL), (("b",), FULL)], "not assigned.*b"),
        ([(("a", "b", "c"), FULL)], "not assigned.*c"),
        ([(("a", "b"), FULL), ((), FULL)], "no layers of its own"),
        ([(("a",), FULL), (("b",), ODD)], "several page sizes"),
    ],
)
def test_impossible_groups_of_a_plugin_are_refused(groups: Any, message: str) -> None:
    made = [KVCacheGroupSpec(names, spec) for names, spec in groups]
    with pytest.raises(ConfigError, match=message):
        get_kv_cache_configs([{"a": FULL, "b": FULL}], CONFIG, [1 << 20], made)


def test_groups_of_a_plugin_are_used() -> None:
    made = [KVCacheGroupSpec(("a",), FULL), KVCacheGroupSpec(("b",), FULL)]
    specs: dict[str, KVCacheSpec] = {"a": FULL, "b": FULL}
    found = get_kv_cache_configs([specs], CONFIG, [1 << 21], made).configs[0]
    assert [tensor.shared_by for tensor in found.kv_cache_tensors] == [("a", "b")]


# -- any model -----------------------------------------------------------------------

ANY_SPEC = st.sampled_from([FULL, WINDOW, CHUNK, MAMBA, ODD, *KINDS.values()])


@given(
    st.lists(ANY_SPEC, min_size=1, max_size=24),
    st.integers(1, 1 << 24),
    st.integers(0, 24),
)
def test_whatever_the_model(
    specs_given: list[KVCacheSpec], memory: int, cut: int
) -> None:
    """Each layer in one group, each tensor with one layer a group, no byte too many."""
    specs = {f"layers.{i}": spec for i, spec in enumerate(specs_given)}
    names = list(specs)
    workers = [{n: specs[n] for n in part} for part in (names[:cut], names[cut:])]
    padded = config(pad_page_sizes=True)
    try:
        groups = get_kv_cache_groups(specs, padded)
        found = get_kv_cache_configs(workers, padded, [memory] * 2).configs
    except CapacityError:
        return
    check_groups(groups, specs)
    for mine, each in zip(workers, found, strict=True):
        held = [name for tensor in each.kv_cache_tensors for name in tensor.shared_by]
        assert sorted(held) == sorted(mine)
        total = sum(tensor.size for tensor in each.kv_cache_tensors)
        assert total <= memory
        for tensor in each.kv_cache_tensors:
            for group in each.kv_cache_groups:
                assert len(set(tensor.shared_by) & set(group.layer_names)) <= 1
        block = total // each.num_blocks
        alone = get_kv_cache_config_from_groups(each.kv_cache_groups, padded, memory)
        if mine:
            assert alone.num_blocks * block <= memory < (alone.num_blocks + 1) * block
    assert found[0].num_blocks == found[1].num_blocks


def test_a_foreign_subclass_shares_no_table_with_its_base() -> None:
    class Compressed(FullAttentionSpec):
        """Other semantics, for which a plugin brings the manager."""

    fields = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": "bfloat16"}
    specs = {"a": FullAttentionSpec(**fields), "b": Compressed(**fields)}
    groups = get_kv_cache_groups(specs, config())
    assert [group.layer_names for group in groups] == [("a",), ("b",)]
    assert [type(group.kv_cache_spec) for group in groups] == [
        FullAttentionSpec,
        Compressed,
    ]
