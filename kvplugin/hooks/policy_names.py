"""Names of eviction policies: who offers which, and that nobody takes another's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from kvplugin.errors import ConfigError, PluginError, unknown_name
from kvplugin.hooks import checks
from kvplugin.hooks.contributions import contributions, merged

if TYPE_CHECKING:
    import pluggy

    from kvplugin.hooks.guard import Guard


class PolicyNames:
    """What the plugins of a manager offer."""

    def __init__(self, manager: pluggy.PluginManager) -> None:
        self._manager = manager

    def offered(self) -> list[tuple[Guard, Mapping[str, str]]]:
        """Names and descriptions by plugin.

        Raises:
            PluginError: a plugin fails or answers something else.
        """
        hook = "kvp_register_eviction_policies"
        return contributions(self._manager, hook, checks.policy_names)

    def all(self) -> dict[str, str]:
        """Descriptions by name.

        Raises:
            PluginError: a plugin fails, or two offer a policy of one name.
        """
        policies = [
            (guard, name, text)
            for guard, offered in self.offered()
            for name, text in offered.items()
        ]
        return merged(policies, "eviction policy")

    @cached_property
    def owners(self) -> dict[str, Guard]:
        """Plugins by the names that they offer, asked once.

        Raises:
            PluginError: a plugin fails, or two offer a policy of one name.
        """
        names = [
            (guard, name, guard)
            for guard, offered in self.offered()
            for name in offered
        ]
        return merged(names, "eviction policy")

    def verify_maker(self, name: str, maker: Guard | None) -> None:
        """Refuse a plugin that makes a policy under a name that another one offers."""
        owner = self.owners.get(name)
        if owner is not None and maker is not None and maker is not owner:
            raise PluginError(
                f"{maker} makes the eviction policy {name!r}, whose name is taken by "
                f"{owner}: names must be new"
            )

    def nobody_makes(self, name: str) -> ConfigError | PluginError:
        """Why there is no policy of this name."""
        owner = self.owners.get(name)
        if owner is not None:
            return PluginError(f"{owner} offers {name!r} and does not make it")
        return unknown_name("eviction policy", name, self.owners, "eviction_policy")
