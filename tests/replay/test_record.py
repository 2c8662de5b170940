"""What the writer writes is what the reader reads."""

import gzip
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
        writer.write(timestamp=0, input_length=-1, output_length=1, block_hashes=[])
    writer.close()
    with pytest.raises(TraceError, match="no requests"):
        read_trace(tmp_path / "t")


LINE = {"timestamp": 0.0, "input_length": 40, "output_length": 9}
HEADER = b'{"format":"kvplugin-trace","version":1,"block_size":16}\n'


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_hashes": [1, 2, 3, 4]}, "4 block_hashes of 16 tokens for .* 49"),
        ({"block_hashes": "ab"}, "block_hashes='ab' must be a list"),
        ({"block_hashes": b"ab"}, "block_hashes=.* must be a list"),
        ({"block_hashes": 5}, "block_hashes=5 must be a list"),
        ({"block_hashes": [1, 1.5]}, r"block_hashes\[1\]=1.5 must be an integer"),
        ({"block_hashes": [True]}, r"block_hashes\[0\]=True must be an integer"),
        ({"block_hashes": [None]}, r"block_hashes\[0\]=None must be an integer"),
        ({"block_hashes": [2**64]}, r"block_hashes\[0\]=.* of 64 bits"),
        ({"block_hashes": [b""]}, r"block_hashes\[0\] is empty"),
        ({"block_hashes": ["\ud800"]}, r"block_hashes\[0\]=.*surrogates"),
        ({"timestamp": float("nan")}, "timestamp=nan must be a finite"),
        ({"timestamp": float("-inf")}, "timestamp=-inf must be a finite"),
        ({"timestamp": "1"}, "timestamp='1' must be a number"),
        ({"ttl_s": float("inf")}, "ttl_s=inf must be a finite"),
        ({"ttl_s": "long"}, "ttl_s='long' must be a number"),
        ({"input_length": 4.0}, "input_length=4.0 must be an integer"),
        ({"output_length": None}, "output_length=None must be an integer"),
        ({"output_length": -1}, "output_length=-1"),
        ({"session": 5}, "session=5 must be a string"),
        ({"ends_session": 1}, "ends_session=1 must be true or false"),
        ({"turn": "1"}, "turn='1' must be an integer"),
        ({"priority": 1.5}, "priority=1.5 must be an integer"),
        ({"cached_tokens": -1}, "cached_tokens=-1"),
        ({"cached_tokens": 41}, "cached_tokens=41 of an input_length of 40"),
    ],
)
def test_nothing_is_written_that_cannot_be_read(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    good = {**LINE, "block_hashes": [1]}
    with TraceWriter(tmp_path / "t", block_size=16) as writer:
        writer.write(**good)
        with pytest.raises(ConfigError, match=message):
            writer.write(**{**good, **change})
        writer.write(**good)
    assert len(read_trace(tmp_path / "t").entries) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_hashes": [1, 2, 3, 4]}, "line 3: 4 block_hashes of 16"),
        ({"cached_tokens": -1}, "line 3: .*cached_tokens"),
        ({"cached_tokens": 41}, "line 3: .*cached_tokens=41"),
        ({"input_length": -1}, "line 3: .*input_length"),
    ],
)
def test_nor_read_if_others_wrote_it(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    lines = [{**LINE, "block_hashes": [1]}, {**LINE, "block_hashes": [1], **change}]
    text = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    (tmp_path / "t").write_bytes(HEADER + text)
    with pytest.raises(TraceError, match=message):
        read_trace(tmp_path / "t")


def test_values_as_engines_have_them(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy", reason="the numbers under test are numpy's")
    with TraceWriter(tmp_path / "t", block_size=16) as writer:
        writer.write(
            timestamp=np.float32(1.5),
            input_length=np.int64(64),
            output_length=np.uint8(0),
            block_hashes=np.array([1, 2**64 - 1], dtype=np.uint64),
            cached_tokens=np.int32(16),
        )
        eight = bytes(range(8))
        same = [eight, bytearray(eight), memoryview(b"longer, " + eight)]
        writer.write(**{**LINE, "timestamp": 2, "block_hashes": same})
        writer.write(timestamp=3, input_length=0, output_length=0, block_hashes=())
    one, two, three = read_trace(tmp_path / "t").entries
    assert (one.timestamp, one.input_length, one.ids) == (1.5, 64, (1, 2**64 - 1))
    assert len(set(two.ids)) == 1
    assert three.input_length == 0


def test_names_in_gz_are_packed(tmp_path: Path) -> None:
    for name in ("one.gz", "two.gz"):
        with TraceWriter(tmp_path / name, block_size=16) as writer:
            writer.write(**LINE, block_hashes=[1])
    one, two = ((tmp_path / name).read_bytes() for name in ("one.gz", "two.gz"))
    assert one == two
    assert gzip.decompress(one).count(b"\n") == 2
    assert read_trace(tmp_path / "one.gz").entries[0].ids == (1,)


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
