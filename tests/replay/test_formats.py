"""Reading traces of all formats, and refusing what is none."""

import gzip
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplugin.errors import ConfigError
from kvplugin.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvplugin.replay import TraceError, read_trace
from kvplugin.replay.formats import READERS
from kvplugin.replay.settings import FORMATS

MOONCAKE = {"timestamp": 1500, "input_length": 600, "output_length": 7}
BAILIAN = {"timestamp": 2.5, "input_length": 20, "output_length": 3, "type": "text"}


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def stored(hashes: list[int], parent: int | None, **more: Any) -> BlockStored:
    fields = {"medium": "GPU", "lora_id": None, "lora_name": None, **more}
    tokens = list(range(16 * len(hashes)))
    return BlockStored(hashes, parent, tokens, 16, **fields)


def as_maps(*events: Any) -> list[Any]:
    return [msgspec.to_builtins(event) for event in events]


def test_each_format_has_a_reader() -> None:
    assert tuple(READERS) == FORMATS


def test_mooncake(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t", {**MOONCAKE, "hash_ids": [4, 5]}, MOONCAKE)
    with pytest.raises(TraceError, match=r"line 2.*hash_ids"):
        read_trace(path)
    write_lines(path, {**MOONCAKE, "hash_ids": [4, 5], "more": 1})
    trace = read_trace(path)
    assert (trace.format, trace.block_size) == ("mooncake", 512)
    assert not trace.full_blocks_only
    [entry] = trace.entries
    assert (entry.timestamp, entry.input_length, entry.ids) == (1.5, 600, (4, 5))


def test_another_block_size(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t", {**MOONCAKE, "hash_ids": [*range(10)]})
    with pytest.raises(TraceError, match=r"line 1: 10 hash_ids .* 2 expected"):
        read_trace(path)
    assert read_trace(path, block_size=64).block_size == 64


def test_bailian_follows_parents_to_a_session(tmp_path: Path) -> None:
    lines = [
        {**BAILIAN, "chat_id": chat, "parent_chat_id": parent, "turn": turn}
        | {"hash_ids": [1, chat]}
        for chat, parent, turn in ((9, -1, 1), (4, 9, 2), (5, -1, 1), (7, 4, 3))
    ]
    trace = read_trace(write_lines(tmp_path / "t", *lines))
    assert (trace.format, trace.block_size) == ("bailian", 16)
    assert [entry.session for entry in trace.entries] == ["9", "9", "5", "9"]
    assert [entry.turn for entry in trace.entries] == [0, 1, 0, 2]


@pytest.mark.parametrize("form", ["msgpack", "arrays", "json", "events"])
def test_vllm_events(tmp_path: Path, form: str) -> None:
    path = tmp_path / "t"
    batches: list[Any] = [
        (10.0, [stored([1, 2], None)]),
        (10.5, [stored([3], 2), BlockRemoved([1], "GPU")]),  # the same request
        (60.0, [stored([4], 2)]),
        (61.0, [stored([8], None, group_idx=1), stored([9], None, medium="CPU")]),
        (70.0, [AllBlocksCleared()]),
        (80.0, [stored([1], None), stored([6], 5)]),
    ]
    if form == "msgpack":
        packed = [msgpack.packb([ts, as_maps(*events), 0]) for ts, events in batches]
        path.write_bytes(b"".join(packed))
    elif form == "arrays":
        path.write_bytes(
            b"".join(
                msgpack.packb([ts, [_as_array(event) for event in events]])
                for ts, events in batches
            )
        )
    elif form == "json":
        lines = [{"ts": ts, "events": as_maps(*events)} for ts, events in batches]
        write_lines(path, *lines)
    else:
        lines = [
            {"ts": ts, **event} for ts, events in batches for event in as_maps(*events)
        ]
        write_lines(path, *lines)
    trace = read_trace(path)
    assert (trace.format, trace.block_size) == ("vllm-events", 16)
    assert [entry.ids for entry in trace.entries] == [
        (1, 2, 3),
        (1, 2, 4),
        ("1/1",),
        ("1/5", "1/6"),
    ]
    assert [entry.input_length for entry in trace.entries] == [48, 48, 16, 32]
    assert any("invisible" in note for note in trace.notes)


def _as_array(event: Any) -> list[Any]:
    return [type(event).__name__, *(getattr(event, f) for f in event.__struct_fields__)]


def test_events_agree_with_vllms_publisher(tmp_path: Path) -> None:
    # As `ZmqEventPublisher` encodes, with the structs of the 0.32 range.
    batch = msgspec.msgpack.encode([1.0, [stored([2**64 - 1], None)], 0])
    (tmp_path / "t").write_bytes(batch)
    assert read_trace(tmp_path / "t").entries[0].ids == (2**64 - 1,)


def test_gzip_and_limit(tmp_path: Path) -> None:
    line = json.dumps({**MOONCAKE, "hash_ids": [4, 5]}).encode() + b"\n"
    path = tmp_path / "t.gz"
    path.write_bytes(gzip.compress(line * 3))
    assert len(read_trace(path).entries) == 3
    assert len(read_trace(path, limit=2).entries) == 2
    path.write_bytes(gzip.compress(line * 300)[:-20])
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"\xef\xbb\xbf \n", "is empty"),
        (b'\n\n{"hash_ids": 1', "line 3"),
        (b"hello\n", "known formats"),
        (b"{", "line 1"),
        (b"[" * 100_000, "line 1"),
        (b'{"a": 1}\n', "known formats"),
        (b'{"hash_ids": [1]}\n', "line 1: .*timestamp"),
        (b'{"format": "kvplugin-trace", "version": 2, "block_size": 16}\n', "version"),
        (
            b'{"format": "kvplugin-trace", "version": 1, "block_size": 0}\n',
            "block_size",
        ),
        (b'{"format": "kvplugin-trace", "version": 1, "block_size": 4}\n', "requests"),
        (b'{"format": "kvplugin-trace", "version": 1, "size": 4}\n', "line 1"),
        (b'{"type": "AllBlocksCleared"}\n', "stores no block"),
        (b'{"ts": 1, "events": [{"type": "Gone"}]}\n', "line 1: 'Gone' is none of"),
        (b'{"ts": NaN, "events": []}\n', "line 1: NaN is no number"),
        (b'{"ts": 1, "events": []}\n[-Infinity, []]\n', "line 2: -Infinity"),
        (msgpack.packb([float("nan"), []]), "batch 1: time nan"),
        (msgpack.packb([1.0, []]) + msgpack.packb([float("inf"), []]), "batch 2: time"),
        (b"\x81\x80\x01", "batch 1: .*unhashable"),  # a map with a map as a key
        (b"\x81\x90\x01", "batch 1"),  # and with an array
        (b"\x93\x01\x90", "batch 1"),
        (b"\xc1", "batch 1"),
    ],
)
def test_refusals(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        read_trace(path)


def test_no_such_file_or_format(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "none")
    with pytest.raises(ConfigError, match="Did you mean 'mooncake'"):
        read_trace(tmp_path / "none", "moncake")


def text_of(name: str) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in GOOD_LINES[name])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "front", [b"\xef\xbb\xbf", b"\n\n", b"  ", b"\xef\xbb\xbf\r\n "]
)
@pytest.mark.parametrize("packed", [False, True])
def test_what_editors_put_in_front(
    tmp_path: Path, name: str, front: bytes, packed: bool
) -> None:
    content = front + text_of(name)
    path = tmp_path / "t"
    path.write_bytes(gzip.compress(content) if packed else content)
    trace = read_trace(path)
    assert trace.format == name
    path.write_bytes(text_of(name))
    assert read_trace(path) == trace == read_trace(path, name)


def test_events_in_arrays_stand_alone(tmp_path: Path) -> None:
    events = [_as_array(stored([1, 2], None)), _as_array(AllBlocksCleared())]
    path = write_lines(tmp_path / "t", *events)
    assert [entry.ids for entry in read_trace(path).entries] == [(1, 2)]


@pytest.mark.parametrize("first", [{"parent_chat_id": None}, {}])
def test_sessions_may_begin_without_parent(
    tmp_path: Path, first: dict[str, None]
) -> None:
    line = dict(GOOD_LINES["bailian"][0])
    del line["parent_chat_id"]
    path = write_lines(tmp_path / "t", {**line, **first})
    trace = read_trace(path)
    assert (trace.format, trace.entries[0].session) == ("bailian", "1")


def test_pipes_are_refused_before_anybody_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t")
    with pytest.raises(TraceError, match="save it to a file first"):
        read_trace(tmp_path / "t")


@pytest.mark.parametrize("number", [{"limit": 0}, {"block_size": True}])
def test_numbers_are_checked(tmp_path: Path, number: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(number))):
        read_trace(tmp_path / "none", **number)


GOOD_LINES = {
    "kvplugin": [
        {"format": "kvplugin-trace", "version": 1, "block_size": 16},
        {"timestamp": 1, "input_length": 40, "output_length": 9, "block_hashes": [1]},
    ],
    "mooncake": [{**MOONCAKE, "hash_ids": [4, 5]}],
    "bailian": [{**BAILIAN, "chat_id": 1, "parent_chat_id": -1, "hash_ids": [1, 2]}],
    "vllm-events": as_maps(stored([1], None), stored([2], 1)),
}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@st.composite
def damaged_files(draw: st.DrawFn) -> tuple[str, bytes]:
    """A format, and a file of it with a changed value or changed bytes."""
    name = draw(st.sampled_from(FORMATS))
    lines = [dict(line) for line in GOOD_LINES[name]]
    line = draw(st.sampled_from(lines))
    line[draw(st.sampled_from(sorted(line)))] = draw(json_values)
    content = bytearray("\n".join(map(json.dumps, lines)).encode())
    for _ in range(draw(st.integers(0, 2))):
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    return name, bytes(content)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(damaged_files())
def test_damage_is_a_trace_error(
    tmp_path_factory: pytest.TempPathFactory, damaged: tuple[str, bytes]
) -> None:
    name, content = damaged
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(content)
    for wanted in (name, "auto"):
        with suppress(TraceError):
            assert read_trace(path, wanted).entries


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=60), name=st.sampled_from(["auto", *FORMATS]))
def test_noise_is_a_trace_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, name: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "noise"
    path.write_bytes(content)
    with pytest.raises(TraceError):
        read_trace(path, name)
