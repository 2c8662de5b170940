"""Names such as ``retention+arc``: policies that protect before one that ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kvplugin.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from kvplugin.hooks.contexts import EvictionPolicyContext


def parts(ctx: EvictionPolicyContext) -> list[EvictionPolicyContext]:
    """One context for each policy of a name, the innermost first.

    A name of one part has its own options; a longer one has them by part.

    Raises:
        ConfigError: a part is empty or comes twice, or options are for no part.
    """
    names = ctx.name.split("+")
    if len(names) == 1:
        return [ctx]
    if not all(names) or len(set(names)) < len(names):
        raise ConfigError(
            f"eviction_policy={ctx.name!r} must name each policy once, such as "
            f"'retention+lru'"
        )
    for key, options in ctx.options.items():
        if key not in names:
            raise unknown_name("policy", key, names, "eviction_policy_options")
        if not isinstance(options, Mapping):
            raise ConfigError(
                f"eviction_policy_options: {key} must be a table, as {ctx.name!r} "
                f"has several policies"
            )
    return [replace(ctx, name=name, options=_of(ctx, name)) for name in names[::-1]]


def _of(ctx: EvictionPolicyContext, name: str) -> Mapping[str, object]:
    options = ctx.options.get(name, {})
    return options if isinstance(options, Mapping) else {}
