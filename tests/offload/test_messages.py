"""What the halves say to each other is exactly what was agreed, or refused."""

from typing import Any

import msgpack
import pytest

from kvplugin.connectors.offload.messages import (
    VERSION,
    BlockPairs,
    Completion,
    CopyOrder,
    HostPool,
    Plan,
    Report,
)
from kvplugin.errors import IntegrityError
from kvplugin.wire import decode, encode

ORDER = CopyOrder(7, "r1", [BlockPairs(0, [3, 4], [1, 2])], "")
REFUSED = CopyOrder(8, "r2", [BlockPairs(1, [5], [0])], "a block is missing")
POOLS = [HostPool([0, 2], 64), HostPool([1], 8)]
PLAN = Plan(VERSION, 3, "id", POOLS, [ORDER, REFUSED], [], ["r0"], [5])
REPORT = Report(VERSION, 1, 3, [Completion(7, "", 128, 0.5)])


@pytest.mark.parametrize("message", [PLAN, REPORT])
def test_a_message_arrives_as_it_was_sent(message: Plan | Report) -> None:
    assert decode(encode(message), type(message)) == message


@pytest.mark.parametrize("message", [PLAN, REPORT])
def test_a_message_with_a_field_more_or_less_is_refused(message: Plan | Report) -> None:
    fields = msgpack.unpackb(encode(message))
    for changed in (fields[:-1], [*fields, 0], [], {"version": 1}):
        with pytest.raises(IntegrityError, match=type(message).__name__):
            decode(msgpack.packb(changed), type(message))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, "1"),
        (1, 2.5),
        (2, None),
        (3, 64),
        (3, [[[0], "64"]]),
        (4, [[7, "r1"]]),
        (5, {}),
        (6, [1]),
        (7, ["5"]),
    ],
)
def test_a_field_of_another_type_is_refused(place: int, value: Any) -> None:
    fields = msgpack.unpackb(encode(PLAN))
    fields[place] = value
    with pytest.raises(IntegrityError, match="not a valid Plan"):
        decode(msgpack.packb(fields), Plan)


def test_a_message_is_not_taken_for_another() -> None:
    with pytest.raises(IntegrityError, match="not a valid Report"):
        decode(encode(PLAN), Report)
