"""`kvplugin replay` and `kvplugin trace` as users call them."""

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvplugin.cli.main import cli
from kvplugin.errors import ConfigError
from kvplugin.replay import TraceError, read_trace
from tests.replay.traces import SYNTHETIC

COUNTS = {
    "requests": int,
    "skipped": int,
    "blocks": int,
    "device_blocks": int,
    "host_blocks": int,
    "tokens": int,
    "device_tokens": int,
    "host_tokens": int,
    "evictions": int,
    "block_rate": float,
    "token_rate": float,
}
RUN = {
    "policy": str,
    "capacity": int,
    "reference": bool,
    "closed": float,
    "seconds": float,
    **COUNTS,
}
RESULT = {
    "schema_version": int,
    "trace": str,
    "format": str,
    "block_size": int,
    "rules": dict,
    "ceiling": dict,
    "runs": list,
}
DOCS = Path(__file__).parents[2] / "docs" / "replay.md"


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def replayed(*arguments: object) -> Result:
    return call("replay", SYNTHETIC, "--limit", 400, "--capacity", *arguments)


def has_types(found: dict[str, Any], types: dict[str, type]) -> bool:
    return {key: type(value) for key, value in found.items()} == types


def test_json_has_the_documented_keys() -> None:
    result = replayed("500,1000", "--policy", "lru,sieve", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert has_types(found, RESULT)
    assert has_types(found["ceiling"], COUNTS)
    assert all(has_types(run, RUN) for run in found["runs"])
    assert [(run["policy"], run["capacity"]) for run in found["runs"]] == [
        (policy, capacity)
        for capacity in (500, 1000)
        for policy in ("lru", "sieve", "belady")
    ]
    assert (found["schema_version"], found["block_size"]) == (1, 512)
    described = DOCS.read_text()
    assert all(f"`{key}`" in described for key in (*RESULT, *RUN))


def test_without_references() -> None:
    result = replayed("500", "--policy", "sieve", "--no-references", "--json")
    found = json.loads(result.stdout)
    assert found["ceiling"] is None
    [run] = found["runs"]
    assert (run["policy"], run["closed"], run["reference"]) == ("sieve", None, False)


@pytest.mark.parametrize("rich", [True, False])
def test_table_and_rules(rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not rich:
        forbid_import(monkeypatch, "rich")
    result = replayed("1000", "--policy", "lru", "--host-capacity", 300)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""  # no progress where nobody watches
    lines = result.stdout.splitlines()
    [head] = [line for line in lines if "capacity" in line and "closed" in line]
    names = "capacity policy blocks host tokens closed evicted skipped s"
    assert head.split() == names.split()
    [lru] = [line.split() for line in lines if line.split()[:2] == ["1000", "lru"]]
    assert len(lru) == len(head.split())
    assert any(line.split()[:2] == ["1000", "(belady)"] for line in lines)
    for words in ("prefix-chained", "partial block", "the first 0 requests", "300 blo"):
        assert words in result.stdout


def test_options_reach_the_policy() -> None:
    result = replayed("500", "--policy", "random", "--policy-options", '{"random": 1}')
    assert result.exit_code == 2
    assert "must be like" in result.output
    options = json.dumps({"random": {"seeed": 3}})
    result = replayed("500", "--policy", "random", "--policy-options", options)
    assert isinstance(result.exception, ConfigError)
    assert "seeed" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["many"], 2, "invalid literal"),
        (["0"], 1, "capacity=0"),
        (["5", "--policy", "lur"], 1, "Did you mean 'lru'"),
        (["5", "--policy-options", "{"], 2, "not JSON"),
        (["5", "--warmup", "1"], 2, "--warmup"),
        (["5", "--format", "csv"], 2, "--format"),
        (["5", "--format", "bailian"], 1, "line 1"),
        (["5", "--semantics", "flat", "--running", "3"], 1, "leave out running"),
        (["5", "--block-size", "100"], 1, "block_size=100 must divide"),
    ],
)
def test_errors(arguments: list[str], code: int, message: str) -> None:
    result = replayed(*arguments)
    assert result.exit_code == code
    assert message in f"{result.output} {result.exception}"
    if code == 1:
        assert isinstance(result.exception, ConfigError | TraceError)


def test_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="needs kvplugin[plot]")
    path = tmp_path / "rates.png"
    result = replayed("300,600", "--picture", path)
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")
    result = replayed("300", "--no-references", "--picture", tmp_path / "rates.nope")
    assert "nope" in str(result.exception)
    forbid_import(monkeypatch, "matplotlib")
    result = replayed("300", "--no-references", "--picture", path)
    assert isinstance(result.exception, ConfigError)
    assert "kvplugin[plot]" in str(result.exception)


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvplugin.cli import tables

    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(tables.sys, "stderr", Terminal())
    forbid_import(monkeypatch, "rich")
    told = []
    monkeypatch.setattr(tables.click, "echo", lambda text="", **more: told.append(text))
    with tables.progress() as tell:
        assert tell is not None
        tell("lru 5", 256, 400)
    assert told == ["\r\033[Klru 5 256/400", "\r\033[K"]


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


def forbid_import(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    real = builtins.__import__

    def fake(name: str, *more: Any, **others: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *more, **others)

    monkeypatch.setattr(builtins, "__import__", fake)
