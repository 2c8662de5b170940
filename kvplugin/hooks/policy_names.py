"""Names of policies of one kind: who offers which, and that nobody takes another's."""

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
    """What the plugins of a manager offer.

    Args:
        manager: the plugins.
        hook: by which they offer policies.
        kind: of the policies, for messages.
        setting: where the user names one.
    """

    def __init__(
        self, manager: pluggy.PluginManager, hook: str, kind: str, setting: str
    ) -> None:
        self._manager = manager
        self._hook = hook
        self._kind = kind
        self._setting = setting

    def offered(self) -> list[tuple[Guard, Mapping[str, str]]]:
        """Names and descriptions by plugin.

        Raises:
            PluginError: a plugin fails or answers something else.
        """
        return contributions(self._manager, self._hook, checks.policy_names)

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
        return merged(policies, self._kind)

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
        return merged(names, self._kind)

    def verify_maker(self, name: str, maker: Guard | None) -> None:
        """Refuse a plugin that makes a policy under a name that another one offers."""
        owner = self.owners.get(name)
        if owner is not None and maker is not None and maker is not owner:
            raise PluginError(
                f"{maker} makes the {self._kind} {name!r}, whose name is taken by "
                f"{owner}: names must be new"
            )

    def nobody_makes(self, name: str) -> ConfigError | PluginError:
        """Why there is no policy of this name."""
        owner = self.owners.get(name)
        if owner is not None:
            return PluginError(f"{owner} offers {name!r} and does not make it")
        return unknown_name(self._kind, name, self.owners, self._setting)
