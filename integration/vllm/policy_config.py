"""Which policies decide in vLLM's scheduler: the keys below `kvplugin` in
`--additional-config`."""

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from kvplugin.errors import ConfigError, check_ranges
from kvplugin.hooks import EvictionPolicyContext, Hooks, hooks_with
from kvplugin.policies.eviction import EvictionPolicy
from kvplugin.policies.scheduling import SchedulingKind, make_scheduling
from kvplugin.settings import read_settings

KEY: Final = "kvplugin"
WHERE: Final = f"additional_config[{KEY!r}]"
SCHEDULER_CLASS: Final = "kvplugin.integration.vllm.scheduler.KVPluginScheduler"
"""The value of `--scheduler-cls`."""

SCHEDULING_KINDS: Final[tuple[SchedulingKind, ...]] = (
    "waiting_order",
    "admission",
    "victim",
)
"""Keys that name scheduling policies; each has its `<key>_options`."""

_ANY_SIZE: Final = 2
"""Blocks of a policy that is made to see whether it can be made."""


class PolicyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `KVPluginScheduler`; whatever is not set stays vLLM's."""

    eviction_policy: str = "lru"
    """Which KV blocks leave GPU memory first."""
    eviction_policy_options: dict[str, Any] = {}
    """What the eviction policy may be told."""
    waiting_order: str = "configured"
    """The scheduling policy that orders waiting requests."""
    waiting_order_options: dict[str, Any] = {}
    """What it may be told."""
    admission: str = "open"
    """The scheduling policy that says whether the next request may start now."""
    admission_options: dict[str, Any] = {}
    """What it may be told."""
    victim: str = "last"
    """The scheduling policy that chooses who is preempted."""
    victim_options: dict[str, Any] = {}
    """What it may be told."""
    record_trace: str | None = None
    """A file that gets one line for each finished request, for `kvplugin replay`."""
    protect_from_failed_loads: bool = True
    """Whether all that was computed from a connector's failed synchronous load is
    computed again; vLLM's own recovery can serve it."""
    on_start_error: Literal["fail", "disable"] = "fail"
    """If the policies cannot start: end the engine, or run it as vLLM would."""

    def __post_init__(self) -> None:
        check_ranges(self, {})
        for key in ("eviction_policy", "record_trace"):
            if getattr(self, key) == "":
                raise ConfigError(f"{key} is empty: name one, or leave the key out")
        self.make_eviction_policy(self.hooks(), _ANY_SIZE)

    def hooks(self) -> Hooks:
        """The installed plugins and the scheduling policies of this configuration.

        Raises:
            ConfigError: no scheduling policy has that name, or it refuses an option.
            PluginError: an installed plugin is unfit.
        """
        return hooks_with(
            *(
                make_scheduling(
                    kind, getattr(self, kind), getattr(self, f"{kind}_options")
                )
                for kind in SCHEDULING_KINDS
            )
        )

    def make_eviction_policy(self, hooks: Hooks, num_blocks: int) -> EvictionPolicy:
        """A fresh eviction policy.

        Raises:
            ConfigError: no policy has this name, or it refuses the options.
            PluginError: the plugin that makes it fails.
        """
        return hooks.make_eviction_policy(
            EvictionPolicyContext(
                name=self.eviction_policy,
                options=self.eviction_policy_options,
                num_blocks=num_blocks,
            )
        )


def read_policy_config(additional_config: object) -> PolicyConfig:
    """The settings in vLLM's `additional_config`; defaults if it has none of ours.

    Raises:
        ConfigError: an unknown key (with the nearest known one) or a wrong value.
        PluginError: an installed plugin is unfit.
    """
    # A platform's own object has no keys: it is no place for settings of ours.
    known = additional_config if isinstance(additional_config, Mapping) else {}
    settings = known.get(KEY)
    settings = {} if settings is None else settings
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{WHERE} must be a table of settings, not {settings!r}")
    return read_settings(PolicyConfig, settings, WHERE)
