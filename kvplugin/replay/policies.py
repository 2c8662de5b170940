"""The policies of a replay, made by their names through the hooks."""

from collections.abc import Mapping
from typing import Final

from kvplugin.errors import ConfigError
from kvplugin.events import MEDIUM_CPU, MEDIUM_GPU
from kvplugin.hooks import EvictionPolicyContext, Hooks
from kvplugin.policies.eviction import EvictionPolicy
from kvplugin.replay.settings import BELADY, LRU, ReplaySettings

_TRIED: Final = 64
"""Blocks of a policy that is made only to see whether it can be."""


def make_policy(
    hooks: Hooks,
    name: str,
    options: Mapping[str, object],
    capacity: int,
    medium: str = MEDIUM_GPU,
) -> EvictionPolicy:
    """A fresh policy for a pool of `capacity` usable blocks of a medium.

    Raises:
        ConfigError: there is no such policy, or not with these options.
        PluginError: a plugin fails.
    """
    num_blocks = capacity + 1  # the null block
    ctx = EvictionPolicyContext(
        name=name, options=options, num_blocks=num_blocks, medium=medium
    )
    return hooks.make_eviction_policy(ctx)


def refuse_unknown_policies(settings: ReplaySettings, hooks: Hooks) -> None:
    """Make each policy once: before the first run, not after an hour.

    Raises:
        ConfigError: there is no such policy, or not with these options.
        PluginError: a plugin fails.
    """
    for name in settings.policies:
        options = settings.policy_options.get(name, {})
        if name != BELADY:
            make_policy(hooks, name, options, _TRIED)
        elif options:
            raise ConfigError(f"policy {BELADY!r} takes no options, got {options}")
    if settings.host_capacity:
        make_policy(hooks, settings.host_policy or LRU, {}, _TRIED, MEDIUM_CPU)
