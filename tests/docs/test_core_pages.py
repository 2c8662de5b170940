"""The pages about the core: its code runs, its tables name what exists."""

import io
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import pytest

import kvplugin
from kvplugin import EngineLimits, GroupingConfig, Parity, get_kv_cache_configs
from kvplugin.hooks import HookSpecs
from tests.oracles import UNPACKED_V019

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"```python\n(.*?)```\n(?:\n```\n(.*?)```\n)?", re.DOTALL)
SWITCH = re.compile(r"`(\w+)\.(\w+)`")


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def rows(name: str) -> Iterator[list[str]]:
    """The cells of every row of every table."""
    for line in page(name).splitlines():
        if line.startswith("|") and not line.startswith("| ---"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


# -- core.md -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def session() -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The names that the page's code defines, and (shown, printed) of each block."""
    names: dict[str, Any] = {}
    outputs = []
    for source, shown in CODE.findall(page("core.md")):
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile(source, "core.md", "exec"), names)  # noqa: S102
        outputs.append((shown, printed.getvalue()))
    return names, outputs


def test_the_code_prints_what_the_page_shows(session):
    outputs = session[1]
    assert [printed for _, printed in outputs] == [shown for shown, _ in outputs]
    assert sum(bool(shown) for shown, _ in outputs) > 10


def test_the_scheduler_page_prints_what_it_shows():
    names: dict[str, Any] = {}
    for source, shown in CODE.findall(page("scheduler.md")):
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile(source, "scheduler.md", "exec"), names)  # noqa: S102
        assert printed.getvalue() == shown


def test_the_laboratory_page_lists_every_fixture_and_its_example_passes():
    from kvplugin.testing import pytest_plugin

    fixtures = {name for name in vars(pytest_plugin) if name.startswith("kv_")}
    assert set(re.findall(r"^\| `(kv_\w+)`", page("testing.md"), re.M)) == fixtures
    ((source, _),) = CODE.findall(page("testing.md"))
    names: dict[str, Any] = {}
    exec(compile(source, "testing.md", "exec"), names)  # noqa: S102
    names["test_what_a_window_reads"](None)


def test_the_engine_of_the_page_serves_more_than_fits(session):
    names, random = session[0], Random(0)
    settings = {"max_model_len": 160, "max_num_batched_tokens": 64}
    config = GroupingConfig(**settings)
    (worker,) = get_kv_cache_configs([names["specs"]], config, [60 << 14]).configs
    kv = kvplugin.KVCacheManager(
        worker, max_model_len=160, limits=config, **names["hashing"]
    )
    engine = names["Engine"](kv, budget=64)
    requests = [
        names["make_request"](f"r{i}", [*range(48), *([i] * random.randrange(1, 60))])
        for i in range(20)
    ]
    engine.waiting += requests
    with redirect_stdout(io.StringIO()):
        for _ in range(500):
            engine.step()
            kv.check()
            for request in list(engine.running):
                if request.num_output_tokens > 40:
                    engine.finish(request)
    assert [request.num_output_tokens > 40 for request in requests] == [True] * 20
    assert any(request.num_preemptions for request in requests)
    assert kv.usage == 0


# -- differences.md ----------------------------------------------------------------

HAS_SWITCHES = {"Parity": Parity, "EngineLimits": EngineLimits}
HAS_SWITCHES["GroupingConfig"] = GroupingConfig
VLLM_HAS_THEM = {"disable_hybrid_kv_cache_manager", "auto_fit_max_model_len"}


def named_switches() -> set[tuple[str, str]]:
    return {
        switch
        for row in rows("differences.md")
        for switch in SWITCH.findall(row[-1])
        if len(row) == 5
    }


def test_every_switch_has_a_row():
    switches = {("Parity", field.name) for field in fields(Parity)}
    limits = {field.name for field in fields(EngineLimits)}
    switches |= {
        ("EngineLimits" if field.name in limits else "GroupingConfig", field.name)
        for field in fields(GroupingConfig)
        if field.type is bool and field.name not in VLLM_HAS_THEM
    }
    assert switches <= named_switches()


def test_every_switch_in_the_table_exists():
    for owner, name in named_switches():
        assert name in {field.name for field in fields(HAS_SWITCHES[owner])}


def test_every_difference_says_what_0_32_does_and_how_to_switch():
    differences = [row for row in rows("differences.md") if not row[0].startswith("**")]
    assert all(len(row) == 5 and all(row) for row in differences)
    assert all(row[-1] == "none" or SWITCH.match(row[-1]) for row in differences[1:]), (
        "the switch is a field, or none"
    )


# -- vllm-map.md -------------------------------------------------------------------


def in_backticks(cells: list[str]) -> list[str]:
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


FILES = [row for row in rows("vllm-map.md") if len(row) == 3][1:]
NAMES = [row for row in rows("vllm-map.md") if len(row) == 2][1:]


def test_every_file_of_ours_in_the_map_exists():
    ours = [path for row in FILES for path in in_backticks(row[2:]) if "/" in path]
    assert len(ours) > 20
    assert [path for path in ours if not (ROOT / path).exists()] == []


@pytest.mark.skipif(not UNPACKED_V019.is_dir(), reason="needs `make setup`")
def test_every_file_of_vllm_in_the_map_exists():
    theirs = [path for row in FILES for path in in_backticks(row[:1])]
    missing = [
        path for path in theirs if not list(UNPACKED_V019.glob(path.rstrip("/")))
    ]
    assert missing == []


def test_every_name_of_ours_in_the_map_exists():
    ours = [name for name in in_backticks([row[1] for row in NAMES]) if "kvp" in name]
    assert [name for name in ours if not exists(name)] == []


def exists(name: str) -> bool:
    if name.startswith("kvp_"):
        return hasattr(HookSpecs, name)
    parts = name.split(".")
    found = import_module(parts.pop(0))
    for part in parts:
        module = f"{found.__name__}.{part}"
        if hasattr(found, part):
            found = getattr(found, part)
        elif not hasattr(found, "__path__") or find_spec(module) is None:
            return False
        elif module.startswith("kvplugin.integration.vllm."):
            return True  # not imported: that would import vLLM
        else:
            found = import_module(module)
    return True
