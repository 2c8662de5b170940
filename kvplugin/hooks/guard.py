"""What stands between the plugin manager and a plugin: it knows whose fault it is.

The manager is given a `Guard` in place of the plugin. It offers the plugin's
implementations, each wrapped so that a failure becomes a `PluginError` that names
plugin, hook and distribution (or is logged, where listeners are told something), and
so that it is known whose the last answer is.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from kvplugin.errors import CapacityError, ConfigError, PluginError
from kvplugin.hooks.markers import HOOK_API_VERSION, hookimpl
from kvplugin.hooks.wrapping import answer_of, begin, finish

if TYPE_CHECKING:
    from importlib.metadata import Distribution

    from pluggy import PluginManager

logger = logging.getLogger("vllm.kvplugin.hooks")

TOLD: Final = "kvp_on_"
"""Prefix of hooks whose listeners must not disturb anybody."""

CHOSEN: Final = "kvp_choose_"
"""Prefix of hooks that the built-in answers where a plugin fails."""

CONTRIBUTED: Final = "kvp_register_"
"""Prefix of hooks to which every plugin contributes."""


_USERS: Final = (ConfigError, CapacityError, PluginError)
"""What the user can change, or what names its plugin already."""


class _LastAnswer(threading.local):
    """Who gave the last answer in this thread."""

    guard: Guard | None = None
    """Whose it is; a wrapper's if that put something else in its place."""
    maker: Guard | None = None
    """Whose it was before wrappers saw it."""

    def forget(self) -> None:
        """Nobody has answered yet."""
        self.guard = self.maker = None


last_answer: Final = _LastAnswer()


class Guard:
    """A plugin as the manager sees it.

    Args:
        manager: where it will be registered.
        plugin: module, class or object with implementations.
        name: of the plugin.
        distribution: where it was installed from, if it was.

    Raises:
        PluginError: the plugin wants another version of the hooks.
    """

    def __init__(
        self,
        manager: PluginManager,
        plugin: object,
        name: str,
        distribution: Distribution | None = None,
    ) -> None:
        self.name = name
        self.distribution = distribution
        self.hooks: list[str] = []
        """Names of the hooks that it implements."""
        wanted = getattr(plugin, "KVP_HOOK_API_VERSION", HOOK_API_VERSION)
        if type(wanted) is not int:
            raise PluginError(
                f"{self} has the KVP_HOOK_API_VERSION {wanted!r}: it must be an "
                f"integer, such as {HOOK_API_VERSION}"
            )
        if wanted != HOOK_API_VERSION:
            raise PluginError(
                f"{self} wants version {wanted} of the hooks, this is version "
                f"{HOOK_API_VERSION}: install releases that go together"
            )
        for attribute in dir(plugin):
            options = manager.parse_hookimpl_opts(plugin, attribute)
            if options is not None:
                hook = options.get("specname") or attribute
                self.hooks.append(hook)
                guarded = self._guarded(
                    getattr(plugin, attribute),
                    hook,
                    is_wrapper=bool(options.get("wrapper")),
                    is_old=bool(options.get("hookwrapper")),
                )
                setattr(self, attribute, hookimpl(**options)(guarded))

    def __str__(self) -> str:
        return title(self.name, self.distribution)

    def _guarded(
        self, function: Callable[..., Any], hook: str, *, is_wrapper: bool, is_old: bool
    ) -> Callable[..., Any]:
        """`function` that fails as an error of this plugin; `is_old` says that it is a
        wrapper that pluggy hands a `Result`."""

        @functools.wraps(function)
        def wrapper(*args: Any) -> Generator[Any, Any, Any]:
            with blaming(self, hook):
                inside = function(*args)
                begin(inside)
            error, outcome = None, None
            try:
                outcome = yield
            except BaseException as raised:  # passed on, as to any wrapper
                error = raised
            guard, maker = last_answer.guard, last_answer.maker
            before = error or answer_of(outcome)
            with blaming(self, hook, but_for=error):
                returned = finish(inside, outcome, error)
            after = answer_of(outcome) if is_old else returned
            last_answer.guard = guard if after is before else self
            last_answer.maker = maker
            return returned

        @functools.wraps(function)
        def listener(*args: Any) -> None:
            try:
                function(*args)
            except Exception:
                logger.exception("%s failed in %s; the others hear it", self, hook)

        @functools.wraps(function)
        def plain(*args: Any, **kwargs: Any) -> Any:
            guard, maker = last_answer.guard, last_answer.maker
            with blaming(self, hook):
                answer = function(*args, **kwargs)
            if answer is not None:
                guard = maker = self
            # It may have called hooks itself.
            last_answer.guard, last_answer.maker = guard, maker
            return answer

        if not (is_wrapper or is_old):
            return listener if hook.startswith(TOLD) else plain
        if hook.startswith(CONTRIBUTED):
            raise PluginError(
                f"{self} wraps {hook}, whose answers are taken one by one"
            )
        return wrapper


def title(name: str, distribution: Distribution | None) -> str:
    """How messages name a plugin."""
    if distribution is None:
        return f"plugin {name!r}"
    return f"plugin {name!r} (distribution {distribution.name} {distribution.version})"


@contextmanager
def blaming(
    guard: Guard | str, hook: str, but_for: BaseException | None = None
) -> Iterator[None]:
    """Whatever fails inside is the plugin's fault, and the error says so.

    `but_for` passes, and where an engine starts also what the user can change
    (`ConfigError`, `CapacityError`).
    """
    try:
        yield
    except Exception as error:
        starts = not hook.startswith((CHOSEN, TOLD))
        if error is but_for or (starts and isinstance(error, _USERS)):
            raise
        message = f"{guard} failed in {hook}: {type(error).__name__}: {error}"
        raise PluginError(message) from error
