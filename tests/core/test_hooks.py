"""Plugins are found by their entry point, loaded on demand and blamed by name."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from click.testing import CliRunner

from kvplugin import hooks
from kvplugin.cli.main import cli, main
from kvplugin.errors import PluginError
from kvplugin.hooks import load_plugins, registered_commands

Install = Callable[[str, str], Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a distribution of the given name whose module is a plugin."""
    modules = []

    def install(name: str, source: str) -> Path:
        module = f"{name}_module"
        modules.append(module)
        metadata = tmp_path / f"{name}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[kvplugin]\n{name} = {module}\n")
        (tmp_path / f"{module}.py").write_text(dedent(source))
        return tmp_path

    monkeypatch.syspath_prepend(tmp_path)
    load_plugins.cache_clear()
    yield install
    load_plugins.cache_clear()
    for module in modules:
        sys.modules.pop(module, None)


def commands(*names: str) -> str:
    """Source of a plugin that contributes these commands."""
    return f"""
        import click
        from kvplugin import hookimpl

        @hookimpl
        def kvp_register_commands():
            return [click.Command(name, help="Do something.") for name in {names}]
    """


MISSPELT = """
    from kvplugin import hookimpl

    @hookimpl
    def kvp_register_comands():
        return []
"""


# -- loading -----------------------------------------------------------------------


def test_importing_the_core_loads_no_plugin_and_nothing_heavy(
    install: Install,
) -> None:
    path = install("eager", commands("eager"))
    program = "import json, kvplugin, sys; print(json.dumps([*sys.modules]))"
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(path)},
        capture_output=True,
        check=True,
    )
    loaded = set(json.loads(result.stdout))
    assert "kvplugin.block_pool" in loaded
    assert not loaded & {"eager_module", "kvplugin.integration", "kvplugin.cli"}
    assert not loaded & {"torch", "vllm", "numpy", "triton", "numba", "click"}


def test_plugin_is_loaded_by_its_entry_point(install: Install) -> None:
    install("mine", commands("dig"))
    assert "dig" in [command.name for command in registered_commands()]
    assert load_plugins().has_plugin("mine")


def test_plugins_are_loaded_once(install: Install) -> None:
    first = load_plugins()
    install("late", commands("late"))
    assert load_plugins() is first
    assert not first.has_plugin("late")


def test_commands_of_the_vllm_integration_come_from_a_plugin() -> None:
    assert load_plugins().has_plugin("vllm")
    assert {"config", "doctor"} <= {command.name for command in registered_commands()}


# -- blame -------------------------------------------------------------------------


def test_misspelt_hook_is_an_error_that_names_hook_and_plugin(
    install: Install,
) -> None:
    install("hasty", MISSPELT)
    with pytest.raises(PluginError, match=r"kvp_register_comands.*hasty"):
        load_plugins()


def test_plugin_that_cannot_be_imported_is_named(install: Install) -> None:
    install("broken", "raise RuntimeError('no such luck')")
    with pytest.raises(PluginError, match=r"broken.*no such luck"):
        load_plugins()


def test_two_commands_of_one_name_are_an_error_that_names_both_plugins(
    install: Install,
) -> None:
    install("first", commands("dig"))
    install("second", commands("fill", "dig"))
    with pytest.raises(PluginError, match="'dig'") as raised:
        registered_commands()
    assert "first" in str(raised.value)
    assert "second" in str(raised.value)


def test_plugin_that_fails_in_a_hook_is_named(install: Install) -> None:
    install(
        "failing",
        """
        from kvplugin import hookimpl

        @hookimpl
        def kvp_register_commands():
            raise RuntimeError("not now")
        """,
    )
    with pytest.raises(PluginError, match=r"failing.*not now"):
        registered_commands()


# -- the command line --------------------------------------------------------------


def test_command_line_lists_and_runs_what_plugins_contribute(
    install: Install,
) -> None:
    install("mine", commands("dig"))
    assert "dig" in CliRunner().invoke(cli, ["--help"]).output
    assert "Do something." in CliRunner().invoke(cli, ["dig", "--help"]).output


def test_unknown_command_is_a_usage_error() -> None:
    assert CliRunner().invoke(cli, ["dance"]).exit_code == 2


def test_command_line_ends_with_the_message_of_an_error_of_ours(
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install("hasty", MISSPELT)
    monkeypatch.setattr(sys, "argv", ["kvplugin", "doctor"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    message = capsys.readouterr().err
    assert message.startswith("Error: ")
    assert "kvp_register_comands" in message
    assert "Traceback" not in message


# -- the specifications ------------------------------------------------------------


def hookspecs() -> list[str]:
    return [name for name in dir(load_plugins().hook) if not name.startswith("_")]


def test_every_hook_has_our_prefix_and_a_contract() -> None:
    assert hookspecs()
    for name in hookspecs():
        assert name.startswith("kvp_")
        assert getattr(hooks._Specs, name).__doc__
