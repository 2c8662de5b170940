"""How the facade calls a hook and verifies what comes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvplugin.errors import PluginError
from kvplugin.hooks import checks
from kvplugin.hooks.contributions import refuse
from kvplugin.hooks.guard import blaming, last_answer, logger
from kvplugin.hooks.plugins import guards, is_built_in, tracing_is_on

if TYPE_CHECKING:
    import pluggy

ONE_ANSWER: Final = (
    "kvp_make_eviction_policy",
    "kvp_make_offload_policy",
    "kvp_make_block_pool",
    "kvp_make_coordinator",
    "kvp_make_manager",
    "kvp_group_layers",
    "kvp_choose_checkpoints",
    "kvp_choose_waiting_order",
    "kvp_choose_admission",
    "kvp_choose_victim",
)
"""Hooks of one answer, the built-in's if there is no other."""

MOST_REPORTS: Final = 3
"""Failures of a hook that chooses which are logged in full."""

REPORT_EVERY: Final = 1000
"""Of later ones, each so many-th is logged, in one line."""


class Calls:
    """The hooks of one plugin manager, whose plugins are all registered by now."""

    def __init__(self, manager: pluggy.PluginManager) -> None:
        self._manager = manager
        self._guards = {guard.name: guard for guard in guards(manager)}
        self._built_in: dict[str, Callable[..., Any]] = {}
        """The built-in's implementation of hooks of one answer."""
        self._failed: Counter[str] = Counter()
        """How often plugins failed in hooks that choose."""
        self._call: dict[str, Callable[..., Any]] = {}
        self._is_replaced: set[str] = set()
        """Hooks of one answer that others than the built-in implement."""
        for hook in ONE_ANSWER:
            self._prepare(hook)

    def _prepare(self, hook: str) -> None:
        """Find out whether pluggy can be skipped."""
        caller = getattr(self._manager.hook, hook)
        implementations = caller.get_hookimpls()
        for implementation in implementations:
            if is_built_in(self._guards[implementation.plugin_name]):
                self._built_in[hook] = implementation.function
            else:
                self._is_replaced.add(hook)
        skips = hook not in self._is_replaced and not tracing_is_on()
        self._call[hook] = self._built_in[hook] if skips else caller

    def _is_heard(self, hook: str) -> bool:
        return bool(getattr(self._manager.hook, hook).get_hookimpls())

    def _ask(self, hook: str, **arguments: object) -> Any:
        """The first answer, or None if there is none.

        Raises:
            PluginError: a plugin fails, or a wrapper drops the answer.
        """
        last_answer.forget()
        answer = self._call[hook](**arguments)
        if answer is None:
            dropped = "" if last_answer.guard is None else "None in place of an answer"
            refuse(last_answer.guard, hook, dropped)
        return answer

    def _answer(self, hook: str, **arguments: object) -> Any:
        """The first answer, which there must be."""
        answer = self._ask(hook, **arguments)
        if answer is None:
            told = ", ".join(type(argument).__name__ for argument in arguments.values())
            raise PluginError(f"no plugin answers {hook} for {told}")
        return answer

    def _choose(
        self,
        hook: str,
        take: Callable[[Any], Any],
        check: Callable[[Any, Any], str],
        ctx: object,
    ) -> Any:
        """A plugin's answer as `take` has it, or the built-in's where none has a
        possible one."""
        if hook in self._is_replaced:
            try:
                answer = self._answer(hook, ctx=ctx)
                guard = last_answer.guard  # its methods may call hooks
                with blaming(guard or hook, hook):
                    answer = take(answer)
                refuse(guard, hook, checks.verdict(check, answer, ctx))
            except Exception as error:
                self._report(hook, error)
            else:
                return answer
        return self._built_in[hook](ctx=ctx)

    def _report(self, hook: str, error: Exception) -> None:
        """Log that a choice has failed; not at each step, where it always does."""
        self._failed[hook] += 1
        times = self._failed[hook]
        if times <= MOST_REPORTS:
            logger.exception("the built-in answers %s instead: %s", hook, error)
        if times == MOST_REPORTS or not times % REPORT_EVERY:
            logger.error(
                "plugins failed in %s %d times; from now on only every %dth time is "
                "reported, last was: %s",
                hook,
                times,
                REPORT_EVERY,
                error,
            )

    def _verify(
        self, hook: str, check: Callable[..., str], answer: object, *rest: object
    ) -> None:
        """Refuse the last answer if something is wrong with it."""
        guard = last_answer.guard  # its methods may call hooks
        refuse(guard, hook, checks.verdict(check, answer, *rest))

    def _tell(self, hook: str, **arguments: object) -> None:
        try:
            getattr(self._manager.hook, hook)(**arguments)
        except Exception as error:  # of a wrapper: listeners fail for themselves
            logger.exception("a wrapper of %s failed: %s", hook, error)
