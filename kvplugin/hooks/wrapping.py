"""How a wrapper is run: a generator with one yield, around the other plugins."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from pluggy import Result

Wrapper = Generator[Any, Any, Any]


def begin(wrapper: Wrapper) -> None:
    """Run a wrapper up to its yield.

    Raises:
        RuntimeError: it has none.
    """
    try:
        next(wrapper)
    except StopIteration:
        raise RuntimeError("a wrapper must yield") from None


def finish(wrapper: Wrapper, outcome: object, error: BaseException | None) -> Any:
    """Run the rest of a wrapper with what the others answered or raised.

    Returns:
        What it answers.

    Raises:
        RuntimeError: it yields once more.
    """
    try:
        if error is None:
            wrapper.send(outcome)
        else:
            wrapper.throw(error)
    except StopIteration as end:
        return end.value
    wrapper.close()
    raise RuntimeError("a wrapper must yield only once")


def answer_of(outcome: Any) -> Any:
    """The answer that a wrapper is given: itself, or inside pluggy's `Result`."""
    if not isinstance(outcome, Result):
        return outcome
    return outcome.exception or outcome.get_result()
