"""A message arrives as it was sent, or not at all."""

import resource
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

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

INTS = st.integers(-(2**63), 2**64 - 1)
IDS = st.lists(INTS, max_size=3)
FLOATS = st.floats(allow_nan=False)
ORDERS = st.builds(
    CopyOrder,
    INTS,
    st.text(),
    st.lists(st.builds(BlockPairs, INTS, IDS, IDS)),
    st.text(),
)
POOLS = st.builds(HostPool, st.lists(INTS, max_size=2), INTS)
PLANS = st.builds(
    Plan,
    st.just(VERSION),
    INTS,
    st.text(),
    st.lists(POOLS, max_size=2),
    st.lists(ORDERS, max_size=2),
    st.lists(ORDERS, max_size=2),
    st.lists(st.text(), max_size=2),
    st.lists(INTS, max_size=2),
)
COMPLETIONS = st.builds(Completion, INTS, st.text(), INTS, FLOATS)
REPORTS = st.builds(
    Report, st.just(VERSION), INTS, INTS, st.lists(COMPLETIONS, max_size=2)
)

ORDER = CopyOrder(7, "request", [BlockPairs(0, [1, 2], [3, 4])], "")
REFUSED = CopyOrder(8, "request", [BlockPairs(1, [5], [6])], "why")
POOL = HostPool([0, 1], 100)
PLAN = Plan(VERSION, 5, "id", [POOL], [ORDER], [REFUSED], ["done"], [6])
REPORT = Report(VERSION, 1, 5, [Completion(7, "torn", 4096, 0.25)])
MESSAGES = [PLAN, REPORT]

WRONG: dict[type, list[Any]] = {
    int: ["1", b"1", 1.5, 1.0, True, None, [1], {}],
    str: [b"text", 1, None, ["text"], {}],
    float: ["1.5", True, None, [1.5], {}],
    list: ["list", b"list", 1, None, {}, {"0": 1}],
}
"""Values in place of one of the type."""

Path = tuple[int, ...]


def places(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value inside a message as it is sent, and the message itself."""
    yield path, value
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from places(item, (*path, i))


def structs(value: Any, path: Path = ()) -> Iterator[Path]:
    """Where the structs inside a message are, and the message itself."""
    if isinstance(value, msgspec.Struct):
        yield path
        for i, item in enumerate(msgspec.structs.astuple(value)):
            yield from structs(item, (*path, i))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from structs(item, (*path, i))


def at(value: Any, path: Path) -> Any:
    for i in path:
        value = value[i]
    return value


def replaced(message: msgspec.Struct, path: Path, value: Any) -> bytes:
    sent = [deepcopy(msgspec.to_builtins(message))]
    *parents, last = (0, *path)
    at(sent, tuple(parents))[last] = value
    return msgpack.packb(sent[0])


def refuse(data: bytes, kind: type[msgspec.Struct]) -> None:
    with pytest.raises(IntegrityError, match=f"not a valid {kind.__name__}: .+"):
        decode(data, kind)


@given(st.one_of(PLANS, REPORTS))
def test_message_arrives_as_it_was_sent(message: msgspec.Struct) -> None:
    assert decode(encode(message), type(message)) == message


def test_bytes_arrive_as_bytes() -> None:
    class Blob(msgspec.Struct, frozen=True):
        data: bytes

    assert decode(encode(Blob(b"\x00\xff")), Blob) == Blob(b"\x00\xff")
    refuse(msgpack.packb({"data": "QUFB"}), Blob)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_value_of_a_wrong_type_is_refused_wherever_it_is(
    message: msgspec.Struct,
) -> None:
    for path, value in places(msgspec.to_builtins(message)):
        for wrong in WRONG[type(value)]:
            refuse(replaced(message, path, wrong), type(message))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_field_too_many_or_too_few_is_refused_wherever_it_is(
    message: msgspec.Struct,
) -> None:
    sent = msgspec.to_builtins(message)
    for path in structs(message):
        row = at(sent, path)
        refuse(replaced(message, path, [*row, 0]), type(message))
        refuse(replaced(message, path, row[:-1]), type(message))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_message_cut_anywhere_is_refused(message: msgspec.Struct) -> None:
    data = encode(message)
    for end in range(len(data)):
        refuse(data[:end], type(message))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_message_with_something_after_it_is_refused(message: msgspec.Struct) -> None:
    refuse(encode(message) + b"\x00", type(message))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_message_of_another_version_is_refused(
    message: msgspec.Struct, version: int
) -> None:
    refuse(encode(msgspec.structs.replace(message, version=version)), type(message))


def test_message_of_another_kind_is_refused() -> None:
    refuse(encode(PLAN), Report)
    refuse(encode(REPORT), Plan)


@given(st.binary(max_size=64))
def test_random_bytes_are_refused(data: bytes) -> None:
    refuse(data, Plan)


@given(st.data())
def test_damaged_message_is_refused_or_is_a_message(data: st.DataObject) -> None:
    # Bytes carry no checksum between halves of one machine: a flipped bit inside a
    # number gives another number. Whatever arrives has the right types, though.
    damaged = bytearray(encode(PLAN))
    for place in data.draw(st.sets(st.integers(0, len(damaged) - 1), min_size=1)):
        damaged[place] = data.draw(st.integers(0, 255))
    try:
        message = decode(bytes(damaged), Plan)
    except IntegrityError:
        return
    assert decode(encode(message), Plan) == message


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\xc1", id="byte that MessagePack never uses"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="list of 4 billion items"),
        pytest.param(b"\xc6\xff\xff\xff\xff", id="4 GiB of bytes"),
        pytest.param(b"\x91" * 100_000, id="lists in lists in lists"),
        pytest.param(b"\x81\x90\x00", id="list as a key"),
        pytest.param(b"\xa1\xff", id="text that is not UTF-8"),
        pytest.param(b"\xd4\x05\x00", id="extension type"),
        pytest.param(b"\xc7\x0c\xff" + b"\xff" * 12, id="impossible timestamp"),
    ],
)
def test_hostile_bytes_are_refused(data: bytes) -> None:
    refuse(data, Plan)


def test_announced_lengths_take_no_memory() -> None:
    """Nested announcements of 2**20 entries each would take 8 GB."""
    bomb = (b"\xdd\x00\x0f\xff\xff" * 1000).ljust(1 << 20, b"\xc0")
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    refuse(bomb, Plan)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - pages < 20_000
