"""Reading the beginning of a trace."""

from pathlib import Path

import pytest

from kvplugin.replay import TraceError, read_trace
from tests.replay.test_formats import GOOD_LINES, as_maps, stored, text_of, write_lines


@pytest.mark.parametrize("name", ["mooncake", "bailian", "vllm-events"])
def test_lines_behind_the_limit_are_not_looked_at(tmp_path: Path, name: str) -> None:
    path = tmp_path / "t"
    path.write_bytes(text_of(name) + b'{"ts": 90, "events": []}\n{"broken')
    assert len(read_trace(path, name, limit=1).entries) == 1
    with pytest.raises(TraceError):
        read_trace(path, name)


def test_our_own_format_is_sorted_before_it_is_cut(tmp_path: Path) -> None:
    header, line = GOOD_LINES["kvplugin"]
    path = write_lines(tmp_path / "t", header, line, {**line, "timestamp": 0})
    assert [entry.timestamp for entry in read_trace(path, limit=1).entries] == [0]
    with path.open("a") as file:
        file.write("{")
    with pytest.raises(TraceError, match="line 4"):
        read_trace(path, limit=1)


def test_wanted_requests_are_whole(tmp_path: Path) -> None:
    batches = [
        (0.0, stored([1], None)),
        (0.2, stored([8], None)),
        (0.9, stored([2], 1)),  # the first goes on behind the second
        (1.8, stored([3], 2)),
        (9.0, stored([4], 3)),
    ]
    lines = [{"ts": ts, "events": as_maps(event)} for ts, event in batches]
    path = write_lines(tmp_path / "t", *lines)
    for limit in (1, 2, 3):
        limited = read_trace(path, limit=limit)
        assert limited.entries == read_trace(path).entries[:limit]
    assert read_trace(path, limit=1).entries[0].ids == (1, 2, 3)
