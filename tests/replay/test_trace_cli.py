"""`kvplugin trace` as users call it."""

import gzip
import json
from pathlib import Path

from kvplugin.errors import ConfigError
from kvplugin.replay import TraceError, read_trace
from tests.replay.test_cli import call
from tests.replay.traces import SYNTHETIC


def test_trace_commands(tmp_path: Path) -> None:
    path, copy = tmp_path / "t.jsonl", tmp_path / "copy.jsonl"
    arguments = ("--kind", "chat", "--requests", 60, "--seed", 4, "-o", path)
    assert call("trace", "generate", *arguments).exit_code == 0
    info = call("trace", "info", path)
    assert "60 in" in info.stdout
    assert "unbounded cache" in info.stdout
    found = json.loads(call("trace", "info", path, "--json").stdout)
    assert (found["requests"], found["format"]) == (60, "kvplugin")
    assert call("trace", "convert", path, copy).exit_code == 0
    assert copy.read_bytes() == path.read_bytes()
    result = call("replay", path, "--capacity", "500", "--json")
    assert json.loads(result.stdout)["rules"]["partial blocks"].startswith("the trace")


def test_convert_keeps_full_blocks(tmp_path: Path) -> None:
    target = tmp_path / "t.jsonl"
    result = call("trace", "convert", SYNTHETIC, target, "--limit", 50)
    assert result.exit_code == 0, result.output
    before = read_trace(SYNTHETIC, limit=50).entries
    after = read_trace(target).entries
    for one, two in zip(before, after, strict=True):
        assert two.ids == one.ids[: one.input_length // 512]
        assert two.timestamp == one.timestamp


def test_trace_errors(tmp_path: Path) -> None:
    result = call("trace", "info", tmp_path / "none")
    assert isinstance(result.exception, TraceError)
    result = call("trace", "generate", "--kind", "chat", "-o", tmp_path / "a" / "b")
    assert isinstance(result.exception, ConfigError)
    assert "--output" in str(result.exception)
    assert call("trace", "generate", "--kind", "none", "-o", "x").exit_code == 2


def mooncake(path: Path, *times: int, tokens: int = 1024) -> Path:
    lines = [
        {
            "timestamp": time,
            "input_length": tokens,
            "output_length": 5,
            "hash_ids": [2 * i, 2 * i + 1][: -(tokens // -512)],
        }
        for i, time in enumerate(times)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_converting_keeps_the_order(tmp_path: Path) -> None:
    source = mooncake(tmp_path / "s", 5000, 1000, 6000, 2000, 6000)
    result = call("trace", "convert", source, tmp_path / "t")
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("2 timestamps go back")
    before, after = read_trace(source).entries, read_trace(tmp_path / "t").entries
    assert [entry.ids for entry in after] == [entry.ids for entry in before]
    assert [entry.timestamp for entry in after] == [5, 5, 6, 6, 6]
    source = mooncake(tmp_path / "s", 1000, 1000, 2000)
    assert call("trace", "convert", source, tmp_path / "t").stderr == ""


def test_prompts_without_tokens_are_converted(tmp_path: Path) -> None:
    source = mooncake(tmp_path / "s", 1000, tokens=0)
    assert call("trace", "convert", source, tmp_path / "t").exit_code == 0
    assert read_trace(tmp_path / "t").entries[0].input_length == 0


def test_a_failure_leaves_the_target_alone(tmp_path: Path) -> None:
    target = tmp_path / "t"
    target.write_text("precious")
    source = mooncake(tmp_path / "s", 1000, 2000)
    source.write_text(source.read_text().replace("[2, 3]", f"[2, {2**70}]"))
    result = call("trace", "convert", source, target)
    assert isinstance(result.exception, ConfigError)
    assert "request 2: block_hashes[1]" in str(result.exception)
    assert target.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s", "t"]


def test_a_trace_may_be_converted_in_place(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "s", 1000, 2000)
    link = tmp_path / "link"
    link.symlink_to(path)
    before = read_trace(path).entries
    assert call("trace", "convert", path, link).exit_code == 0
    assert link.is_symlink()
    assert read_trace(path).format == "kvplugin"
    assert [entry.ids for entry in read_trace(path).entries] == [
        entry.ids for entry in before
    ]


def test_devices_are_written_and_not_replaced() -> None:
    options = ("--kind", "chat", "--requests", 2, "-o", "/dev/null")
    assert call("trace", "generate", *options).exit_code == 0
    assert Path("/dev/null").is_char_device()


def test_gz_is_gzipped_and_the_same_each_time(tmp_path: Path) -> None:
    names = ("one.gz", "two.gz", "plain")
    for name in names:
        options = ("--kind", "chat", "--requests", 9, "-o", tmp_path / name)
        assert call("trace", "generate", *options).exit_code == 0
    one, two, plain = (
        (tmp_path / n).read_bytes() for n in ("one.gz", "two.gz", "plain")
    )
    assert one == two
    assert gzip.decompress(one) == plain
