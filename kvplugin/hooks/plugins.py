"""The plugin manager: what is loaded, from where, and what is refused."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import (
    Distribution,
    EntryPoint,
    PackageNotFoundError,
    distribution,
    entry_points,
)
from typing import Final, cast

import pluggy

from kvplugin.errors import PluginError, unknown_name
from kvplugin.hooks.guard import Guard, blaming, logger, title
from kvplugin.hooks.markers import PROJECT
from kvplugin.hooks.specs import HookSpecs

HOOKS: Final = tuple(name for name in vars(HookSpecs) if name.startswith("kvp_"))
"""Names of all hooks."""

_BUILT_IN: Final = (
    EntryPoint("core", "kvplugin.defaults", PROJECT),
    EntryPoint("cli", "kvplugin.cli.plugin", PROJECT),
)
"""Loaded like any other plugin, but always."""


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """A loaded plugin."""

    name: str
    distribution: str | None
    """None: registered in code."""
    version: str | None
    built_in: bool
    """Part of kvplugin, whatever `KVPLUGIN_PLUGINS` says."""
    hooks: tuple[str, ...]
    """Hooks that it implements."""


def new_manager(plugins: Iterable[object] = ()) -> pluggy.PluginManager:
    """A manager with the built-in plugins and these, no installed ones.

    Raises:
        PluginError: a plugin is unfit; the message names it.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(HookSpecs)
    own = _own_distribution()
    for entry_point in _BUILT_IN:
        _load(manager, entry_point, own)
    _register_all(manager, plugins)
    if tracing_is_on():
        manager.trace.root.setwriter(lambda text: logger.info("%s", text.rstrip()))
        manager.enable_tracing()
    return manager


@cache
def load_plugins() -> pluggy.PluginManager:
    """The manager with the installed plugins that `KVPLUGIN_PLUGINS` allows, loaded
    once a process.

    Raises:
        ConfigError: `KVPLUGIN_PLUGINS` names a plugin that is not installed.
        PluginError: a plugin cannot be imported, wants another version of the hooks,
            or implements a hook that does not exist.
    """
    return manager_with(())


def manager_with(plugins: Iterable[object]) -> pluggy.PluginManager:
    """A new manager with the installed plugins and these.

    Raises:
        ConfigError: as `load_plugins`.
        PluginError: as `load_plugins`, or two plugins have one name.
    """
    manager = new_manager()
    found = entry_points(group=PROJECT)
    allowed = _allowed({entry_point.name for entry_point in found})
    for entry_point in found:
        ours = entry_point.dist is not None and entry_point.dist.name == PROJECT
        if ours or allowed is None or entry_point.name in allowed:
            _load(manager, entry_point, entry_point.dist)
    _register_all(manager, plugins)
    return manager


def _register_all(manager: pluggy.PluginManager, plugins: Iterable[object]) -> None:
    """Plugins that are given in code, and the last check of all of them."""
    for plugin in plugins:
        name = manager.get_canonical_name(plugin)
        _register(manager, Guard(manager, plugin, name))
    _refuse_unknown_hooks(manager)


def guards(manager: pluggy.PluginManager) -> list[Guard]:
    """Plugins in the order of their registration."""
    return [cast("Guard", guard) for _, guard in manager.list_name_plugin()]


def describe(guard: Guard) -> PluginInfo:
    """The facts about a plugin, for listings."""
    distribution = guard.distribution
    return PluginInfo(
        name=guard.name,
        distribution=distribution.name if distribution else None,
        version=distribution.version if distribution else None,
        built_in=is_built_in(guard),
        hooks=tuple(sorted(guard.hooks)),
    )


def is_built_in(guard: Guard) -> bool:
    """Whether the plugin is part of kvplugin."""
    if guard.distribution is not None:
        return guard.distribution.name == PROJECT
    return guard.name in {entry_point.name for entry_point in _BUILT_IN}


def _allowed(installed: Collection[str]) -> set[str] | None:
    """Names in `KVPLUGIN_PLUGINS`; None if it is not set."""
    listed = os.environ.get("KVPLUGIN_PLUGINS")
    if listed is None:
        return None
    names = {name.strip() for name in listed.split(",")} - {""}
    for name in sorted(names - set(installed)):
        raise unknown_name("plugin", name, installed, "KVPLUGIN_PLUGINS")
    return names


def _own_distribution() -> Distribution | None:
    """None where kvplugin runs from a tree that is not installed."""
    try:
        return distribution(PROJECT)
    except PackageNotFoundError:
        return None


def _load(
    manager: pluggy.PluginManager,
    entry_point: EntryPoint,
    origin: Distribution | None,
) -> None:
    who = title(entry_point.name, origin)
    with blaming(who, f"loading {entry_point.value}"):
        plugin = entry_point.load()
    _register(manager, Guard(manager, plugin, entry_point.name, origin))


def _register(manager: pluggy.PluginManager, guard: Guard) -> None:
    other = manager.get_plugin(guard.name)
    if other is not None:
        raise PluginError(f"{other} and {guard} have the same name: leave one out")
    try:
        manager.register(guard, name=guard.name)
    except pluggy.PluginValidationError as error:
        raise PluginError(f"{guard} does not fit a hook: {error}") from error


def _refuse_unknown_hooks(manager: pluggy.PluginManager) -> None:
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        guard = cast("Guard", error.plugin)
        unknown = next(hook for hook in guard.hooks if hook not in HOOKS)
        close = difflib.get_close_matches(unknown, HOOKS, n=1, cutoff=0)
        raise PluginError(
            f"{guard} implements {unknown!r}, which is no hook. "
            f"Did you mean {close[0]!r}?"
        ) from error


def tracing_is_on() -> bool:
    """Whether `KVPLUGIN_TRACE_HOOKS` asks for a log of every call."""
    switch = os.environ.get("KVPLUGIN_TRACE_HOOKS", "")
    return switch.lower() in ("1", "true", "yes", "on")
