"""What users ask for: a policy, or several such as ``retention+arc``, with options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvplugin.errors import ConfigError, check_choice, unknown_name

if TYPE_CHECKING:
    from kvplugin.hooks.contexts import EvictionPolicyContext, OffloadPolicyContext


def own_options(
    ctx: EvictionPolicyContext | OffloadPolicyContext, setting: str
) -> dict[str, object]:
    """A copy of the options, tables in them too: a plugin may take out what it has
    read, and the user's stay as they are.

    Args:
        ctx: of a policy.
        setting: where the user names one; the options stand in ``<setting>_options``.

    Raises:
        ConfigError: the name is no text, or the options are no table.
    """
    check_choice(setting, ctx.name, ctx.options)
    return {key: _copy(value) for key, value in ctx.options.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(inner) for key, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, list) else value


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
