"""Oracle 5: whoever has work left gets on with it."""

from collections.abc import Mapping
from typing import Any, Final

LIMIT: Final = 10_000
"""Observations of a run that ends, at most."""
_RECENT: Final = 10
"""Last observations of which the message says what changed."""


class ProgressWatch:
    """The state must not repeat while work remains, and work must end some day.

    A state is anything with a `repr`, best a dict. It has what the future depends on
    and nothing else: queues, tokens, free and held blocks, what each step or transfer
    under way will do. Not in it: numbers of steps, times, counters, ids drawn anew. A
    state with one of those never repeats, and a run that hangs is then found at the
    `limit` only; the message names the fields that went on changing.

    Args:
        limit: observations at most between two that `waits_for_others`.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._seen: dict[str, int] = {}
        self._recent: list[Any] = []
        self._steps = 0

    def observe(self, state: Any, *, waits_for_others: bool = False) -> None:
        """The state after a step that left work to do.

        Args:
            state: see the class; compared by its `repr`.
            waits_for_others: something outside, say a transfer that the test holds,
                decides when it goes on: what was seen so far may come again.

        Raises:
            AssertionError: the same state was seen before, or too many were.
        """
        self._steps += 1
        if waits_for_others:
            self._seen.clear()
            return
        first = self._seen.setdefault(repr(state), self._steps)
        if first != self._steps:
            raise AssertionError(
                f"no progress: the state after observation {self._steps} is that after "
                f"{first}: {state}"
            )
        self._recent = [*self._recent[1 - _RECENT :], _copy(state)]
        if len(self._seen) >= self._limit:
            raise AssertionError(
                f"no progress: work is left after {self._limit} observations; lately "
                f"{_changing(self._recent)} changed: {state}"
            )


def _copy(state: Any) -> Any:
    """The fields as they are now: a state may share lists with what it describes."""
    if isinstance(state, Mapping):
        return {name: repr(value) for name, value in state.items()}
    return repr(state)


def _changing(states: list[Any]) -> str:
    """Which fields differ."""
    last = states[-1]
    if not isinstance(last, dict):
        return "the state"
    names = [
        name for name in last if any(s[name] != last[name] for s in states if name in s)
    ]
    return f"only {names}" if len(names) < len(last) else "all fields"
