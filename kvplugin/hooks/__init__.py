"""Hooks: what plugins implement and how the core calls them.

The only package that knows pluggy. Plugins come from the entry-point group
``kvplugin`` and are loaded by `get_hooks`, never at import. `specs.py` is the
contract, `contexts.py` what hooks are told, `facade.py` what the core calls.
"""

from kvplugin.hooks.contexts import (
    AdmissionContext,
    BlockPoolContext,
    CheckpointContext,
    CoordinatorContext,
    EvictionPolicyContext,
    FreedContext,
    ManagerContext,
    OffloadPolicyContext,
    VictimContext,
    WaitingContext,
)
from kvplugin.hooks.facade import Hooks
from kvplugin.hooks.installed import get_hooks, hooks_with, registered_commands
from kvplugin.hooks.markers import HOOK_API_VERSION, hookimpl
from kvplugin.hooks.plugins import PluginInfo, load_plugins
from kvplugin.hooks.specs import HookSpecs

__all__ = [
    "HOOK_API_VERSION",
    "AdmissionContext",
    "BlockPoolContext",
    "CheckpointContext",
    "CoordinatorContext",
    "EvictionPolicyContext",
    "FreedContext",
    "HookSpecs",
    "Hooks",
    "ManagerContext",
    "OffloadPolicyContext",
    "PluginInfo",
    "VictimContext",
    "WaitingContext",
    "get_hooks",
    "hookimpl",
    "hooks_with",
    "load_plugins",
    "registered_commands",
]
