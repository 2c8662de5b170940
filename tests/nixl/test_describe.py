"""A descriptor survives the wire; an impossible one is refused, naming the field."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from kvplugin.connectors.negotiate import Refusal, negotiate, pair_rank
from kvplugin.connectors.nixl.config import NixlConfig
from kvplugin.connectors.nixl.describe import (
    decode_engine,
    decode_rank,
    describe_engine,
    describe_own_rank,
    describe_rank,
    encode_engine,
    encode_rank,
    host_identity,
)
from kvplugin.connectors.nixl.descriptor import EngineDescriptor
from kvplugin.connectors.nixl.descriptor_checks import (
    MAX_ALL_RUNS,
    MAX_DESCRIPTOR_BYTES,
)
from kvplugin.contract import GroupKind
from kvplugin.errors import ConfigError, IntegrityError, LayoutMismatchError
from kvplugin.layout import MAX_RUNS
from tests.nixl.memories import Engine, Layer, Side
from tests.nixl.test_negotiate import CPU, engine
from tests.nixl.test_negotiate_states import states

KINDS = [GroupKind.FULL, GroupKind.MAMBA]


def hybrid(**changes: Any) -> Engine:
    return engine(CPU, kinds=KINDS, sizes=[16, 32], **changes)


def test_there_and_back() -> None:
    made = hybrid(tp=2, pp=2)
    ranks = [made.rank(i) for i in range(4)]
    for rank in ranks:
        assert decode_rank(encode_rank(rank)) == rank
    whole = describe_engine(made.info(0), NixlConfig(), reversed(ranks))
    assert decode_engine(encode_engine(whole)) == whole
    assert whole.ranks == ranks
    assert whole.layers == [["0.0", "0.1"], ["1.0", "1.1"]]
    assert whole.peer_id == f"engine/{1000:x}"
    assert [layer.group for layer in ranks[0].layers] == [0, 1]


def test_a_process_names_itself() -> None:
    host = host_identity()
    assert host.pid == os.getpid()
    assert host == engine().rank(0).host
    assert host.boot_id
    assert host.pid_namespace > 0


def test_layers_without_a_tensor() -> None:
    made = engine()
    with pytest.raises(LayoutMismatchError, match=r"no KV tensor for layer 0\.0"):
        describe_rank(made.info(0), {}, 8, 8, b"")


def test_groups_that_nobody_continues_are_left_out() -> None:
    made = hybrid()
    info = made.info(0)
    groups = tuple(replace(group, reusable=False) for group in info.groups)
    info = replace(info, groups=groups)
    rank = describe_rank(info, made.tensors(0), 8, 8, b"")
    # A state is needed by whoever continues, found again by a hash or not.
    assert [layer.group for layer in rank.layers] == [1, 1]
    assert describe_engine(info, NixlConfig(), [rank]).layers == [[], ["1.0", "1.1"]]


def test_ranks_that_are_missing_or_unlike() -> None:
    made = engine(tp=2)
    ranks = [made.rank(i) for i in range(2)]
    for wrong, message in (
        (ranks[:1], r"not introduced .*: 1"),
        (ranks[1:], r"not introduced .*: 0"),
        ([ranks[0], ranks[0]], r"not introduced .*: 1"),
        ([*ranks, ranks[1]], "tp_size is 2, which 3 ranks do not fill"),
        ([], r"not introduced .*: 0, 1"),
        (
            [ranks[0], structs.replace(ranks[1], layers=ranks[1].layers[:1])],
            r"ranks\[1\].layers is unlike those of rank 0",
        ),
    ):
        with pytest.raises(IntegrityError, match=message):
            describe_engine(made.info(0), NixlConfig(), wrong)
    with pytest.raises(IntegrityError, match="not introduced"):
        describe_engine(replace(made.info(0), world_size=4), NixlConfig(), ranks)


def test_a_rank_alone() -> None:
    """What a worker makes of itself, whichever of its engine's ranks it is."""
    made = hybrid(tp=2, pp=2)
    for i in range(4):
        rank = made.rank(i)
        own = describe_own_rank(made.info(i), NixlConfig(), rank)
        assert own.ranks == [rank]
        assert own.tp_size == 2
        pairs = pair_rank(own, rank, made.descriptor())
        assert [pair.remote_rank for pair in pairs] == [i, i]


def plain(make: Callable[[], Engine] = hybrid) -> dict[str, Any]:
    """A descriptor as the wire has it."""
    fields: dict[str, Any] = msgpack.unpackb(encode_engine(make().descriptor()))
    return fields


def change(path: str, value: Any, make: Callable[[], Engine] = hybrid) -> bytes:
    """That descriptor with one field changed."""
    whole = plain(make)
    place: Any = whole
    *steps, last = (int(s) if s.isdigit() else s for s in path.split("."))
    for step in steps:
        place = place[step]
    place[last] = value(place[last]) if callable(value) else value
    data: bytes = msgpack.packb(whole)
    return data


BIG = 2**63
LAYER = "ranks.0.layers.0"


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("format", 2, "format"),
        ("engine_id", "", "engine_id"),
        ("engine_id", "a\nWARNING b", "engine_id"),
        ("engine_id", "x" * 2000, "engine_id"),
        ("version", "\x1b[31m", "version"),
        ("model.name", "a\x00", "model.name"),
        ("model.weight_epoch", -1, "model.weight_epoch"),
        ("num_blocks", 0, "num_blocks"),
        ("num_blocks", 2**40, "num_blocks"),
        ("num_blocks", 3, "num_blocks"),
        ("tp_size", 0, "tp_size"),
        ("tp_size", 2, "tp_size"),
        ("groups", [], "groups"),
        ("groups.0.kind", "everything", "groups"),
        ("groups.0.block_size", 0, r"groups\[0\].block_size"),
        ("groups.0.block_size", 32, r"rows.tokens"),
        ("groups.0.window", -1, r"groups\[0\].window"),
        ("groups.1.extra_history", BIG, r"groups\[1\].extra_history"),
        ("layers", [["0.0", "0.1"], []], "layers"),
        ("layers", [[], []], "layers"),
        ("ranks", [], "ranks"),
        ("ranks", lambda ranks: ranks * 2, r"ranks\[1\].rank"),
        ("ranks.0.rank", 1, r"ranks\[0\].rank"),
        ("ranks.0.incarnation", 0, "incarnation"),
        ("ranks.0.generations_address", 0, "generations_address"),
        ("ranks.0.generations_address", BIG - 8, "generations_address"),
        ("ranks.0.agent_metadata", b"x" * (1 << 21), "agent_metadata"),
        ("ranks.0.agent_metadata", 7, "agent_metadata"),
        ("ranks.0.agent_metadata", "QUFB", "agent_metadata"),
        ("ranks.0.host.pid", -1, "host.pid"),
        ("ranks.0.layers", lambda ls: ls + ls[:1], "'0.0' a second time"),
        (f"{LAYER}.name", "", r"layers\[0\].name"),
        (f"{LAYER}.name", 7, "name"),
        (f"{LAYER}.group", 2, r"layers\[0\].group"),
        (f"{LAYER}.group", -1, r"layers\[0\].group"),
        (f"{LAYER}.group", 1, r"rows.tokens"),
        (f"{LAYER}.address", 0, r"layers\[0\].address"),
        (f"{LAYER}.address", -4096, r"layers\[0\].address"),
        (f"{LAYER}.address", BIG - 1, r"layers\[0\].runs\[0\]"),
        (f"{LAYER}.address", 2**64 - 1, "address"),
        (f"{LAYER}.page_bytes", 1, r"layers\[0\].runs"),
        (f"{LAYER}.page_bytes", 2**50, r"layers\[0\].page_bytes"),
        (f"{LAYER}.runs", [], r"layers\[0\].runs"),
        (f"{LAYER}.runs", lambda runs: runs * 5000, r"layers\[0\].runs"),
        (f"{LAYER}.runs.0", [-8, 4096, 8], r"runs\[0\].offset"),
        (f"{LAYER}.runs.0", [0, 8, 2048], r"runs\[0\].stride"),
        (f"{LAYER}.runs.0", [0, 4096, 0], r"runs\[0\].nbytes"),
        (f"{LAYER}.runs.0", [0, 2**62, 2048], r"runs\[0\]"),
        (f"{LAYER}.runs.0", [0, 4096], "runs"),
        (f"{LAYER}.runs.0", [0, 64, 64], r"rows.parts"),
        (f"{LAYER}.total_heads", -1, "total_heads"),
        (f"{LAYER}.total_heads", 4, r"rows.heads"),
        (f"{LAYER}.interior", "\n", "interior"),
        (f"{LAYER}.rows.tokens", 0, "empty axis"),
        (f"{LAYER}.rows.num_blocks", 5, r"rows.num_blocks"),
        (f"{LAYER}.rows.split", 3, "split"),
        (f"{LAYER}.rows.tokens_per_row", 7, "tokens_per_row"),
        (f"{LAYER}.rows.packing", "\n", "rows.packing"),
        (f"{LAYER}.rows.parts", [], "empty axis"),
        (f"{LAYER}.rows.parts", lambda parts: parts * 1000, "2000 parts"),
        (f"{LAYER}.rows.parts.0.name", "", "parts.name"),
        (f"{LAYER}.rows.parts.0.offset", -1, "overlap"),
        (f"{LAYER}.rows.parts.0.offset", BIG - 1, "rows.parts"),
        (f"{LAYER}.rows.parts.1.offset", BIG - 1, "parts"),
        (f"{LAYER}.rows.parts.0.block_stride", BIG - 1, "overlap|parts"),
        (f"{LAYER}.rows.parts.0.columns", 0, "columns"),
        (f"{LAYER}.rows.parts.0.row_bytes", 2**62, "overlap|parts"),
        (f"{LAYER}.rows.parts.0.head_stride", -(2**63), "overlap"),
    ],
)
def test_impossible_fields(path: str, value: Any, field: str) -> None:
    with pytest.raises(IntegrityError, match=field) as refused:
        decode_engine(change(path, value))
    assert len(str(refused.value)) < 3000


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("state", lambda parts: parts * 10, "state is 30 entries"),
        ("state.0", ["x", 0, 8, 2], "state"),
        ("state.0.0", "", "state.name"),
        ("state.0.0", "\n", "state.name"),
        ("state.0.1", -1, "state.offset is -1"),
        ("state.0.2", 0, "state.rows is 0"),
        ("state.0.2", 4, "state.rows is 4 of 8 on each of 1 ranks"),
        ("state.0.3", 0, "state.row_bytes is 0"),
        ("state.0.3", 2**40, "state.offset is"),
        ("state.0.4", 0, "state.total_rows is 0"),
        ("state.0.5", 0, "state.places is 0"),
        ("state.0.5", -9, "state.places is -9"),
        ("state.0.5", 2**17, "state.places is 131083 in all layers"),
        ("state.0.5", 5000, "state.places is 5000"),
        ("state.0.6", 0, "state.place_stride is 0"),
        ("state.0.6", 1, "state.offset is 1, not from 16"),
        ("state.0.6", 2**40, "state.offset is"),
        ("state.1.1", 15, "state.offset is 15, not from 16"),
        ("state.2.1", 61, "state.offset is 109 is its end"),
        ("runs", [[0, 128, 54], [54, 128, 54]], "state is of a page in 2 runs"),
    ],
)
def test_impossible_states(path: str, value: Any, field: str) -> None:
    with pytest.raises(IntegrityError, match=field) as refused:
        decode_engine(change(f"{LAYER}.{path}", value, states))
    assert len(str(refused.value)) < 3000


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x93\x01\x02", b"\x81\xa1a" * 5000, msgpack.packb({})]
)
@pytest.mark.parametrize("decode", [decode_engine, decode_rank])
def test_other_bytes(decode: Callable[[bytes], object], data: bytes) -> None:
    with pytest.raises(IntegrityError):
        decode(data)


def test_more_runs_than_anybody_reads() -> None:
    """What can be said in few bytes and takes long to look at."""
    whole = plain()
    layer = whole["ranks"][0]["layers"][0]
    layer |= {"runs": [[0, 1, 1]] * MAX_RUNS, "page_bytes": MAX_RUNS, "rows": None}
    layers = [layer | {"name": str(i)} for i in range(MAX_ALL_RUNS // MAX_RUNS + 1)]
    whole["ranks"][0]["layers"] = layers
    whole["layers"][0] = sorted(layer["name"] for layer in layers)
    with pytest.raises(IntegrityError, match="runs is 135168 in all layers"):
        decode_engine(msgpack.packb(whole))
    layers.pop()
    whole["layers"] = [sorted(layer["name"] for layer in layers), []]
    assert len(decode_engine(msgpack.packb(whole)).layers[0]) == len(layers)


def test_more_bytes_than_anybody_reads() -> None:
    whole = hybrid().descriptor()
    blob = bytes(MAX_DESCRIPTOR_BYTES)
    rank = structs.replace(whole.ranks[0], agent_metadata=blob)
    with pytest.raises(IntegrityError, match="the limit is 4194304"):
        encode_engine(structs.replace(whole, ranks=[rank]))
    with pytest.raises(IntegrityError, match="the limit is 4194304"):
        decode_engine(blob + b"\0")


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from([0, 1, 2, 3, 15, 17, 63, 2**31, 2**40, 2**62, BIG - 1, BIG]),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.just([]),
    st.just({}),
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container and key of a descriptor."""
    keys = value if isinstance(value, dict) else range(len(value))
    found = [(value, key) for key in keys]
    for key in keys:
        if isinstance(value[key], dict | list):
            found += places(value[key])
    return found


PEERS: Mapping[Callable[[], Engine], EngineDescriptor] = {
    hybrid: hybrid().descriptor(),
    states: states(2).descriptor(),
}


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(list(PEERS)), st.data())
def test_fuzzed_fields(make: Callable[[], Engine], data: st.DataObject) -> None:
    """What is accepted can be negotiated with: a pairing or a refusal, nothing else,
    and addresses that fit 63 bits."""
    whole, here = plain(make), PEERS[make]
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(places(whole)))
        container[key] = data.draw(values)
    try:
        found = decode_engine(msgpack.packb(whole))
    except IntegrityError:
        return
    try:
        negotiate(here, found)
        pairs = pair_rank(here, here.ranks[0], found)
    except Refusal:
        return
    for pair in pairs:
        ends = [
            pair.source.address
            + run.offset
            + (found.num_blocks - 1) * run.stride
            + run.nbytes
            for run in pair.source.runs
        ]
        assert 0 < max(ends) < BIG


@given(st.binary(max_size=200))
@example(b"\xdd\xff\xff\xff\xff")
def test_fuzzed_bytes(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        decode_engine(data)


def test_a_rank_with_heads_that_do_not_divide() -> None:
    layers = [Layer("0.0", 0, 6, 4, 4)]
    side = Side({"0.0": CPU}, [16], [1], 4)
    made = Engine(layers, side, [GroupKind.FULL])
    whole = made.descriptor()
    ranks = [structs.replace(whole.ranks[0], rank=i) for i in range(4)]
    wrong = structs.replace(whole, ranks=ranks, tp_size=4)
    with pytest.raises(IntegrityError, match="6 heads on 4 ranks"):
        decode_engine(encode_engine(wrong))


def test_settings_of_another_kind_are_not_ours() -> None:
    with pytest.raises(ConfigError, match="weight_epoch"):
        NixlConfig(weight_epoch=-1)
