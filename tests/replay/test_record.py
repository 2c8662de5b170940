"""What the writer writes is what the reader reads."""

import json
from pathlib import Path

import pytest

from kvplugin.errors import ConfigError
from kvplugin.replay import TraceError, TraceWriter, read_trace


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with TraceWriter(path, block_size=16, groups=["full_attention"]) as writer:
        writer.write(
            timestamp=0.5,
            input_length=40,
            output_length=9,
            block_hashes=[b"\xff" * 24 + bytes(7) + b"\x05", 7, "x"],
            session="s",
            turn=2,
            priority=3,
            ttl_s=60.0,
            ends_session=True,
            cached_tokens=16,
        )
        first = path.read_text()  # there before the file is closed
        writer.write(timestamp=1, input_length=3, output_length=0, block_hashes=[])
    assert first.count("\n") == 2
    trace = read_trace(path)
    assert (trace.block_size, trace.full_blocks_only) == (16, True)
    one, two = trace.entries
    assert one.ids == (5, 7, "x")
    assert (one.session, one.turn, one.priority, one.ttl_s) == ("s", 2, 3, 60.0)
    assert (one.ends_session, one.cached_tokens) == (True, 16)
    assert two.ids == ()
    assert one.timestamp < two.timestamp
    assert json.loads(path.read_text().splitlines()[2]) == {
        "timestamp": 1.0,
        "input_length": 3,
        "output_length": 0,
        "block_hashes": [],
    }


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="block_size"):
        TraceWriter(tmp_path / "t", block_size=0)
    writer = TraceWriter(tmp_path / "t", block_size=16)
    with pytest.raises(ConfigError, match="input_length"):
        writer.write(timestamp=0, input_length=0, output_length=1, block_hashes=[])
    writer.close()
    with pytest.raises(TraceError, match="no requests"):
        read_trace(tmp_path / "t")


def test_too_many_hashes_name_the_line(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", block_size=16) as writer:
        for hashes in ([1], [1, 2]):
            writer.write(
                timestamp=0, input_length=16, output_length=8, block_hashes=hashes
            )
    with pytest.raises(TraceError, match="line 3: 2 block_hashes of 16"):
        read_trace(tmp_path / "t")


def test_requests_are_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", block_size=16) as writer:
        for arrival, session in ((3, "a"), (1, "b"), (3, "c"), (2, "d")):
            writer.write(
                timestamp=arrival,
                input_length=16,
                output_length=1,
                block_hashes=[1],
                session=session,
            )
    trace = read_trace(tmp_path / "t")
    assert [entry.session for entry in trace.entries] == ["b", "d", "a", "c"]
    assert any("order of arrival" in note for note in trace.notes)
