"""Plugins are found by their entry point, loaded on demand and blamed by name."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from kvplugin.cli.main import cli, main
from kvplugin.errors import ConfigError, PluginError
from kvplugin.hooks import (
    HOOK_API_VERSION,
    EvictionPolicyContext,
    Hooks,
    get_hooks,
    hooks_with,
    load_plugins,
    registered_commands,
)
from kvplugin.policies.eviction.registry import POLICIES
from kvplugin.policies.scheduling import make_scheduling

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
    forget_plugins()
    yield install
    forget_plugins()
    for module in modules:
        sys.modules.pop(module, None)


def forget_plugins() -> None:
    """The next one who asks for plugins loads them anew."""
    load_plugins.cache_clear()
    get_hooks.cache_clear()


def loaded() -> set[str]:
    return {plugin.name for plugin in get_hooks().plugins}


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
    program = (
        "import json, kvplugin, sys; [getattr(kvplugin, n) for n in dir(kvplugin)];"
        "print(json.dumps([*sys.modules]))"
    )
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


def test_built_in_plugins_are_of_our_own_distribution() -> None:
    built_in = [plugin for plugin in get_hooks().plugins if plugin.built_in]
    assert {"core", "cli", "vllm"} <= {plugin.name for plugin in built_in}
    assert {plugin.distribution for plugin in built_in} == {"kvplugin"}


def test_a_plugin_is_listed_with_its_distribution_and_hooks(install: Install) -> None:
    install("mine", commands("dig"))
    (mine,) = [plugin for plugin in get_hooks().plugins if plugin.name == "mine"]
    assert (mine.distribution, mine.version, mine.built_in) == ("mine", "1.0", False)
    assert mine.hooks == ("kvp_register_commands",)


def test_plugins_of_the_moment_come_with_the_installed_ones(install: Install) -> None:
    install("mine", commands("dig"))
    one, other = (make_scheduling("victim", n) for n in ("least_work", "most_blocks"))
    hooks = hooks_with(one, other)
    names = [plugin.name for plugin in hooks.plugins]
    assert "mine" in names
    assert names[-2:] == ["victim=least_work", "victim=most_blocks"]
    assert hooks.chooses_victim
    assert not get_hooks().chooses_victim
    assert hooks_with() is get_hooks()


def test_a_plugin_of_the_moment_must_have_a_new_name(install: Install) -> None:
    install("mine", commands("dig"))
    for name in ("mine", "core"):
        with pytest.raises(PluginError, match=f"'{name}'.*same name"):
            hooks_with(SimpleNamespace(__name__=name))
    twice = make_scheduling("victim", "least_work"), make_scheduling("victim", "last")
    hooks_with(*twice)
    with pytest.raises(PluginError, match="same name"):
        hooks_with(twice[0], make_scheduling("victim", "least_work"))


# -- the list of what may load -----------------------------------------------------


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (None, {"one", "two"}),
        ("", set()),
        (" , ", set()),
        ("two", {"two"}),
        ("two, one", {"one", "two"}),
    ],
)
def test_only_listed_plugins_load_and_built_in_ones_always(
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
    allowed: str | None,
    expected: set[str],
) -> None:
    install("one", commands("one"))
    install("two", commands("two"))
    if allowed is not None:
        monkeypatch.setenv("KVPLUGIN_PLUGINS", allowed)
    assert loaded() & {"one", "two"} == expected
    assert loaded() >= {"core", "cli", "vllm"}


def test_a_plugin_that_is_not_listed_is_not_even_imported(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("broken", "raise RuntimeError('no such luck')")
    monkeypatch.setenv("KVPLUGIN_PLUGINS", "")
    assert "broken" not in loaded()


def test_a_listed_plugin_that_is_not_installed_is_named(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("mine", commands("dig"))
    monkeypatch.setenv("KVPLUGIN_PLUGINS", "mime")
    with pytest.raises(ConfigError, match=r"'mime' in KVPLUGIN_PLUGINS.*'mine'"):
        get_hooks()


# -- tracing -----------------------------------------------------------------------


@pytest.mark.parametrize("switch", ["1", "0"])
def test_calls_are_logged_if_wanted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, switch: str
) -> None:
    monkeypatch.setenv("KVPLUGIN_TRACE_HOOKS", switch)
    with caplog.at_level(logging.INFO, logger="vllm.kvplugin.hooks"):
        ctx = EvictionPolicyContext(num_blocks=77)
        Hooks.of().make_eviction_policy(ctx)
    assert ("kvp_make_eviction_policy" in caplog.text) == (switch == "1")
    assert ("num_blocks=77" in caplog.text) == (switch == "1")


# -- blame -------------------------------------------------------------------------


def test_misspelt_hook_is_an_error_that_names_it_its_plugin_and_the_nearest(
    install: Install,
) -> None:
    install("hasty", MISSPELT)
    with pytest.raises(PluginError) as refusal:
        load_plugins()
    assert str(refusal.value) == (
        "plugin 'hasty' (distribution hasty 1.0) implements 'kvp_register_comands', "
        "which is no hook. Did you mean 'kvp_register_commands'?"
    )


def test_argument_that_a_hook_does_not_have_is_an_error_that_names_the_plugin(
    install: Install,
) -> None:
    install(
        "curious",
        """
        from kvplugin import hookimpl

        @hookimpl
        def kvp_register_commands(more):
            return []
        """,
    )
    with pytest.raises(PluginError, match=r"curious 1\.0(?s:.*)more"):
        load_plugins()


def test_plugin_for_another_version_of_the_hooks_is_refused(install: Install) -> None:
    install("late", f"KVP_HOOK_API_VERSION = {HOOK_API_VERSION + 1}")
    with pytest.raises(PluginError, match=r"late 1\.0.* wants version 2 .* version 1"):
        load_plugins()


def test_plugin_for_this_version_of_the_hooks_is_welcome(install: Install) -> None:
    install("early", f"KVP_HOOK_API_VERSION = {HOOK_API_VERSION}")
    assert "early" in loaded()


def test_two_plugins_of_one_name_are_an_error_that_names_both(
    install: Install,
) -> None:
    path = install("first", commands("dig"))
    install("second", commands("fill"))
    entry = path / "second-1.0.dist-info" / "entry_points.txt"
    entry.write_text("[kvplugin]\nfirst = second_module\n")
    with pytest.raises(PluginError, match="same name") as refusal:
        load_plugins()
    assert "distribution first 1.0" in str(refusal.value)
    assert "distribution second 1.0" in str(refusal.value)


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


def test_plugins_are_listed_for_machines(install: Install) -> None:
    install("mine", commands("dig"))
    result = CliRunner().invoke(cli, ["plugins", "--json"])
    rows = {row["name"]: row for row in json.loads(result.output)}
    assert rows["mine"] == {
        "name": "mine",
        "version": "1.0",
        "distribution": "mine",
        "built_in": False,
        "hooks": ["kvp_register_commands"],
        "policies": {},
    }
    assert rows["core"]["policies"].keys() == POLICIES.keys()


@pytest.mark.parametrize("has_rich", [True, False])
def test_plugins_are_listed_for_people(
    install: Install, monkeypatch: pytest.MonkeyPatch, has_rich: bool
) -> None:
    install("mine", commands("dig"))
    monkeypatch.setenv("COLUMNS", "160")
    if not has_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    output = CliRunner().invoke(cli, ["plugins"]).output
    assert ("━" in output) == has_rich
    for text in ("mine", "1.0", "kvp_register_commands", "lru: least recently used"):
        assert text in output
