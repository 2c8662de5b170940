"""kv_transfer_params: routers' habits are understood, hostile values named."""

import json
import math
from typing import Any

import hypothesis.strategies as st
import msgpack
import pytest
from hypothesis import given, settings

from kvplugin.connectors.nixl.address import Address, parse_address
from kvplugin.connectors.nixl.param_fields import ParamsError
from kvplugin.connectors.nixl.params import (
    NOTHING,
    ReadFrom,
    Wanted,
    handover_params,
    no_kv_params,
    parse,
)
from kvplugin.contract import EngineInfo
from kvplugin.errors import ConfigError

ENGINE = EngineInfo("engine-1", (), 100, 16, world_size=4, tp_size=2)
ADDRESS = Address("10.0.0.1", 5600)
ROWS = [[3, 4, 5], [0, 9]]

FROM_PREFILL = handover_params(
    ENGINE, ADDRESS, lease="req-1-abc", rows=ROWS, num_tokens=40, to_decoder=True
)
FROM_DECODER = handover_params(
    ENGINE,
    ADDRESS,
    lease="req-1-abc",
    rows=ROWS,
    num_tokens=40,
    to_decoder=False,
    expires_at=1234.5,
)
READ = ReadFrom("10.0.0.1:5600", "engine-1", "req-1-abc", 40, from_decoder=False)

TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What vllm-router, llm-d and vLLM's own toy proxy send to a prefill."""


# -- what routers send -----------------------------------------------------------------


def test_a_request_without_parameters_wants_nothing() -> None:
    assert parse(None) == parse({}) == parse({"router_says": [1]}) == NOTHING
    neither = {"do_remote_prefill": False, "do_remote_decode": None}
    assert parse(neither | {"transfer_mode": "push", "remote_port": "x"}) == NOTHING


@pytest.mark.parametrize("params", [TO_PREFILL, {"do_remote_decode": True}])
def test_a_prefill_hands_over(params: dict[str, Any]) -> None:
    assert parse(params) == Wanted(hands_over=True)


def test_a_decode_reads_what_the_prefill_said() -> None:
    assert parse(FROM_PREFILL) == Wanted(READ)


def test_the_next_turns_prefill_reads_and_hands_over() -> None:
    turn_2 = ReadFrom("10.0.0.1:5600", "engine-1", "req-1-abc", 40, from_decoder=True)
    assert parse(FROM_DECODER) == Wanted(turn_2, hands_over=True)


def test_parameters_survive_what_carries_them() -> None:
    """JSON between client, router and engine; MessagePack inside vLLM."""
    for params in (FROM_PREFILL, FROM_DECODER):
        wanted = parse(params)
        assert parse(json.loads(json.dumps(params, allow_nan=False))) == wanted
        assert parse(msgpack.unpackb(msgpack.packb(params))) == wanted
        assert parse(msgpack.unpackb(msgpack.packb(params), use_list=False)) == wanted


def test_what_vllm_019_says_is_enough() -> None:
    new = "dcp_size", "pp_size", "remote_num_tokens", "transfer_mode"
    new += ("remote_blocks_expiry_time",)
    old = {key: value for key, value in FROM_PREFILL.items() if key not in new}
    assert parse(old) == Wanted(
        ReadFrom("10.0.0.1:5600", "engine-1", "req-1-abc", 0, from_decoder=False)
    )


def test_fields_that_nobody_knows_are_not_looked_at() -> None:
    strange = {"x": {"y": [math.nan]}, "remote_bootstrap": 7, "": None}
    assert parse(FROM_PREFILL | strange) == Wanted(READ)


@pytest.mark.parametrize("to_decoder", [True, False])
def test_no_kv_is_said_and_understood(to_decoder: bool) -> None:
    """Scenario 42: never a hand-over of no blocks that looks like one."""
    params = no_kv_params(ENGINE, to_decoder=to_decoder)
    assert params["do_remote_prefill"] is False
    assert params["remote_block_ids"] == []
    assert params.keys() == FROM_PREFILL.keys()
    assert json.loads(json.dumps(params)) == params
    assert parse(params) == Wanted(hands_over=not to_decoder)


@pytest.mark.parametrize("rows", [[], [[]], [[], []], [[0, 0]]])
def test_who_says_that_there_are_no_blocks_offers_nothing(rows: Any) -> None:
    assert parse(FROM_PREFILL | {"remote_block_ids": rows}) == NOTHING
    both = parse(FROM_DECODER | {"remote_block_ids": rows})
    assert both == Wanted(hands_over=True)


def test_names_are_vllms() -> None:
    """Those of vLLM 0.32's `NixlPullConnectorScheduler.request_finished`."""
    assert set(FROM_PREFILL) == {
        "do_remote_prefill",
        "do_remote_decode",
        "remote_block_ids",
        "remote_engine_id",
        "remote_request_id",
        "remote_host",
        "remote_port",
        "tp_size",
        "dcp_size",
        "pp_size",
        "remote_num_tokens",
        "remote_blocks_expiry_time",
        "transfer_mode",
    }
    assert FROM_PREFILL["pp_size"] == FROM_PREFILL["tp_size"] == 2


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("localhost", "localhost:5600"),
        ("prefill-0.prefill.default.svc", "prefill-0.prefill.default.svc:5600"),
        ("my_host", "my_host:5600"),
        ("10.1.2.3", "10.1.2.3:5600"),
        ("::1", "[::1]:5600"),
        ("[fe80::1%eth0]", "[fe80::1%eth0]:5600"),
    ],
)
def test_hosts(host: str, address: str) -> None:
    read = parse(FROM_PREFILL | {"remote_host": host}).read
    assert read is not None
    assert read.address == address
    assert parse_address(address).port == 5600


# -- what is refused -------------------------------------------------------------------

NEEDED = (
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
)


@pytest.mark.parametrize("field", NEEDED)
@pytest.mark.parametrize("missing", [True, False])
def test_a_missing_field_is_named(field: str, missing: bool) -> None:
    params = dict(FROM_PREFILL)
    if missing:
        del params[field]
    else:
        params[field] = None
    with pytest.raises(ParamsError, match=f"^{field} is missing"):
        parse(params)


def test_a_bare_wish_to_read_is_refused() -> None:
    with pytest.raises(ParamsError, match="remote_block_ids"):
        parse({"do_remote_prefill": True})


def test_both_directions_at_once_are_refused() -> None:
    with pytest.raises(ParamsError, match="do_remote_prefill and do_remote_decode"):
        parse(FROM_PREFILL | {"do_remote_decode": True})


@pytest.mark.parametrize("params", [[], "do_remote_decode", 1, True, [("a", 1)]])
def test_what_is_no_table_is_refused(params: Any) -> None:
    with pytest.raises(ParamsError, match="kv_transfer_params"):
        parse(params)


@pytest.mark.parametrize("field", ["do_remote_prefill", "do_remote_decode"])
@pytest.mark.parametrize("value", [1, 0, "true", [], {}, math.nan])
def test_flags_are_true_or_false(field: str, value: Any) -> None:
    with pytest.raises(ParamsError, match=f"^{field}="):
        parse({field: value})


NO_INTEGER = [True, 5600.0, "5600", math.nan, math.inf, [5600], {"port": 1}, -1]
WRONG = [
    *(("remote_port", value) for value in [*NO_INTEGER, 0, 65_536, 10**30]),
    *(("tp_size", value) for value in [*NO_INTEGER, 0, 10**6]),
    *(("pp_size", value) for value in [*NO_INTEGER, 0]),
    *(("dcp_size", value) for value in [*NO_INTEGER, 0]),
    *(("remote_num_tokens", value) for value in [*NO_INTEGER, 2**63]),
    *(
        ("remote_blocks_expiry_time", value)
        for value in [True, "soon", math.nan, math.inf, -math.inf, [1], {}, 10**400]
    ),
    *(("transfer_mode", value) for value in ["push", "", 0, True, ["pull"], {}]),
    *(
        ("remote_host", value)
        for value in [
            "",
            " ",
            "a b",
            "host\n",
            "host\x00",
            "host\t",
            "http://host",
            "host:5600",
            "tcp://*",
            "*",
            "host/path",
            "a;b",
            "-a",
            "ho\u200bst",
            "h\ud800",
            "fe80::1%a b",
            "[::1",
            ":::",
            "x" * 254,
            1,
            True,
            b"host",
            ["host"],
            {"host": "x"},
            math.nan,
        ]
    ),
    *(
        (field, value)
        for field in ("remote_engine_id", "remote_request_id")
        for value in ["", "a\nb", "a\x00", "\x1b[31m", "\ud800", "x" * 513]
    ),
    *(
        (field, value)
        for field in ("remote_engine_id", "remote_request_id")
        for value in [1, True, [], {}, b"x", math.nan]
    ),
    *(
        ("remote_block_ids", value)
        for value in [
            True,
            1,
            "abc",
            {"0": [1]},
            [1, 2],
            ["ab"],
            [{"a": 1}],
            [None],
            [[True]],
            [[1.0]],
            [[math.nan]],
            [[-1]],
            [[2**31]],
            [[10**30]],
            [["1"]],
            [[None]],
            [[[1]]],
            [[1], [{}]],
            [[]] * 257,
            [[1] * (1 << 17), [1]],
        ]
    ),
]


@pytest.mark.parametrize(
    ("field", "value"),
    WRONG,
    ids=[f"{i}-{field}" for i, (field, _) in enumerate(WRONG)],
)
@pytest.mark.parametrize("params", [FROM_PREFILL, FROM_DECODER])
def test_a_wrong_value_is_named(params: Any, field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{field}") as refusal:
        parse(params | {field: value})
    assert len(str(refusal.value)) < 400
    assert str(refusal.value).isprintable()


def test_push_is_refused_in_words() -> None:
    with pytest.raises(ParamsError, match="transfer_mode='push' must be 'pull'"):
        parse(FROM_PREFILL | {"transfer_mode": "push"})


# -- anything at all -------------------------------------------------------------------

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["localhost", "pull", "push", "::1", 2**31, 2**64, 5600]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
FIELDS = sorted(FROM_PREFILL)


def outcome(params: Any) -> Wanted | str:
    """What is wanted, or why that makes no sense."""
    try:
        return parse(params)
    except ParamsError as error:
        return str(error)


@settings(max_examples=400, deadline=None)
@given(
    changes=st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=4),
    missing=st.sets(st.sampled_from(FIELDS), max_size=2),
    base=st.sampled_from([FROM_PREFILL, FROM_DECODER, TO_PREFILL, {}]),
)
def test_whatever_a_client_sends_is_understood_or_named(
    changes: dict[str, Any], missing: set[str], base: dict[str, Any]
) -> None:
    params = {k: v for k, v in (base | changes).items() if k not in missing}
    wanted = outcome(params)
    if isinstance(wanted, str):
        assert any(field in wanted for field in FIELDS)
        return
    assert type(wanted.hands_over) is bool
    if wanted.read is None:
        return
    read = wanted.read
    assert parse_address(read.address) == Address(
        params["remote_host"].strip("[]"), params["remote_port"]
    )
    assert type(read.num_tokens) is int
    assert read.num_tokens >= 0
    for name in (read.engine_id, read.lease):
        assert name.encode().decode() == name  # it can travel
        assert name.isprintable()


@settings(max_examples=200, deadline=None)
@given(params=ANYTHING)
def test_anything_at_all_in_place_of_parameters(params: Any) -> None:
    assert outcome(params)
