"""`kvplugin replay` and `kvplugin trace` as users call them."""

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvplugin.cli.main import cli
from kvplugin.errors import ConfigError
from kvplugin.hooks import Hooks
from kvplugin.replay import RunFailedError, TraceError
from tests.replay.test_failures import FailingPlugin
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
    result = replayed("500", "--policy", "sieve", "--references", "none", "--json")
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
        (["many"], 2, "'many' is no number of blocks"),
        (["0"], 2, "at least 1 block"),
        (["-5"], 2, "no number of blocks"),
        (["1.5k"], 2, "no number of blocks"),
        (["5,"], 2, "no number of blocks"),
        (["5", "--host-capacity", "1G"], 2, "no number of blocks"),
        (["5", "--policy", "lru,,arc"], 2, "a comma too many"),
        (["5", "--policy", ""], 2, "a name is empty"),
        (["5", "--warmup", "nan"], 2, "nan is no number"),
        (["5", "--host-policy", "arc"], 1, "needs a host_capacity"),
        (["5", "--policy", "lur"], 1, "Did you mean 'lru'"),
        (["5", "--policy-options", "{"], 2, "not JSON"),
        (["5", "--warmup", "1"], 2, "--warmup"),
        (["5", "--format", "csv"], 2, "--format"),
        (["5", "--format", "bailian"], 1, "line 1"),
        (["5", "--semantics", "flat", "--running", "3"], 1, "leave out running"),
        (["5", "--semantics", "flat", "--partial", "drop"], 1, "leave out partial"),
        (["5", "--block-size", "100"], 1, "block_size=100 must divide"),
    ],
)
def test_errors(arguments: list[str], code: int, message: str) -> None:
    result = replayed(*arguments)
    assert result.exit_code == code
    assert message in f"{result.output} {result.exception}"
    if code == 1:
        assert isinstance(result.exception, ConfigError | TraceError)


def test_lists_are_read_as_people_write_them() -> None:
    result = replayed(
        "1k, 2K,1000", "--policy", "sieve, arc,sieve", "--references", "none", "--json"
    )
    runs = json.loads(result.stdout)["runs"]
    assert [(run["policy"], run["capacity"]) for run in runs] == [
        (policy, capacity) for capacity in (1000, 2000) for policy in ("sieve", "arc")
    ]


def test_lru_alone_as_a_reference() -> None:
    result = replayed("500", "--policy", "sieve", "--references", "lru", "--json")
    found = json.loads(result.stdout)
    assert [run["policy"] for run in found["runs"]] == ["sieve", "lru"]
    assert found["ceiling"]["device_blocks"] > 0


def test_a_host_tier_and_no_block(tmp_path: Path) -> None:
    path = tmp_path / "t"
    line = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": []}
    path.write_text(json.dumps(line))
    options = ("--capacity", 5, "--host-capacity", 5, "--partial", "drop")
    result = call("replay", path, *options)
    assert result.exit_code == 0, result.output
    assert "0.00%" in result.stdout


@pytest.mark.parametrize("rich", [True, False])
def test_flat_keys_have_no_tokens(rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not rich:
        forbid_import(monkeypatch, "rich")
    result = replayed("500", "--semantics", "flat")
    lines = [line.split() for line in result.stdout.splitlines()]
    [lru] = [cells for cells in lines if cells[:2] == ["500", "lru"]]
    assert lru[3] == "-"
    assert "- of tokens hit" in result.stdout


@pytest.mark.parametrize("name", ["[bold]", "a[/b]", "[link=x]y"])
def test_names_are_no_markup(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    from kvplugin.cli.tables import show_table

    show_table(["policy", "blocks"], [[name, "1"]])
    assert name in capsys.readouterr().out


@pytest.mark.parametrize("form", ["--json", None])
def test_runs_before_a_failure_are_printed(
    form: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvplugin.replay import runner

    hooks = Hooks.of(FailingPlugin())
    monkeypatch.setattr(runner, "get_hooks", lambda: hooks)
    options = ["--policy", "sieve,failing", *filter(None, [form])]
    result = replayed("500", *options)
    assert result.exit_code == 1
    assert isinstance(result.exception, RunFailedError)
    assert "sieve" in result.stdout
    if form:
        [run] = json.loads(result.stdout)["runs"]
        assert run["policy"] == "sieve"


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


def forbid_import(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    real = builtins.__import__

    def fake(name: str, *more: Any, **others: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *more, **others)

    monkeypatch.setattr(builtins, "__import__", fake)
