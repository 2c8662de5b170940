"""The identity of stored blocks, and who may have whose blocks."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplugin.connectors.identity import StoreIdentity
from kvplugin.contract import (
    EngineInfo,
    GroupInfo,
    GroupKind,
    KVTensor,
    ModelIdentity,
)
from kvplugin.layout import PageLayout, TensorLayout

MODEL = ModelIdentity(
    name="org/model",
    revision="main",
    dtype="bfloat16",
    backends=("CPU_ATTN",),
    hash_algorithm="sha256",
)
PAGE = PageLayout(65536, 100, interior="FullAttentionSpec/bfloat16/CPU_ATTN")
WINDOW = GroupInfo(
    0, GroupKind.SLIDING_WINDOW, 64, {"layers.0": PAGE, "layers.1": PAGE}, window=512
)
FULL = GroupInfo(1, GroupKind.FULL, 128, {"layers.2": PAGE})
ENGINE = EngineInfo(
    engine_id="engine",
    groups=(WINDOW, FULL),
    num_blocks=100,
    hash_block_size=64,
    world_size=2,
    model=MODEL,
)
IDENTITY = StoreIdentity.of(ENGINE)


def engine(**changes: Any) -> EngineInfo:
    return replace(ENGINE, **changes)


def model(**changes: Any) -> EngineInfo:
    return engine(model=replace(MODEL, **changes))


def group(**changes: Any) -> EngineInfo:
    return engine(groups=(replace(WINDOW, **changes), FULL))


def page(**changes: Any) -> EngineInfo:
    return group(layers={**WINDOW.layers, "layers.1": replace(PAGE, **changes)})


def at_least_one_other(value: object) -> object:
    """Of the same type, and different."""
    if isinstance(value, GroupKind):
        return GroupKind.CHUNKED_LOCAL
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    assert isinstance(value, tuple)
    return (*value, "x")


AGREED = {
    **{
        f"model.{field.name}": model(
            **{field.name: at_least_one_other(getattr(MODEL, field.name))}
        )
        for field in fields(MODEL)
        if field.name != "backends"
    },
    "hash_block_size": engine(hash_block_size=32),
    "world_size": engine(world_size=4),
    "tp_size": engine(tp_size=2),
    "groups[0].kind": group(kind=GroupKind.CHUNKED_LOCAL),
    "groups[0].block_size": group(block_size=128),
    "groups[0].window": group(window=1024),
}
"""Changes by the field that they change, of what all ranks agree in."""

OF_A_RANK = {
    "rank": engine(rank=1),
    "model.backends": model(backends=("FLASH_ATTN",)),
    "groups[0].has_drafter": group(has_drafter=True),
    "groups[0].layers[0].name": group(layers={"layers.7": PAGE, "layers.1": PAGE}),
    "groups[0].layers[1].page_bytes": page(page_bytes=131072),
    "groups[0].layers[1].padded": page(padded=True),
    "groups[0].layers[1].interior": page(interior="FullAttentionSpec/float16/"),
}
"""The same for that in which ranks of one engine may differ."""

NOT_OF_BLOCKS = {
    "engine_id": engine(engine_id="another"),
    "num_blocks": engine(num_blocks=200),
    "max_model_len": engine(max_model_len=4096),
    "max_step_tokens": engine(max_step_tokens=4096),
    "prefix_caching": engine(prefix_caching=False),
    "asks_pending_work": engine(asks_pending_work=False),
    "reports_failed_loads": engine(reports_failed_loads=False),
    "extra_history": group(extra_history=4),
    "reusable": group(reusable=False),
    "state_every_block": group(state_every_block=True),
}
"""Changes of an engine that leave the bytes of a block as they are."""


@pytest.mark.parametrize("field", AGREED)
def test_what_all_ranks_agree_in_is_in_both_digests(field: str) -> None:
    other = StoreIdentity.of(AGREED[field])
    assert other.digest != IDENTITY.digest
    assert other.shared != IDENTITY.shared
    assert field in IDENTITY.difference(other)


@pytest.mark.parametrize("field", OF_A_RANK)
def test_what_is_of_a_rank_is_in_its_digest_only(field: str) -> None:
    other = StoreIdentity.of(OF_A_RANK[field])
    assert other.digest != IDENTITY.digest
    assert other.shared == IDENTITY.shared
    assert field in IDENTITY.difference(other)


@pytest.mark.parametrize("field", NOT_OF_BLOCKS)
def test_what_no_block_depends_on_is_in_no_digest(field: str) -> None:
    other = StoreIdentity.of(NOT_OF_BLOCKS[field])
    assert (other.digest, other.shared) == (IDENTITY.digest, IDENTITY.shared)
    assert IDENTITY.difference(other) == ""


def test_every_field_of_an_engine_is_in_one_of_these_tables() -> None:
    """A field that is added has to be thought of."""
    named = {name.rpartition(".")[2] for name in (*AGREED, *OF_A_RANK, *NOT_OF_BLOCKS)}
    structure = {"model", "groups", "index", "layers"}
    described = (EngineInfo, GroupInfo, ModelIdentity, PageLayout)
    known = {field.name for cls in described for field in fields(cls)}
    assert known - structure <= named


def test_a_difference_names_each_field_with_both_values() -> None:
    other = StoreIdentity.of(
        engine(rank=1, groups=(FULL,), model=replace(MODEL, dtype="float16"))
    )
    text = IDENTITY.difference(other)
    assert "model.dtype: 'bfloat16' and 'float16'" in text
    assert "rank: 0 and 1" in text
    assert "groups[1].kind: 'full' and nothing" in text
    assert "groups[0].window: 512 and 0" in text
    assert "revision" not in text


def test_one_more_group_is_another_identity() -> None:
    others = [
        StoreIdentity.of(engine(groups=groups))
        for groups in ((), (WINDOW,), (FULL, WINDOW), (WINDOW, FULL, FULL))
    ]
    assert len({IDENTITY.shared, *(other.shared for other in others)}) == 5


# -- tensors -----------------------------------------------------------------------


def tensors(layout: TensorLayout) -> dict[str, KVTensor]:
    return {"layers.2": KVTensor(4096, layout)}


def standard(num_blocks: int = 100, **changes: Any) -> TensorLayout:
    """[blocks, heads, tokens, elements] of two bytes."""
    strides = (65536, 32768, 256, 2)
    view = TensorLayout((num_blocks, 2, 128, 128), strides, 2, "bfloat16", 0)
    return replace(view, **changes)


def halves(num_blocks: int) -> TensorLayout:
    """Keys of all blocks, then values of all blocks."""
    strides = (32768 * num_blocks, 32768, 256, 2)
    return TensorLayout((2, num_blocks, 128, 128), strides, 2, "bfloat16", 1)


def identity_with(layout: TensorLayout, num_blocks: int = 100) -> StoreIdentity:
    full = replace(FULL, layers={"layers.2": replace(PAGE, num_blocks=num_blocks)})
    return StoreIdentity.of(
        replace(ENGINE, groups=(WINDOW, full), num_blocks=num_blocks), tensors(layout)
    )


@pytest.mark.parametrize(
    "changed",
    [
        standard(dtype="float16"),
        standard(itemsize=1),
        standard(strides=(65536, 256, 512, 2)),
        standard(shape=(100, 4, 64, 128)),
        standard(shape=(200, 2, 64, 128)),
    ],
)
def test_a_tensor_of_another_shape_is_another_rank_identity(
    changed: TensorLayout,
) -> None:
    base, other = identity_with(standard()), identity_with(changed)
    assert base.digest != other.digest
    assert base.shared == other.shared == IDENTITY.shared
    assert "groups[1].layers[0].tensor." in base.difference(other)


@pytest.mark.parametrize("layout", [standard, halves])
def test_the_size_of_the_pool_is_not_in_it(
    layout: Callable[[int], TensorLayout],
) -> None:
    few, many = (identity_with(layout(count), count) for count in (100, 300))
    assert few.difference(many) == ""
    assert few.digest == many.digest


# -- the encoding ------------------------------------------------------------------

NAMES = st.text(alphabet="ab\0:/,. []\udcff", max_size=4)
SIZES = st.integers(0, 300)
PAGES = st.builds(PageLayout, page_bytes=SIZES, num_blocks=st.just(1), interior=NAMES)
GROUPS = st.builds(
    GroupInfo,
    index=st.just(0),
    kind=st.sampled_from(GroupKind),
    block_size=SIZES,
    layers=st.dictionaries(NAMES, PAGES, max_size=3),
    window=SIZES,
)
MODELS = st.builds(
    ModelIdentity,
    name=NAMES,
    revision=NAMES,
    dtype=NAMES,
    quantization=NAMES,
    backends=st.lists(NAMES, max_size=3).map(tuple),
    hash_algorithm=NAMES,
    weight_epoch=SIZES,
)
IDENTITIES = st.builds(
    EngineInfo,
    engine_id=st.just(""),
    groups=st.lists(GROUPS, max_size=3).map(tuple),
    num_blocks=st.just(1),
    hash_block_size=SIZES,
    world_size=SIZES,
    tp_size=SIZES,
    rank=SIZES,
    model=MODELS,
).map(StoreIdentity.of)


@given(IDENTITIES, IDENTITIES)
def test_digests_are_equal_exactly_if_identities_are(
    one: StoreIdentity, other: StoreIdentity
) -> None:
    assert (one.digest == other.digest) == (one == other)
    assert (one.difference(other) == "") == (one == other)


@given(IDENTITIES, st.data())
def test_a_value_cannot_move_to_another_field(
    identity: StoreIdentity, data: st.DataObject
) -> None:
    """Two neighbouring strings of which the one ends and the other begins elsewhere."""
    one, other = data.draw(st.permutations(["name", "revision", "dtype"]))[:2]
    text = getattr(identity.model, one) + getattr(identity.model, other)
    cuts = data.draw(st.lists(st.integers(0, len(text)), min_size=2, max_size=2))
    shifted = [
        replace(
            identity,
            model=replace(identity.model, **{one: text[:cut], other: text[cut:]}),
        )
        for cut in cuts
    ]
    assert len({i.digest for i in shifted}) == len({i.shared for i in shifted})
    assert len({i.digest for i in shifted}) == len(set(cuts))


PROGRAM = """
import json, sys
from tests.offload.test_identity import IDENTITY
print(json.dumps([IDENTITY.digest, IDENTITY.shared]))
"""


@pytest.mark.parametrize("seed", ["0", "4711"])
def test_another_process_finds_the_same_digests(seed: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd()},
        check=True,
        capture_output=True,
    )
    assert json.loads(found.stdout) == [IDENTITY.digest, IDENTITY.shared]


def test_an_identity_is_data_to_its_leaves() -> None:
    """Whatever is in it can be told apart by its digest."""

    def walk(value: object) -> None:
        if is_dataclass(value):
            for field in fields(value):
                walk(getattr(value, field.name))
        elif isinstance(value, tuple):
            for entry in value:
                walk(entry)
        else:
            assert isinstance(value, str | int) or value is None

    walk(identity_with(standard()))
