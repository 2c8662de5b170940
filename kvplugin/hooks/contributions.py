"""Hooks to which every plugin contributes: whose is what, and no name twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from kvplugin.errors import PluginError
from kvplugin.hooks.checks import verdict
from kvplugin.hooks.guard import Guard

if TYPE_CHECKING:
    import pluggy

T = TypeVar("T")


def contributions(
    manager: pluggy.PluginManager, hook: str, check: Callable[[Any], str]
) -> list[tuple[Guard, Any]]:
    """Answers with whose they are, in the order of registration.

    Raises:
        PluginError: a plugin fails, or `check` finds something wrong.
    """
    answers = []
    for implementation in getattr(manager.hook, hook).get_hookimpls():
        guard = cast("Guard", implementation.plugin)
        answer = implementation.function()
        if answer is not None:
            refuse(guard, hook, verdict(check, answer))
            answers.append((guard, answer))
    return answers


def merged(items: Iterable[tuple[Guard, str, T]], what: str) -> dict[str, T]:
    """Items by name, which only one may have.

    Raises:
        PluginError: two items have one name; it names both plugins.
    """
    by_name: dict[str, T] = {}
    owners: dict[str, Guard] = {}
    for guard, name, item in items:
        if name in owners:
            raise PluginError(
                f"{owners[name]} and {guard} both contribute the {what} {name!r}"
            )
        by_name[name], owners[name] = item, guard
    return by_name


def refuse(guard: Guard | None, hook: str, wrong: str) -> None:
    """Raise a `PluginError` if something is wrong with an answer."""
    if wrong:
        raise PluginError(f"{guard} answered {hook} with {wrong}")
