"""The plugin loads nothing, and its fixtures are the laboratory's parts."""

import inspect
import subprocess
import sys

import pytest

import kvplugin.testing
from kvplugin.testing import pytest_plugin

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
    for name in kvplugin.testing._MODULE_OF:
        assert getattr(kvplugin.testing, name).__name__ == name
        assert name in dir(kvplugin.testing)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = kvplugin.testing.nonsense


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
            for part in ({arguments},):
                assert part is not None
        """
    )
    result = pytester.runpytest()
    result.assert_outcomes(passed=1)


def test_fixtures_say_what_they_are() -> None:
    assert len(FIXTURES) == 13
    for name in FIXTURES:
        assert inspect.getdoc(getattr(pytest_plugin, name))
