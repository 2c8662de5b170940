"""The plugin: what it offers and how it is made."""

from collections.abc import Mapping

from kvplugin import ConfigError, hookimpl
from kvplugin.hooks import EvictionPolicyContext

KVP_HOOK_API_VERSION = 1


@hookimpl
def kvp_register_eviction_policies() -> Mapping[str, str]:
    return {"clock": "first in, first out; a hit gives another chance (chances=1)"}


@hookimpl
def kvp_make_eviction_policy(ctx: EvictionPolicyContext) -> object | None:
    from kvplugin_clock.policy import Clock

    if ctx.name != "clock":
        return None
    if ctx.inner is not None:
        raise ConfigError("eviction policy 'clock' ranks all blocks: it stands last")
    if unknown := set(ctx.options) - {"chances"}:
        raise ConfigError(
            f"eviction policy 'clock' takes chances, not {', '.join(sorted(unknown))}, "
            "in eviction_policy_options"
        )
    chances = ctx.options.get("chances", 1)
    if type(chances) is not int or not 1 <= chances <= 16:
        raise ConfigError(
            f"chances={chances!r} in eviction_policy_options must be from 1 to 16"
        )
    return Clock(chances)
