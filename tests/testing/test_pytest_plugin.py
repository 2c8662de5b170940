"""The plugin loads nothing, and its fixtures are the laboratory's parts."""

import ast
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import kvplugin.testing
from kvplugin.testing import faults, pytest_plugin
from kvplugin.testing.faults import Fate

pytest_plugins = ["pytester"]

FIXTURES = [name for name in vars(pytest_plugin) if name.startswith("kv_")]

LOADED = """
import sys, pytest
before = set(sys.modules)
import {module}
new = set(sys.modules) - before
print(*sorted(name for name in new if not name.startswith("_")))
"""


def loaded_by(module: str) -> list[str]:
    """What an import loads beside pytest's and its own modules."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(module=module)],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.split()


def test_loading_the_plugin_imports_nothing() -> None:
    assert loaded_by("kvplugin.testing.pytest_plugin") == [
        "kvplugin",
        "kvplugin.testing",
        "kvplugin.testing.pytest_plugin",
    ]


def test_importing_the_package_imports_nothing() -> None:
    assert loaded_by("kvplugin.testing") == ["kvplugin", "kvplugin.testing"]


def test_the_laboratory_needs_neither_torch_nor_an_engine() -> None:
    names = loaded_by("kvplugin.testing as t; [getattr(t, n) for n in dir(t)]")
    assert "kvplugin.testing.toy_model" in names
    heavy = {"torch", "numpy", "vllm", "pandas"}
    assert not heavy & {name.partition(".")[0] for name in names}


def test_every_name_is_there() -> None:
    for name, module in kvplugin.testing._MODULE_OF.items():
        owner = import_module(f"kvplugin.testing.{module}")
        assert getattr(kvplugin.testing, name) is getattr(owner, name)
        assert name in dir(kvplugin.testing)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = kvplugin.testing.nonsense


def test_import_of_everything() -> None:
    names: dict[str, object] = {}
    exec("from kvplugin.testing import *", names)  # noqa: S102
    assert names.keys() - {"__builtins__"} == kvplugin.testing._MODULE_OF.keys()


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(kvplugin.testing.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == {
        name: f"kvplugin.testing.{module}"
        for name, module in kvplugin.testing._MODULE_OF.items()
    }


def test_every_fate_is_exported() -> None:
    fates = {name for name, value in vars(faults).items() if isinstance(value, Fate)}
    assert fates <= set(kvplugin.testing.__all__)


def test_fixtures(pytester: pytest.Pytester) -> None:
    arguments = ", ".join(FIXTURES)
    pytester.makepyfile(
        f"""
        from kvplugin import testing

        def test_all({arguments}):
            assert kv_balance is testing.assert_balanced
            assert isinstance(kv_progress, testing.ProgressWatch)
            assert isinstance(kv_event_replay, testing.EventReplay)
            assert isinstance(kv_counters, testing.CounterWatch)
            assert kv_toy_model is testing.ToyModel
            assert kv_strict_policies is None
            for part in ({", ".join(set(FIXTURES) - {"kv_strict_policies"})},):
                assert part is not None
        """
    )
    result = pytester.runpytest()
    result.assert_outcomes(passed=1)


def test_fixtures_say_what_they_are() -> None:
    assert len(FIXTURES) == 15
    for name in FIXTURES:
        assert inspect.getdoc(getattr(pytest_plugin, name))
