"""Handovers: who hands over, which blocks, and what clients are told."""

import json
from typing import Any

import pytest

from kvplugin import Request
from kvplugin.connectors.nixl.config import Role
from kvplugin.connectors.nixl.params import Wanted, parse
from kvplugin.connectors.nixl.prompt import agreed_tokens
from kvplugin.connectors.nixl.wire import Close
from kvplugin.contract import GroupInfo, GroupKind
from kvplugin.errors import ConfigError
from tests.nixl.producer import (
    FROM_PREFILL,
    TO_DECODER,
    Producer,
    chunked,
    group,
    request,
    states,
    window,
)

# -- a lease's life --------------------------------------------------------------------


def test_a_prefill_is_handed_over_and_its_end_announced_once() -> None:
    producer = Producer(advertise_host="10.0.0.7", side_channel_port=5601)
    told = producer.hand_over([3, 4, 5])
    assert json.loads(json.dumps(told)) == told
    wanted = parse(told)
    assert wanted.read is not None
    assert wanted.read.address == "10.0.0.7:5601"
    assert wanted.read.num_tokens == 40
    assert told["remote_request_id"].startswith("req-1-")
    granted = producer.granted(told)
    assert granted.block_ids == told["remote_block_ids"] == [[3, 4, 5]]
    assert granted.seconds == 30.0
    assert agreed_tokens(request(), granted) == 40
    assert producer.handovers.finished(producer.request)
    assert not producer.handovers.collect().request_ids
    producer.leases.close(Close(lease=wanted.read.lease, reader="r"))
    assert producer.handovers.collect().request_ids == ["req-1"]
    assert not producer.handovers.finished(producer.request)
    stats = producer.counters.take()
    assert stats is not None
    assert stats.counters == {
        "handovers": 1,
        "closed_leases": 1,
        "expired_leases": 0,
        "revoked_leases": 0,
    }
    assert stats.gauges == {"leases": 0, "leased_blocks": 0}


def test_nobody_comes_and_the_blocks_are_free_again() -> None:
    """Scenarios 25 and 43: with nothing sent, the end comes in bounded time."""
    producer = Producer(kv_lease_duration=10.0)
    producer.hand_over([3, 4, 5])
    producer.now += 9.9
    assert not producer.handovers.collect().request_ids
    producer.now += 0.2
    assert producer.handovers.collect().expired == ["req-1"]
    stats = producer.counters.take()
    assert stats is not None
    assert stats.counters["expired_leases"] == 1


@pytest.mark.parametrize("tokens", [1, 15, 16, 17])
def test_a_prompt_shorter_than_a_block_is_handed_over(tokens: int) -> None:
    """Scenario 43: and its blocks come back as any others do."""
    producer = Producer()
    rows = [3, 4][: -(-tokens // 16)]
    granted = producer.granted(producer.hand_over(rows, tokens=tokens))
    assert granted.block_ids == [rows]
    assert granted.num_tokens == tokens
    assert agreed_tokens(request(tokens + 1), granted) == tokens
    producer.now += 31
    assert producer.handovers.collect().request_ids == ["req-1"]
    assert producer.leases.num_blocks == 0


def test_what_the_engine_ends_itself_is_counted() -> None:
    producer = Producer()
    producer.hand_over([3, 4, 5])
    producer.leases.revoke({4})
    assert producer.handovers.collect().revoked == ["req-1"]
    stats = producer.counters.take()
    assert stats is not None
    assert stats.counters["revoked_leases"] == 1
    assert stats.counters["closed_leases"] == stats.counters["expired_leases"] == 0


# -- who hands over --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "both_ways", "params", "seconds"),
    [
        (Role.PRODUCER, False, TO_DECODER, 30.0),
        (Role.PRODUCER, True, TO_DECODER, 30.0),
        (Role.BOTH, False, TO_DECODER, 30.0),
        (Role.BOTH, True, TO_DECODER, 30.0),
        (Role.CONSUMER, False, TO_DECODER, 0),
        (Role.CONSUMER, True, TO_DECODER, 480.0),
        (Role.PRODUCER, False, FROM_PREFILL, None),
        (Role.PRODUCER, True, FROM_PREFILL, None),
        (Role.BOTH, False, FROM_PREFILL, None),
        (Role.BOTH, True, FROM_PREFILL, 480.0),
        (Role.CONSUMER, False, FROM_PREFILL, None),
        (Role.CONSUMER, True, FROM_PREFILL, 480.0),
    ],
)
def test_roles(
    role: Role, both_ways: bool, params: dict[str, Any], seconds: float | None
) -> None:
    """Seconds of the lease; 0: the client is told that there is none, None: nothing."""
    producer = Producer(role=role, bidirectional_kv_xfer=both_ways)
    told = producer.hand_over([3, 4, 5], params=params)
    if seconds is None:
        assert told is None
    elif not seconds:
        assert producer.is_nothing(told)
    else:
        assert producer.granted(told).seconds == seconds
        to_decoder = params is TO_DECODER
        assert told["do_remote_prefill"] is to_decoder
        assert told["do_remote_decode"] is not to_decoder
        expiry = None if to_decoder else producer.now + seconds
        assert told["remote_blocks_expiry_time"] == expiry
    assert producer.handovers.finished(producer.request) is bool(seconds)


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"kv_load_tiers": []},
        {"do_remote_decode": 1},
        {"do_remote_decode": None},
        [],
        "do_remote_decode",
        7,
    ],
)
@pytest.mark.parametrize("role", Role)
def test_other_requests_stay_here(role: Role, params: Any) -> None:
    producer = Producer(states(), role=role, bidirectional_kv_xfer=True)
    assert producer.handovers.leave_away(request(40, params)) == 0
    assert producer.hand_over([0, 0, 5], params=params) is None
    assert not producer.handovers.finished(producer.request)


def test_who_cannot_read_hands_over_all_the_same() -> None:
    """The next turn's prefill, told of a decoder in a way that makes no sense."""
    params = TO_DECODER | {"remote_block_ids": [[1]], "remote_port": "x"}
    assert Producer().hand_over([3, 4, 5], params=params)["do_remote_prefill"]


def test_the_next_turn_reads_what_was_generated() -> None:
    """39 of 40 generated tokens have KV; the next turn's prompt goes on from there."""
    decoder = Producer(role=Role.CONSUMER, bidirectional_kv_xfer=True)
    told = decoder.hand_over([3, 4, 5, 6, 7], params=FROM_PREFILL, outputs=40)
    granted = decoder.granted(told)
    assert granted.num_tokens == 79
    assert parse(told).hands_over
    turn_2 = Request("turn-2", [*range(40), *[7] * 40, *range(20)])
    assert agreed_tokens(turn_2, granted) == 79  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("role", "params"),
    [
        (Role.BOTH, FROM_PREFILL),
        (Role.CONSUMER, FROM_PREFILL),
        (Role.CONSUMER, TO_DECODER),
    ],
)
def test_turns_that_may_never_come_leave_half_of_the_pool(
    role: Role, params: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Of a pool of 1,000 blocks, whatever clients say to a decoder."""
    caplog.set_level("INFO", logger="vllm.kvplugin.nixl")
    decoder = Producer(role=role, bidirectional_kv_xfer=True)
    kept = []
    for number, count in enumerate([200, 200, 101, 100, 1]):
        made = decoder.request = request(16 * count, params, 1)
        made.request_id = f"turn-{number}"
        rows = list(range(1 + 200 * number, 1 + 200 * number + count))
        told = decoder.handovers.handover(made, (rows,), 16 * count)
        kept.append(len(told["remote_block_ids"]))
        assert decoder.handovers.finished(made) is bool(kept[-1])
    assert kept == [1, 1, 0, 1, 0]
    assert "a shorter decoder_kv_blocks_ttl" in caplog.text
    is_full = role is Role.CONSUMER
    assert decoder.hand_over([998, 999, 997])["do_remote_prefill"] is not is_full
    decoder.now += 481
    assert len(decoder.handovers.collect().expired) == (3 if is_full else 4)
    assert not [record for record in caplog.records if record.levelname != "INFO"]


# -- which blocks ----------------------------------------------------------------------


def cases() -> dict[str, tuple[GroupInfo, int, list[int], list[int] | None]]:
    """Group, computed tokens, row, what is handed over of it (None: nothing)."""
    row = list(range(1, 9))
    return {
        "dense": (group(), 100, row, [1, 2, 3, 4, 5, 6, 7]),
        "dense, whole blocks": (group(), 96, row, [1, 2, 3, 4, 5, 6]),
        "latent": (group(GroupKind.MLA), 16, [9], [9]),
        "dense with a hole": (group(), 100, [1, 0, 3, 4, 5, 6, 7], None),
        "dense, row too short": (group(), 100, row[:6], None),
        "dense, row lost": (group(), 100, [], None),
        # at 100, tokens from 69 on are read; at 99, from 68 on
        "window": (window(32), 100, [0, 0, 0, 0, 5, 6, 7], [5, 6, 7]),
        # at 95 those from 64 on, in block 4 of the row; at 96 those from 65 on
        "window, aligned": (window(32), 96, [0, 0, 0, 0, 5, 6], [5, 6]),
        # at 79 those from 48 on; at 80 those from 49 on
        "window, a block's first token": (window(32), 80, [1, 2, 3, 4, 5], [4, 5]),
        # at 80 those from 64 on, at 79 those from 63 on: not needed, offered
        "window, one earlier": (window(17), 80, [0, 0, 0, 4, 5], [4, 5]),
        "window, one earlier gone": (window(17), 80, [0, 0, 0, 0, 5], [0, 5]),
        "window with a hole": (window(32), 100, [1, 2, 3, 4, 0, 6, 7], None),
        "window longer than all": (window(512), 40, [1, 2, 3], [1, 2, 3]),
        "window for drafts": (window(32, extra=5), 100, row, [4, 5, 6, 7]),
        "window for drafts, gone": (
            window(32, extra=6),
            100,
            [0, 0, 0, 0, 5, 6, 7],
            None,
        ),
        "window of one": (window(1), 33, [0, 0, 3], [3]),
        "chunk": (chunked(32), 100, [0, 0, 0, 0, 0, 0, 7], [7]),
        "chunk, at its end": (chunked(32), 96, [0, 0, 0, 0, 5, 6], [5, 6]),
        "chunk, at its end, gone": (chunked(32), 96, [0] * 6, None),
        "chunk with a hole": (chunked(64), 100, [0, 0, 0, 0, 0, 6, 7], None),
        # a state a step: the one at the end of 100 tokens is in block 6 of the row
        "state": (states(), 100, [0, 0, 3, 0, 0, 0, 7], [7]),
        "state, at a block's end": (states(), 96, [0, 0, 0, 0, 0, 6], [6]),
        "state, draft blocks": (states(), 96, [0, 0, 0, 0, 0, 6, 8, 9], [6]),
        "state, one token": (states(), 1, [4], [4]),
        "state gone": (states(), 100, [0, 0, 0, 0, 0, 6, 0], None),
        "state not there yet": (states(), 100, [0, 0, 0, 0, 0, 6], None),
        "state a block": (
            states(state_every_block=True),
            100,
            [1, 2, 3, 4, 5, 6, 7],
            [7],
        ),
        "state of the whole": (states(block_size=4096), 100, [5], [5]),
    }


@pytest.mark.parametrize("case", cases())
def test_tails(case: str) -> None:
    kind, tokens, row, expected = cases()[case]
    producer = Producer(kind)
    told = producer.hand_over(row, tokens=tokens)
    if expected is None:
        assert producer.is_nothing(told)
    else:
        assert told["remote_block_ids"] == [expected]
        assert producer.granted(told).block_ids == [expected]


def test_a_chunk_that_has_ended_needs_no_block() -> None:
    told = Producer(group(), chunked(16)).hand_over([1, 2], [0, 0], tokens=32)
    assert told["remote_block_ids"] == [[1, 2], [0]]


def test_all_groups_or_none() -> None:
    producer = Producer(group(), window(32), states())
    good = [1, 2, 3], [7, 4, 5], [0, 0, 6]
    told = producer.hand_over(*good)
    assert told["remote_block_ids"] == [[1, 2, 3], [7, 4, 5], [6]]
    assert producer.leases.num_blocks == 7
    for missing in range(3):
        producer = Producer(group(), window(32), states())
        rows = [row if i != missing else [] for i, row in enumerate(good)]
        assert producer.is_nothing(producer.hand_over(*rows))
    assert producer.is_nothing(producer.hand_over(*good[:2]))
    stats = producer.counters.take()
    assert stats is not None
    assert stats.counters == {"empty_handovers": 2}


@pytest.mark.parametrize("rows", [([],), ([0, 0, 0],), (), ([3, 0, 5],), ([3, 4],)])
@pytest.mark.parametrize("computed", [0, 40])
def test_a_prefill_that_lost_its_blocks_says_so(
    rows: tuple[list[int], ...], computed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Scenario 42: preempted between its last step and that step's output."""
    producer = Producer()
    told = producer.hand_over(*rows, computed=computed)
    assert producer.is_nothing(told)
    assert parse(told) == Wanted()
    why = "a block of group 0" if computed else "none of its tokens is computed"
    assert f"'req-1' has no KV to hand over: {why}" in caplog.text


def test_drafts_and_steps_under_way_are_not_handed_over() -> None:
    producer = Producer()
    told = producer.hand_over([3, 4, 5, 6], computed=55, outputs=4)
    assert producer.granted(told).num_tokens == 43


@pytest.mark.parametrize(
    ("computed", "outputs", "row"),
    [
        (44, 4, [0, 0, 5]),  # a step under way
        (43, 4, [0, 0, 5, 6]),  # drafts were accepted, or a block behind is in use
    ],
)
def test_a_state_that_may_be_elsewhere_is_not_handed_over(
    computed: int, outputs: int, row: list[int]
) -> None:
    decoder = Producer(states(), role=Role.BOTH, bidirectional_kv_xfer=True)
    told = decoder.hand_over(
        row, computed=computed, outputs=outputs, params=FROM_PREFILL
    )
    assert decoder.is_nothing(told)
    assert parse(told).hands_over


def test_a_state_after_decoding_is_handed_over() -> None:
    decoder = Producer(states(), role=Role.BOTH, bidirectional_kv_xfer=True)
    told = decoder.hand_over([0, 0, 5], outputs=4, params=FROM_PREFILL)
    assert decoder.granted(told).num_tokens == 43


# -- the last token --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "tokens", "params", "skips", "expected"),
    [
        ((group(), states()), 40, TO_DECODER, False, 1),
        ((group(), states()), 2, TO_DECODER, False, 1),
        ((group(), states()), 1, TO_DECODER, False, 0),
        ((group(), states()), 40, TO_DECODER, True, 0),
        ((group(), states()), 40, FROM_PREFILL, False, 0),
        ((group(), states()), 40, None, False, 0),
        ((group(), window(32)), 40, TO_DECODER, False, 0),
    ],
)
def test_the_last_token_is_left_away_where_states_are_handed_over(
    groups: tuple[GroupInfo, ...],
    tokens: int,
    params: Any,
    skips: bool,
    expected: int,
) -> None:
    made = request(tokens, params)
    made.skip_reading_prefix_cache = skips
    for role in (Role.PRODUCER, Role.BOTH):
        assert Producer(*groups, role=role).handovers.leave_away(made) == expected
    alone = Producer(*groups, role=Role.CONSUMER).handovers
    assert alone.leave_away(made) == 0


@pytest.mark.parametrize("kind", [GroupKind.CROSS_ATTENTION, GroupKind.OTHER])
@pytest.mark.parametrize("reusable", [True, False])
def test_kv_that_cannot_be_handed_over_is_refused_at_the_start(
    kind: GroupKind, reusable: bool
) -> None:
    with pytest.raises(ConfigError, match=kind.value):
        Producer(group(), group(kind, reusable=reusable))


def test_a_window_of_no_tokens_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="no window"):
        Producer(window(0))


def test_hostile_ids_do_no_harm() -> None:
    producer = Producer()
    made = request(40, TO_DECODER, 1)
    made.request_id = "\x1b[2J\n\ud800" * 5000
    told = producer.handovers.handover(made, ([3, 4, 5],), 40)
    assert parse(json.loads(json.dumps(told))).read is not None
    producer.now += 60
    assert producer.handovers.collect().request_ids == [made.request_id]


def test_token_ids_that_are_none_are_not_handed_over() -> None:
    producer = Producer()
    made = producer.request = request(40, TO_DECODER, 1)
    made.all_token_ids[7] = -1
    told = producer.handovers.handover(made, ([3, 4, 5],), 40)
    assert producer.is_nothing(told)
