"""What stands between the plugin manager and a plugin: it knows whose fault it is.

The manager is given a `Guard` in place of the plugin. It offers the plugin's
implementations, each wrapped so that a failure becomes a `PluginError` that names
plugin, hook and distribution (or is logged, where listeners are told something), and
so that the plugin of the last answer is known.
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

if TYPE_CHECKING:
    from importlib.metadata import Distribution

    from pluggy import PluginManager

logger = logging.getLogger("vllm.kvplugin.hooks")

TOLD: Final = "kvp_on_"
"""Prefix of hooks whose listeners must not disturb anybody."""

CONTRIBUTED: Final = "kvp_register_"
"""Prefix of hooks to which every plugin contributes."""


class _LastAnswer(threading.local):
    """Who gave the last answer in this thread."""

    guard: Guard | None = None


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
                    bool(options.get("wrapper") or options.get("hookwrapper")),
                )
                setattr(self, attribute, hookimpl(**options)(guarded))

    def __str__(self) -> str:
        return title(self.name, self.distribution)

    def _guarded(
        self, function: Callable[..., Any], hook: str, is_wrapper: bool
    ) -> Callable[..., Any]:
        """`function` that fails as an error of this plugin."""

        @functools.wraps(function)
        def wrapper(*args: Any) -> Generator[Any, Any, Any]:
            with blaming(self, hook):
                return (yield from function(*args))

        @functools.wraps(function)
        def listener(*args: Any) -> None:
            try:
                function(*args)
            except Exception:
                logger.exception("%s failed in %s; the others hear it", self, hook)

        @functools.wraps(function)
        def plain(*args: Any, **kwargs: Any) -> Any:
            with blaming(self, hook):
                answer = function(*args, **kwargs)
            if answer is not None:
                last_answer.guard = self
            return answer

        if is_wrapper and hook.startswith(CONTRIBUTED):
            raise PluginError(
                f"{self} wraps {hook}, whose answers are taken one by one"
            )
        if is_wrapper:
            return wrapper
        return listener if hook.startswith(TOLD) else plain


def title(name: str, distribution: Distribution | None) -> str:
    """How messages name a plugin."""
    if distribution is None:
        return f"plugin {name!r}"
    return f"plugin {name!r} (distribution {distribution.name} {distribution.version})"


@contextmanager
def blaming(guard: Guard | str, hook: str) -> Iterator[None]:
    """Whatever fails inside is the plugin's fault, and the error says so; what the
    user can change (`ConfigError`, `CapacityError`) passes."""
    try:
        yield
    except (ConfigError, CapacityError, PluginError):
        raise
    except Exception as error:
        message = f"{guard} failed in {hook}: {type(error).__name__}: {error}"
        raise PluginError(message) from error
